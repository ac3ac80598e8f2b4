"""What the layers of a model put out, what they write to, and their FLOPs, found on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..models import Model, make_layer
from .tensors import Spec, Tensors, resolved


def handed_on(output: torch.Tensor | Tensors) -> Tensors:
    """What a layer put out, as the next one gets it: contiguous, be it in the same stage or another, since dropout
    draws in the order of memory."""
    tensors = output if isinstance(output, tuple) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a layer returned a {type(tensor).__name__}: return a tensor or a tuple of tensors")
    return tuple(resolved(tensor.contiguous()) for tensor in tensors)


def segment_of(layer: nn.Module) -> Callable[[Tensors], Tensors]:
    """A layer by itself."""
    return lambda tensors: handed_on(layer(*tensors))


@dataclass(frozen=True)
class Trace:
    """What a pass on the meta device finds: for each layer, what it puts out, and its forward's FLOPs."""

    outputs: tuple[tuple[Spec, ...], ...]
    flops: tuple[int, ...]


class Writes(NamedTuple):
    """What the forward of a layer in training writes to, beside what it makes itself: whether to what it is given, and
    to which of its buffers."""

    inputs: bool
    buffers: tuple[str, ...]


def writes_of(layer: nn.Module, entering: Sequence[Spec]) -> Writes:
    """Those of a layer on the meta device, once it has filled its caches."""
    layer.train()
    for tensors in (_on_meta(entering), _on_meta(entering)):
        before = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
        with torch.no_grad(), suppress(Exception):  # what fails here fails where it is traced or trained, and says so
            layer(*tensors)
    saved = layer.state_dict().keys()

    def is_written(name: str, buffer: torch.Tensor) -> bool:
        """One that is no state may be made anew, as caches are."""
        earlier, version = before.get(name, (None, 0))
        return buffer._version != version if buffer is earlier else name in saved

    found = tuple(name for name, buffer in layer.named_buffers() if is_written(name, buffer))
    return Writes(any(tensor._version for tensor in tensors), found)


def trace(model: Model, inputs: tuple[Spec, ...], dtype: torch.dtype = torch.float32) -> Trace:
    """Find out without memory or arithmetic, layers made by one factory once for each shape."""
    return _trace(weakref.ref(model), inputs, dtype)


@lru_cache(maxsize=256)
def _trace(of: weakref.ref[Model], inputs: tuple[Spec, ...], dtype: torch.dtype) -> Trace:
    """What is remembered keeps no model in memory: it may have all the weights that were built."""
    model = of()
    assert model is not None
    one_layer = cache(lambda factory, entering: _trace_layer(model, model.layers.index(factory), entering, dtype))
    outputs, flops = [], []
    entering = inputs
    for factory in model.layers:
        entering, layer_flops = one_layer(factory, entering)
        outputs.append(entering)
        flops.append(layer_flops)
    return Trace(tuple(outputs), tuple(flops))


def _trace_layer(
    model: Model, index: int, entering: tuple[Spec, ...], dtype: torch.dtype
) -> tuple[tuple[Spec, ...], int]:
    layer = make_layer(model, index, seed=0, dtype=dtype, device="meta").eval()
    tensors = _on_meta(entering)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        leaving = handed_on(layer(*tensors))
    return tuple(Spec(tuple(t.shape), t.dtype) for t in leaving), counter.get_total_flops()


def _on_meta(specs: Sequence[Spec]) -> Tensors:
    return tuple(torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs)
