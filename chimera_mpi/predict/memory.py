"""What a schedule keeps in memory."""

from __future__ import annotations

from collections import Counter, defaultdict

from ..schedule import Kind, Schedule, walk

# The op that frees what a forward keeps: the whole backward, or its second half.
_FREES = (Kind.BACKWARD, Kind.WEIGHT)


def peak_activations(schedule: Schedule) -> list[int]:
    """The most micro-batch activations that each worker holds at once, counted over its stages."""
    peaks = []
    for order in schedule.orders:
        live = peak = 0
        for op in order:
            live += (op.kind is Kind.FORWARD) - (op.kind in _FREES)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def weight_versions(schedule: Schedule) -> list[int]:
    """The most versions of one stage's weights that each worker must keep, the current one included."""
    now: Counter = Counter()
    held: dict[tuple, Counter] = defaultdict(Counter)
    used: dict[tuple, int] = {}
    peaks = [0] * schedule.depth
    for worker, op in walk(schedule):
        if op.kind is Kind.FORWARD:
            used[op[1:]] = now[op.place]
            held[op.place][now[op.place]] += 1
        elif op.kind in _FREES:
            held[op.place] -= Counter([used.pop(op[1:])])
        elif op.kind is Kind.UPDATE:
            now[op.place] += 1
        peaks[worker] = max(peaks[worker], len({now[op.place], *held[op.place]}))
    return peaks
