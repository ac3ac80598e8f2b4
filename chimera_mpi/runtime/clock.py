"""One clock for all ranks, and what measures ops by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from ..schedule import Op
from ..timeline import Span
from .waiting import Patience

ROUNDS = 16
T = TypeVar("T")
Lap = tuple[Op, T, T]


def aligned_clock(world: MPI.Comm, patience: Patience) -> Callable[[], float]:
    """A clock in seconds that reads the same on all ranks, to about half a message's way. Collective.

    Each rank asks rank 0 for the time; the question that came back soonest tells the difference best.
    """
    if world.rank == 0:
        for rank in range(1, world.size):
            for _ in range(ROUNDS):
                question = np.empty(1)
                patience.wait(world.Irecv(question, rank))
                answer = np.array([time.perf_counter()])
                patience.wait(world.Isend(answer, rank))
        return time.perf_counter
    offset = min(_ask(world, patience) for _ in range(ROUNDS))[1]
    return lambda: time.perf_counter() + offset


def _ask(world: MPI.Comm, patience: Patience) -> tuple[float, float]:
    """Seconds of the round trip, and how far rank 0's clock is ahead."""
    question, answer = np.zeros(1), np.empty(1)
    asked = time.perf_counter()
    patience.wait(world.Isend(question, 0), world.Irecv(answer, 0))
    answered = time.perf_counter()
    return answered - asked, answer[0] - (asked + answered) / 2


class Stopwatch:
    """Measures ops by the clock: when one returns, its work is done."""

    def __init__(self, clock: Callable[[], float]):
        self.read = clock

    def spans(self, worker: int, laps: Sequence[Lap[float]]) -> list[Span]:
        """What was read before and after each op, as spans."""
        return [Span(worker, op, start, end) for op, start, end in laps]


class Tick(Protocol):
    """A point in the work of a device. `start.elapsed_time(end)` is in milliseconds, once both are done."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class DeviceStopwatch:
    """Measures ops by events among their work, which goes on after they have returned.

    All are read against one last event, whose time the clock tells: one wait for the device a step.
    """

    def __init__(self, clock: Callable[[], float], tick: Callable[[], Tick]):
        self.clock, self.read = clock, tick

    def spans(self, worker: int, laps: Sequence[Lap[Tick]]) -> list[Span]:
        last = self.read()
        last.synchronize()
        now_s = self.clock()
        return [
            Span(worker, op, *(now_s - tick.elapsed_time(last) / 1e3 for tick in (start, end)))
            for op, start, end in laps
        ]
