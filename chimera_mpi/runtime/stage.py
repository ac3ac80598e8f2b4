"""A stage: a run of a model's layers, and what crosses its boundaries."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from ..models import Model, keyed_seed, make_layer
from ..predict.partition import Recompute
from ..schedule import Kind, Op, Schedule
from .device import CPU, generators
from .tensors import Spec, Tensors, has_gradient
from .trace import Trace, handed_on, trace

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
        return (COUNT, *(spec for spec in entering if has_gradient(spec.dtype)))
