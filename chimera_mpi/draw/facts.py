"""What a drawing shows besides the ops: the bubbles, the memory, the times on the axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..schedule import COMPUTE, HOLDS
from ..timeline import Span


def gaps(row: Sequence[Span], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """The stretches of [begin_s, end_s] in which a worker is in neither forward nor backward."""
    busy = [(span.start_s, span.end_s) for span in row if span.op.kind in COMPUTE]
    edges = [(begin_s, begin_s), *busy, (end_s, end_s)]
    return [(before[1], after[0]) for before, after in pairwise(edges) if after[0] > before[1]]


class Level(NamedTuple):
    """A stretch of time in which a worker holds `live` micro-batch activations, over all its stages."""

    start_s: float
    end_s: float
    live: int


def memory(row: Sequence[Span], begin_s: float, end_s: float) -> list[Level]:
    """The activations that a worker holds over time. An op takes one as it starts and gives one back as it ends."""
    changes = [(span.start_s if held > 0 else span.end_s, held) for span in row if (held := HOLDS[span.op.kind])]
    levels, live, since = [], 0, begin_s
    for when, change in [*sorted(changes), (end_s, 0)]:
        if when > since:
            levels.append(Level(since, when, live))
            since = when
        live += change
    return levels


def ticks(total: float, most: int) -> list[float]:
    """Round times from 0 to `total`, at most about `most` of them."""
    if total <= 0:
        return [0.0]
    exponent = -12
    while True:
        for mantissa in (1, 2, 5):
            step = mantissa * 10.0**exponent
            if total / step <= most:
                return [step * i for i in range(int(total / step + 1e-9) + 1)]
        exponent += 1
