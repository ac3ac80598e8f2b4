"""What a schedule keeps in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..schedule import COMPUTE, Kind, Op, Place, Schedule, used_versions

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
    """The most versions of one stage's weights that each worker must keep, the current one included.

    A version is kept from the update that makes it to the last op that uses it (see `used_versions`).
    """
    used = used_versions(schedule)
    return [max(_versions_kept(order, used), default=1) for order in schedule.orders]


def _versions_kept(order: tuple[Op, ...], used: dict[Op, int]) -> Iterator[int]:
    """How many versions of its stage are kept after each op of a worker."""
    last_use = {(op.place, used[_forward(op)]): at for at, op in enumerate(order) if op.kind in COMPUTE}
    kept: dict[Place, list[int]] = defaultdict(lambda: [0])
    for at, op in enumerate(order):
        versions = kept[op.place]
        if op.kind is Kind.UPDATE:
            versions.append(versions[-1] + 1)
        versions[:-1] = [v for v in versions[:-1] if last_use.get((op.place, v), -1) >= at]
        yield len(versions)


def _forward(op: Op) -> Op:
    return op._replace(kind=Kind.FORWARD)
