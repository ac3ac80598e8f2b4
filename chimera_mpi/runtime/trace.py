"""What the layers of a model put out, and their FLOPs, found on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

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


@lru_cache(maxsize=256)
def trace(model: Model, inputs: tuple[Spec, ...], dtype: torch.dtype = torch.float32) -> Trace:
    """Find out without memory or arithmetic, layers made by one factory once for each shape."""
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
    tensors = (torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in entering)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        leaving = handed_on(layer(*tensors))
    return tuple(Spec(tuple(t.shape), t.dtype) for t in leaving), counter.get_total_flops()
