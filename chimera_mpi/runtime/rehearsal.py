"""Rehearse a schedule: the runtime as it trains, with real messages, on stages that sleep instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from ..models.emulated import NUMBER_BYTES, Durations, Sleeper, emulated
from ..schedule import Schedule
from ..timeline import Span
from .clock import aligned_clock
from .grid import Grid
from .mailbox import Spec, Tensors
from .optimizer import Recipe
from .pipeline import Pipeline, Settings
from .stage import Recompute
from .waiting import Patience
from .worker import MicroBatch, Targets

HEAD_START_S = 5e-3  # in which all ranks hear when a step begins
ROUND_TRIPS = 21


@dataclass(frozen=True)
class Emulation:
    """What is slept and sent. The times are those of 1/depth of the model, shared out over smaller stages."""

    forward_s: float
    input_s: float
    weight_s: float
    message_bytes: int
    gradient_bytes: int = NUMBER_BYTES
    recompute: bool = False
    progress_thread: bool = False

    def durations(self, schedule: Schedule) -> Durations:
        """Those of a stage."""
        share = schedule.depth / schedule.stages
        return Durations(self.forward_s * share, self.input_s * share, self.weight_s * share)


class Measured(NamedTuple):
    """One step: from the moment when all ranks began until the last was done, and the sleep that the rank which
    overslept most had beyond what was asked for."""

    seconds: float
    overshoot_s: float


class StepTimer:
    """Lets all ranks begin at one moment, and finds when the last was done. Owned by all ranks of `world`."""

    def __init__(self, world: MPI.Comm, patience: Patience, sleeper: Sleeper):
        self.world, self.patience, self.sleeper = world, patience, sleeper
        self.clock = aligned_clock(world, patience)

    def time(self, act: Callable[[], object]) -> Measured:
        """Collective; all ranks learn the same."""
        (latest_s,) = self._largest(self.clock())
        start_s = latest_s + HEAD_START_S
        self.sleeper.until(time.perf_counter() + start_s - self.clock())
        overslept_s = self.sleeper.overshoot_s
        act()
        end_s, overshoot_s = self._largest(self.clock(), self.sleeper.overshoot_s - overslept_s)
        return Measured(end_s - start_s, overshoot_s)

    def _largest(self, *numbers: float) -> list[float]:
        table = np.array(numbers)
        self.patience.wait(self.world.Iallreduce(MPI.IN_PLACE, table, MPI.MAX))
        return list(map(float, table))


class Rehearsal:
    """A schedule on the ranks of `grid`. All of them must build it alike; a step is collective."""

    def __init__(self, grid: Grid, schedule: Schedule, emulation: Emulation, sleeper: Sleeper):
        model = emulated(
            schedule.stages,
            emulation.durations(schedule),
            emulation.message_bytes,
            sleeper,
            emulation.gradient_bytes * grid.depth // schedule.stages,
        )
        settings = Settings(
            recipe=Recipe("sgd", weight_decay=0.0),
            recompute=Recompute("stage" if emulation.recompute else "none"),
            progress_thread=emulation.progress_thread,
        )
        inputs = [[Spec((1, 1), torch.float32)]] * schedule.micro_batches
        self.pipeline = Pipeline(grid, schedule, model, inputs, settings)
        self.first = grid.replica * schedule.micro_batches

    def step(self) -> list[Span]:
        """A whole step, all-reduce and update included, that leaves the weights as they are."""
        return self.pipeline.run(self._micro_batch, 0, lambda step: 0.0)[0]

    def _micro_batch(self, index: int) -> MicroBatch:
        number = self.first + index
        return MicroBatch(0, number, partial(number_and_target, number))


def number_and_target(number: int) -> tuple[Tensors, Targets]:
    """Of a micro-batch of one sample. Its input asks for a gradient, so that the first stage has a way to its input as
    all others have: in a real model it is as deep as they are, and its data is all that needs none."""
    return (torch.full((1, 1), 1 + number / 8, requires_grad=True),), torch.zeros(1, 1)


def transfers_s(grid: Grid, size_bytes: int) -> list[float]:
    """Seconds that a message takes one way from each worker to the next, as this runtime waits for it. Collective.

    Half of a round trip, the median of several; one pair after the other, all groups at once.
    """
    comm, patience, data = grid.pipeline, grid.node.patience, torch.zeros(max(size_bytes, 1), dtype=torch.uint8)
    buffer = MPI.buffer.fromaddress(data.data_ptr(), data.nbytes)
    found: list[float] = []
    for left in range(comm.size - 1):
        patience.wait(comm.Ibarrier())
        if comm.rank == left:
            found.append(median(_round_trip(comm, patience, buffer, left + 1) for _ in range(ROUND_TRIPS)) / 2)
        elif comm.rank == left + 1:
            for _ in range(ROUND_TRIPS):
                patience.wait(comm.Irecv(buffer, left))
                patience.wait(comm.Isend(buffer, left))
    patience.wait(comm.Ibarrier())
    return [seconds for of_rank in grid.world.allgather(found) for seconds in of_rank]


def _round_trip(comm: MPI.Comm, patience: Patience, buffer: MPI.buffer, other: int) -> float:
    start_s = time.perf_counter()
    patience.wait(comm.Isend(buffer, other))
    patience.wait(comm.Irecv(buffer, other))
    return time.perf_counter() - start_s
