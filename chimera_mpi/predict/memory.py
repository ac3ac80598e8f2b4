"""What a schedule keeps in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..schedule import COMPUTE, Kind, Op, Place, Schedule, used_versions
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
    timeline: Timeline,
    activation_bytes: PerStage = 1,
    weight_bytes: PerStage = 0,
    deferred_bytes: PerStage | None = None,
    working_bytes: PerStage = 0,
) -> tuple[tuple[Level, ...], ...]:
    """What each worker holds over time, in bytes if given so for each stage, else in activations.

    A forward takes `activation_bytes` of its stage as it starts; the end of its backward gives them back. Where
    that is split, the end of the input gradient leaves `deferred_bytes` of them, as many by default, for the
    weight gradient: without what the way to the inputs alone needed, but with the gradients caught on it.
    `working_bytes` a backward or input gradient has in addition as long as it lasts, such as a graph that is
    computed anew. `weight_bytes` of each stage a worker has, and of each version of them that it must keep (see
    `weight_versions`), it holds all the time.
    """
    versions = weight_versions(timeline.schedule)
    deferred = activation_bytes if deferred_bytes is None else deferred_bytes
    return tuple(
        tuple(
            _levels(
                row,
                versions[worker] * _weights(timeline.schedule, worker, weight_bytes),
                lambda op: _taken(
                    op.kind, *(at_stage(size, op.stage) for size in (activation_bytes, deferred, working_bytes))
                ),
            )
        )
        for worker, row in enumerate(timeline.rows)
    )


def _weights(schedule: Schedule, worker: int, weight_bytes: PerStage) -> float:
    return sum(at_stage(weight_bytes, stage) for _, stage in schedule.places(worker))


def _levels(row: tuple[Span, ...], held: float, taken: Callable[[Op], tuple[float, float]]) -> Iterator[Level]:
    yield Level(0, held)
    for span in row:
        for when_s, change in zip((span.start_s, span.end_s), taken(span.op), strict=True):
            if change:
                held += change
                yield Level(when_s, held)


def _taken(kind: Kind, activation: float, deferred: float, working: float) -> tuple[float, float]:
    """What an op takes as it starts and as it ends, less than 0 where it gives back."""
    match kind:
        case Kind.FORWARD:
            return activation, 0
        case Kind.BACKWARD:
            return working, -working - activation
        case Kind.INPUT:
            return working, deferred - working - activation
        case Kind.WEIGHT:
            return 0, -deferred
    return 0, 0


def peak_bytes(
    timeline: Timeline,
    activation_bytes: PerStage = 1,
    weight_bytes: PerStage = 0,
    deferred_bytes: PerStage | None = None,
    working_bytes: PerStage = 0,
) -> tuple[Level, ...]:
    """The most that each worker holds at once, and when it first does (see `memory_curve`)."""
    curves = memory_curve(timeline, activation_bytes, weight_bytes, deferred_bytes, working_bytes)
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
