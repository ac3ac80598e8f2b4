"""Gradients in flat buffers, summed over the replicas of their stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from ..schedule import Place, Schedule
from .grid import Grid, holders
from .stage import Stage
from .waiting import Patience


@dataclass(eq=False)
class Bucket:
    """Gradients that the same ranks sum, in one buffer whose pieces are the parameters' `.grad`.

    `parameters` are those of each copy of a stage on this worker that adds to it. It is reduced once the copies in
    `after` are ready, and begins anew from zero once all have used it.
    """

    flat: torch.Tensor  # the gradients, and behind them the count or padding
    count: torch.Tensor  # of targets, in one element; empty where another bucket of the stage has it
    parameters: dict[Place, list[nn.Parameter]]  # in the order of the buffer, the same ones at each place
    comm: MPI.Comm
    after: set[Place]
    ready: set[Place] = field(default_factory=set)
    used: set[Place] = field(default_factory=set)
    averaged: bool = False
    requests: list[MPI.Request] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in next(iter(self.parameters.values())))

    @property
    def mine(self) -> torch.Tensor:
        """The summed gradients that this rank has a use for."""
        return self.flat[: self.size]

    @property
    def answers(self) -> bool:
        """Whether this rank adds the squares of what is `mine` to the norm of the model."""
        return self.comm.rank == 0

    def start(self, place: Place) -> None:
        self.ready.add(place)
        if self.ready == self.after:
            self.ready.clear()
            if self.comm.size > 1:
                self.requests = self.reduce()

    def reduce(self) -> list[MPI.Request]:
        return [self.comm.Iallreduce(MPI.IN_PLACE, self.flat.numpy(), MPI.SUM)]

    def average(self, targets: float) -> float:
        """Divide by the number of targets; the sum of squares for which this rank answers."""
        if self.averaged:
            return 0.0
        self.averaged = True
        self.mine.div_(max(targets, 1.0))
        return self.mine.double().square().sum().item() if self.answers else 0.0

    def release(self, place: Place) -> None:
        self.used.add(place)
        if self.used == set(self.parameters):
            self.used.clear()
            self.averaged = False
            self.flat.zero_()
            self.count.zero_()


class ShardedBucket(Bucket):
    """A bucket of which each rank gets the sum of its share only (ZeRO, Rajbhandari et al. 2020).

    The buffer is padded to equal shares; the sum of this rank's arrives at its beginning.
    """

    @property
    def mine(self) -> torch.Tensor:
        return self.flat[: len(self.flat) // self.comm.size]

    @property
    def answers(self) -> bool:
        return True

    def reduce(self) -> list[MPI.Request]:
        return [
            self.comm.Ireduce_scatter_block(MPI.IN_PLACE, self.flat.numpy(), MPI.SUM),
            self.comm.Iallreduce(MPI.IN_PLACE, self.count.numpy(), MPI.SUM),
        ]


class Gradients:
    """All gradients of one worker.

    Each stage has a bucket, shared by its copies on this worker, that ends in the number of target tokens:
    losses are sums, their gradients are summed over micro-batches and replicas, and divided once, by the
    count that rode with them. Tied parameters have a bucket of their own, summed over all that hold one of
    the tied stages.

    Ranks that share buckets start to reduce them in one order: workers are through with later stages first, and a
    tied parameter counts as of the earliest stage that has it, whichever stages a rank holds.
    """

    def __init__(
        self,
        grid: Grid,
        schedule: Schedule,
        stages: Mapping[Place, Stage],
        ties: Sequence[Tie],
        patience: Patience,
        sharded: bool = False,
    ):
        """With `sharded` each replica of a stage has the sums of a share of its gradients; of tied ones, of all."""
        self.patience = patience
        self._pieces: dict[nn.Parameter, torch.Tensor] = {}
        self._own: dict[Place, Bucket] = {}
        self._of_place: dict[Place, list[Bucket]] = {place: [] for place in stages}
        self._started_by: dict[Place, list[Bucket]] = {place: [] for place in stages}
        ties = sorted(ties, key=lambda tie: -min(tie.stages))
        copies = [find_copies(tie, stages) for tie in ties]
        tied = {id(parameter) for tie in copies for parameters in tie.values() for parameter in parameters}
        for stage in sorted({stage for _, stage in stages}, reverse=True):
            own = {
                place: [p for p in trainable(module) if id(p) not in tied]
                for place, module in stages.items()
                if place[1] == stage
            }
            comm = grid.replicas(holders(schedule, [stage]))
            kind = ShardedBucket if sharded and comm.size > 1 else Bucket
            self._own.update(dict.fromkeys(own, self._add(kind, own, comm, set(own), counted=True)))
        for tie, here in zip(ties, copies, strict=True):
            if here:
                after = {place for place in stages if place[1] >= min(tie.stages)}
                self._add(Bucket, here, grid.replicas(holders(schedule, tie.stages)), after, counted=False)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where the gradient of a parameter adds up; None for one that is frozen."""
        return self._pieces.get(parameter)

    def bucket(self, place: Place) -> Bucket:
        """That of the stage's own parameters, without tied ones."""
        return self._own[place]

    def count(self, place: Place, targets: torch.Tensor) -> None:
        """Add a micro-batch's number of target tokens to those whose gradients `place` has summed."""
        self._own[place].count += targets

    def start(self, place: Place) -> None:
        """The gradients of `place` are whole: start their all-reduce."""
        for bucket in self._started_by[place]:
            bucket.start(place)

    def poke(self) -> None:
        """Drive the progress of the all-reduces under way."""
        for buckets in self._of_place.values():
            for bucket in buckets:
                MPI.Request.Testall(bucket.requests)

    def settle(self, place: Place) -> float:
        """Wait for the sums over all replicas, and make them means over the target tokens of the mini-batch.

        Returns the sum of their squares, of those for which this rank answers: over all places of all
        ranks every parameter of the model is in it once.
        """
        self.patience.wait(*(request for bucket in self._of_place[place] for request in bucket.requests))
        targets = self._own[place].count.item()
        return math.fsum(bucket.average(targets) for bucket in self._of_place[place])

    def settled(self, place: Place) -> bool:
        """Whether `settle` has been called since the last `release`."""
        return self._own[place].averaged

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in {bucket for buckets in self._of_place.values() for bucket in buckets}:
            bucket.mine.mul_(factor)

    def release(self, place: Place) -> None:
        """The weights of `place` are updated: its gradients begin anew from zero."""
        for bucket in self._of_place[place]:
            bucket.release(place)

    def _add(
        self,
        kind: type[Bucket],
        parameters: dict[Place, list[nn.Parameter]],
        comm: MPI.Comm,
        after: set[Place],
        counted: bool,
    ) -> Bucket:
        """A bucket whose pieces are the gradients of the parameters, which are the same ones at each place."""
        first = next(iter(parameters.values()))
        size = sum(p.numel() for p in first)
        dtype = accumulated_in(first[0].dtype) if first else torch.float64
        if kind is ShardedBucket:
            flat, count = torch.zeros(-(-size // comm.size) * comm.size, dtype=dtype), torch.zeros(1, dtype=dtype)
            bucket: Bucket = ShardedBucket(flat, count, parameters, comm, after)
        else:
            flat = torch.zeros(size + counted, dtype=dtype)
            bucket = Bucket(flat, flat[size:], parameters, comm, after)
        for same in parameters.values():
            for p, piece in zip(same, flat[:size].split([p.numel() for p in same]), strict=True):
                self._pieces[p] = piece.view_as(p)
                bind(p, self._pieces[p])
        for place in parameters:
            self._of_place[place].append(bucket)
        for place in after:
            self._started_by[place].append(bucket)
        return bucket


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Gradients of half precision add up, and are reduced, in single."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def bind(parameter: nn.Parameter, piece: torch.Tensor) -> None:
    """Let autograd add the gradient of `parameter` to `piece`, which may have a wider type."""
    if piece.dtype == parameter.dtype:
        parameter.grad = piece
    else:
        parameter.register_post_accumulate_grad_hook(partial(_pour, piece))


def _pour(piece: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        piece.add_(parameter.grad)
        parameter.grad = None


class Clip:
    """Clips gradients by their norm over the whole model."""

    def __init__(self, world: MPI.Comm, limit: float, patience: Patience):
        self.world, self.limit, self.patience = world, limit, patience

    def factor(self, squares: float) -> float:
        """What to multiply all gradients by. `squares` is this rank's share; collective over all ranks."""
        total = np.array([squares])
        self.patience.wait(self.world.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return min(1.0, self.limit / (math.sqrt(total[0]) + 1e-6))


class Tie(NamedTuple):
    """A parameter that several stages hold: (stage, layer, name) of each copy."""

    copies: tuple[tuple[int, int, str], ...]

    @property
    def stages(self) -> set[int]:
        return {stage for stage, _, _ in self.copies}


def ties_across(model_ties: Sequence[Sequence[tuple[int, str]]], cuts: Sequence[range]) -> list[Tie]:
    """Those ties of a model, groups of (layer, parameter name), that the cut into stages separates."""
    stage_of = {layer: stage for stage, layers in enumerate(cuts) for layer in layers}
    ties = [Tie(tuple((stage_of[layer], layer, name) for layer, name in group)) for group in model_ties]
    return [tie for tie in ties if len(tie.stages) > 1]


def trainable(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def find_copies(tie: Tie, stages: Mapping[Place, Stage]) -> dict[Place, list[nn.Parameter]]:
    """This worker's copies of a tied parameter; a stage that ties layers of its own has one."""
    copies: dict[Place, list[nn.Parameter]] = {}
    for place, stage in stages.items():
        here = [stage.layer(layer).get_parameter(name) for at, layer, name in tie.copies if at == place[1]]
        if here and here[0].requires_grad:
            copies[place] = here[:1]
    return copies
