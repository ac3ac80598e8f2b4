"""What a schedule keeps in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ..schedule import COMPUTE, HOLDS, Kind, Op, Place, Schedule, used_versions
from ..schedule.list_scheduler import peaks
from ..timeline import Span, Timeline
from .costs import PerStage, at_stage


def peak_activations(schedule: Schedule) -> list[int]:
    """The most micro-batch activations that each worker holds at once, counted over its stages."""
    return [int(peak) for peak in peaks(schedule)]


class Level(NamedTuple):
    """What a worker holds from a moment on."""

    start_s: float
    size_bytes: float


def memory_curve(
    timeline: Timeline, activation_bytes: PerStage = 1, weight_bytes: PerStage = 0
) -> tuple[tuple[Level, ...], ...]:
    """What each worker holds over time, in bytes if given so for each stage, else in activations.

    A forward takes `activation_bytes` of its stage as it starts; the end of its backward, or of its weight
    gradient, gives them back. `weight_bytes` of each stage a worker has, and of each version of them that it
    must keep (see `weight_versions`), it holds all the time.
    """
    versions = weight_versions(timeline.schedule)
    return tuple(
        tuple(_levels(row, activation_bytes, versions[worker] * _weights(timeline.schedule, worker, weight_bytes)))
        for worker, row in enumerate(timeline.rows)
    )


def _weights(schedule: Schedule, worker: int, weight_bytes: PerStage) -> float:
    return sum(at_stage(weight_bytes, stage) for _, stage in schedule.places(worker))


def _levels(row: tuple[Span, ...], activation_bytes: PerStage, held: float) -> Iterator[Level]:
    yield Level(0, held)
    for span in row:
        size_bytes = at_stage(activation_bytes, span.op.stage)
        if change := HOLDS[span.op.kind]:
            held += change * size_bytes
            yield Level(span.start_s if change > 0 else span.end_s, held)


def peak_bytes(timeline: Timeline, activation_bytes: PerStage = 1, weight_bytes: PerStage = 0) -> tuple[Level, ...]:
    """The most that each worker holds at once, and when it first does (see `memory_curve`)."""
    curves = memory_curve(timeline, activation_bytes, weight_bytes)
    return tuple(max(levels, key=lambda level: level.size_bytes) for levels in curves)


def weight_versions(schedule: Schedule) -> list[int]:
    """The most versions of one stage's weights that each worker must keep, the current one included.

    A version is kept from the update that makes it to the last op that uses it (see `used_versions`).
    """
    if schedule.updates < 2:
        return [1] * schedule.depth
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
