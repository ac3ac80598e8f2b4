"""Does a schedule on this machine and this MPI equal one process? A user's own check of law 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ..models import Model, keyed_seed, make_layer
from ..schedule import Schedule
from .grid import Comm, Grid
from .mailbox import Spec, Tensors
from .optimizer import Recipe
from .pipeline import Pipeline, Settings
from .stage import handed_on
from .worker import MicroBatch, Targets

RATE = 0.1
RECIPE = Recipe("sgd", momentum=0.9)


class Difference(NamedTuple):
    """The largest difference in a stage's weights, relative to the largest of them, and on which rank."""

    stage: int
    rank: int
    relative: float


def parity(
    comm: Comm, schedule: Schedule, model: Model, batches: Sequence[tuple[Tensors, Targets]], settings: Settings
) -> list[Difference] | None:
    """Take two steps in float64 on (inputs, targets) micro-batches, of all replicas in order, and compare.

    Collective; the differences, one for each copy of each stage, are for rank 0.
    """
    grid = Grid(comm, schedule.depth)
    first = grid.replica * schedule.micro_batches
    specs = [[Spec(tuple(t.shape), t.dtype) for t in batches[first + n][0]] for n in range(schedule.micro_batches)]
    settings = replace(settings, dtype=torch.float64, recipe=RECIPE, clip=None)
    pipeline = Pipeline(grid, schedule, model, specs, settings)
    for step in range(2):
        pipeline.run(partial(_micro_batch, batches, step, first), step, lambda step: RATE)
    weights = comm.bcast(serial_weights(model, batches, settings.seed) if comm.rank == 0 else None)
    mine = [
        Difference(
            place[1], comm.rank, max((_difference(stage.layer(i), weights[i]) for i in stage.indices), default=0.0)
        )
        for place, stage in pipeline.stages.items()
    ]
    everyone = comm.gather(mine)
    grid.close()
    return None if everyone is None else sorted(d for of_rank in everyone for d in of_rank)


def _micro_batch(batches: Sequence[tuple[Tensors, Targets]], step: int, first: int, index: int) -> MicroBatch:
    return MicroBatch(step, first + index, lambda: batches[first + index])


def serial_weights(model: Model, batches: Sequence[tuple[Tensors, Targets]], seed: int) -> list[dict]:
    """The weights of each layer after the same two steps in one process, by name."""
    layers = [make_layer(model, index, seed, dtype=torch.float64) for index in range(len(model.layers))]
    tied = [[layers[index].get_parameter(name) for index, name in group] for group in model.tied]
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    optimizer = RECIPE.build(p for p in parameters if p.requires_grad)
    for step in range(2):
        sums = [_loss(model, layers, batch, seed, step, number) for number, batch in enumerate(batches)]
        for p in parameters:
            p.grad = None
        (sum(loss for loss, _ in sums) / sum(count for _, count in sums)).backward()
        for group in tied:
            whole = torch.stack([p.grad for p in group if p.grad is not None]).sum(dim=0)
            for p in group:
                p.grad = whole.clone()
        if optimizer:
            for parameter_group in optimizer.param_groups:
                parameter_group["lr"] = RATE
            optimizer.step()
    return [{name: p.detach() for name, p in layer.named_parameters()} for layer in layers]


def _loss(model: Model, layers: Sequence, batch: tuple[Tensors, Targets], seed: int, step: int, number: int) -> tuple:
    tensors, targets = batch
    for index, layer in enumerate(layers):
        torch.default_generator.manual_seed(keyed_seed(seed, step, number, index))
        tensors = handed_on(layer(*tensors))
    return model.loss(*tensors, targets)


def _difference(layer: torch.nn.Module, weights: dict) -> float:
    """The largest of the layer, infinite where a weight is not a number."""
    found = [0.0]
    for name, parameter in layer.named_parameters():
        size = weights[name].abs().max().clamp(min=1e-300)
        found.append(((parameter.detach().cpu() - weights[name]).abs().max() / size).nan_to_num(math.inf).item())
    return max(found)
