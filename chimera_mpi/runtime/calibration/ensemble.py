"""Ranks that measure together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..grid import Comm
from ..mailbox import Spec
from ..staging import Tensors
from ..waiting import Patience

MOST_REPEATS = 101
NAN = float("nan")
ALONE = (0, 0)  # the place of the only stage of a pipeline


@dataclass(frozen=True)
class Effort:
    """How much is measured. A point is measured `repeats` times at least, and more often as `point_s` has time for;
    larger ones are left out that would take more than `longest_s` at a time."""

    samples: tuple[int, ...]
    message_bytes: tuple[int, ...]
    sum_bytes: tuple[int, ...]
    trips: int
    repeats: int
    point_s: float
    longest_s: float


class Reading(NamedTuple):
    """Medians, in the order of what was timed, and how far apart the quarters of the repeats lie, as a share."""

    values: list[float]
    noise: float


class Ensemble:
    """Ranks that measure together, from one moment on and equally often. All methods are collective."""

    def __init__(self, comm: Comm, patience: Patience, effort: Effort):
        self.comm, self.patience, self.effort = comm, patience, effort

    def read(self, act: Callable[[], Sequence[float]]) -> Reading:
        """What `act` times, in seconds: nan for what this rank had no part in. The same on all ranks."""
        started = time.perf_counter()
        act()  # in which torch and MPI set themselves up
        longest_s = float(self._everyone([time.perf_counter() - started]).max())
        repeats = min(max(int(self.effort.point_s / max(longest_s, 1e-6)), self.effort.repeats), MOST_REPEATS)
        rows = []
        for _ in range(repeats):
            self.patience.wait(self.comm.Ibarrier())
            rows.append(list(act()))
        table = np.array(rows)
        quarters = np.quantile(table, (0.25, 0.5, 0.75), axis=0)
        of_ranks = self._everyone([*quarters[1], *(quarters[2] - quarters[0])])
        medians, spreads = of_ranks[:, : table.shape[1]], of_ranks[:, table.shape[1] :]
        took_part = ~np.isnan(medians).all(axis=0)
        values = [
            float(np.nanmedian(column)) if took else NAN for column, took in zip(medians.T, took_part, strict=True)
        ]
        noise = np.nanmedian(spreads / np.maximum(medians, 1e-9)) if took_part.any() else 0.0
        return Reading(values, float(noise))

    def least(self, number: float) -> float:
        return float(self._everyone([number]).min())

    def _everyone(self, numbers: Sequence[float]) -> np.ndarray:
        """One row a rank."""
        mine = np.array(numbers, dtype=np.float64)
        table = np.empty((self.comm.size, len(mine)))
        self.patience.wait(self.comm.Iallgather(mine, table))
        return table


def specs_of(tensors: Tensors) -> tuple[Spec, ...]:
    """What the tensors look like."""
    return tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
