"""What a drawing shows besides the ops: the bubbles, the memory, the reasons for waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..schedule import COMPUTE, Kind, Op, needs
from ..timeline import Span, Timeline


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
    """The activations that a worker holds over time: a forward adds one as it starts, the end of its
    backward (of the weight gradient, where the backward is split) frees it."""
    changes = [(span.start_s, 1) for span in row if span.op.kind is Kind.FORWARD]
    changes += [(span.end_s, -1) for span in row if span.op.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    levels, live, since = [], 0, begin_s
    for when, change in [*sorted(changes), (end_s, 0)]:
        if when > since:
            levels.append(Level(since, when, live))
            since = when
        live += change
    return levels


class Wait(NamedTuple):
    """What an op waited for: `cause` came last of all it needs; None if only its worker was busy."""

    cause: Op | None
    seconds: float  # how long its worker stood idle before it


def waits(timeline: Timeline) -> Iterator[tuple[Span, Wait]]:
    """Each span with the reason why it did not start earlier."""
    end_of = {span.op: span.end_s for span in timeline.spans}
    begin = min(span.start_s for span in timeline.spans)
    for row in timeline.rows:
        free = begin
        for span in row:
            found = [need for need in needs(timeline.schedule, span.op) if need in end_of]
            last = max(found, key=end_of.__getitem__, default=None)
            idle = max(span.start_s - free, 0)
            yield span, Wait(last if last is not None and (idle or end_of[last] >= free) else None, idle)
            free = max(free, span.end_s)


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
