"""What a schedule keeps in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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


class Sizes(NamedTuple):
    """What one micro-batch holds of a stage.

    A forward takes `activation_bytes` as it starts; the end of its backward gives them back. Where that is split, the
    end of the input gradient leaves `deferred_bytes` for the weight gradient: without what the way to the inputs alone
    needed, but with the gradients caught on it. A backward or input gradient has `working_bytes` in addition as long as
    it lasts, such as a graph that is computed anew, and a weight gradient `weighing_bytes`.
    """

    activation_bytes: float
    deferred_bytes: float
    working_bytes: float = 0
    weighing_bytes: float = 0

    def taken(self, kind: Kind) -> tuple[float, float]:
        """What an op takes as it starts and as it ends, less than 0 where it gives back."""
        activation, deferred, working, weighing = self
        match kind:
            case Kind.FORWARD:
                return activation, 0
            case Kind.BACKWARD:
                return working, -working - activation
            case Kind.INPUT:
                return working, deferred - working - activation
            case Kind.WEIGHT:
                return weighing, -weighing - deferred
        return 0, 0


def most_held(order: Sequence[Op], sizes: Sequence[Sizes]) -> float:
    """The most that the micro-batches of a worker hold at once, by the sizes of the stages; whatever its ops take."""
    taken = {(kind, stage): of_stage.taken(kind) for kind in COMPUTE for stage, of_stage in enumerate(sizes)}
    held = most = 0.0
    for kind, _, stage, _ in order:
        if kind in COMPUTE:
            at_start, at_end = taken[kind, stage]
            most = max(most, held + at_start)
            held += at_start + at_end
            most = max(most, held)
    return most


def memory_curve(
    timeline: Timeline,
    activation_bytes: PerStage = 1,
    weight_bytes: PerStage = 0,
    deferred_bytes: PerStage | None = None,
    working_bytes: PerStage = 0,
) -> tuple[tuple[Level, ...], ...]:
    """What each worker holds over time, in bytes if given so for each stage, else in activations (see `Sizes`).

    By default a split backward keeps all that it has. `weight_bytes` of each stage a worker has, and of each version
    of them that it must keep (see `weight_versions`), it holds all the time.
    """
    schedule = timeline.schedule
    versions = weight_versions(schedule)
    deferred = activation_bytes if deferred_bytes is None else deferred_bytes
    sizes = [
        Sizes(*(at_stage(size, stage) for size in (activation_bytes, deferred, working_bytes)))
        for stage in range(schedule.stages)
    ]
    return tuple(
        tuple(_levels(row, versions[worker] * _weights(schedule, worker, weight_bytes), sizes))
        for worker, row in enumerate(timeline.rows)
    )


def _weights(schedule: Schedule, worker: int, weight_bytes: PerStage) -> float:
    return sum(at_stage(weight_bytes, stage) for _, stage in schedule.places(worker))


def _levels(row: Sequence[Span], held: float, sizes: Sequence[Sizes]) -> Iterator[Level]:
    yield Level(0, held)
    for span in row:
        for when_s, change in zip((span.start_s, span.end_s), sizes[span.op.stage].taken(span.op.kind), strict=True):
            if change:
                held += change
                yield Level(when_s, held)


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
