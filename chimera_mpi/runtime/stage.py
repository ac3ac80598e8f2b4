"""A stage: a run of a model's layers, and what crosses its boundaries."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..models import Model, keyed_seed, make_layer
from ..predict.partition import Recompute
from ..schedule import Kind, Op, Schedule
from .device import CPU, generators
from .mailbox import Spec, Tensors

__all__ = ["COUNT", "Boundaries", "Recompute", "Stage", "Trace", "digest", "handed_on", "set_parameter", "trace"]

COUNT = Spec((), torch.float64)


class Stage(nn.Module):
    """Layers in a row. Before each layer's forward the generators are set by (seed, step, micro-batch, layer)."""

    def __init__(
        self,
        model: Model,
        layers: range,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ):
        super().__init__()
        self.seed, self.indices, self.generators = seed, layers, generators(device)
        self.layers = nn.ModuleList(make_layer(model, index, seed, dtype, device) for index in layers)
        self._share_tied(model)

    def forward(self, tensors: Tensors, layers: range, step: int, micro_batch: int) -> Tensors:
        """Run `layers`, of those of the stage; `micro_batch` counts over the whole step, whichever replica does it."""
        for index in layers:
            if self.training:
                for generator in self.generators:
                    generator.manual_seed(keyed_seed(self.seed, step, micro_batch, index))
            tensors = handed_on(self.layer(index)(*tensors))
        return tensors

    def layer(self, index: int) -> nn.Module:
        """The layer with this number in the model."""
        return self.layers[index - self.indices.start]

    def in_one_layer(self) -> set[nn.Parameter]:
        """The parameters that one of its layers has; those of several may get their gradients in parts."""
        layers_with = Counter(parameter for layer in self.layers for parameter in layer.parameters())
        return {parameter for parameter, layers in layers_with.items() if layers == 1}

    def _share_tied(self, model: Model) -> None:
        """Tied parameters of one stage are one parameter."""
        for group in model.tied:
            here = [(index, name) for index, name in group if index in self.indices]
            for index, name in here[1:]:
                set_parameter(self.layer(index), name, self.layer(here[0][0]).get_parameter(here[0][1]))


def handed_on(output: torch.Tensor | Tensors) -> Tensors:
    """What a layer put out, as the next one gets it: contiguous, be it in the same stage or another, since dropout
    draws in the order of memory."""
    tensors = output if isinstance(output, tuple) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a layer returned a {type(tensor).__name__}: return a tensor or a tuple of tensors")
    return tuple(tensor.contiguous() for tensor in tensors)


def digest(stage: nn.Module) -> str:
    """A hash of all parameters, to the bit."""
    found = hashlib.blake2b(digest_size=16)
    for name, parameter in stage.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, parameter)


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


class Boundaries:
    """The tensors of every message: activations forth; gradients, and the count of targets, back."""

    def __init__(self, schedule: Schedule, cuts: Sequence[range], traces: Sequence[Trace]):
        """`traces[n]` is that of micro-batch n."""
        self.schedule, self.cuts, self.traces = schedule, cuts, traces

    def __call__(self, op: Op) -> tuple[Spec, ...]:
        outputs = self.traces[op.index].outputs
        if op.kind is Kind.FORWARD:
            return outputs[self.cuts[op.stage][-1]]
        entering = outputs[self.cuts[op.stage - 1][-1]]
        return (COUNT, *(spec for spec in entering if spec.dtype.is_floating_point))
