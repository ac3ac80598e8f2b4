"""One clock for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from .waiting import Patience

ROUNDS = 16


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
