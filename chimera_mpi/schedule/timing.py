"""When the ops of a schedule start and end under given costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .ops import Kind, Op, Schedule, from_elsewhere, needs, walk


class OpCosts(Protocol):
    """What one has to know of costs to time a schedule: seconds, as any numbers."""

    def on(self, schedule: Schedule, /) -> OpCosts:
        """These costs, where they depend on the number of a stage's replicas, for those of `schedule`."""

    def seconds(self, op: Op, /) -> float:
        """How long `op` keeps its worker busy."""

    def transfer(self, op: Op, source: int, target: int, /) -> float:
        """How long what `op` made travels from worker to worker."""

    def allreduce(self, op: Op, /) -> float:
        """How long the all-reduce that `op` starts takes, once all replicas have started it."""

    @property
    def sends_block(self) -> bool:
        """Whether a worker is busy while what it sends is on its way."""

    @property
    def allreduces_queue(self) -> bool:
        """Whether a worker's all-reduces take turns, as they do where one port carries them all."""


def timed(schedule: Schedule, costs: OpCosts) -> Iterator[tuple[int, Op, float, float]]:
    """Yield worker, op, start and end, in an order in which the ops can be done.

    An op starts once its worker is free and all it needs has arrived. An all-reduce runs in the background,
    from the moment its last replica starts it, and an update waits for it; where they queue, also once those
    that its worker has started before are done. Only sums and maxima are formed, so exact costs (int, Fraction)
    give exact times.
    """
    costs = costs.on(schedule)
    summed: list[float] = [0] * schedule.depth  # when a worker's all-reduces so far are done, if they queue
    free: list[float] = [0] * schedule.depth
    ready: dict[Op, float] = {}  # when what an op made is at hand where it was made
    pipes = schedule.pipes
    sends_to = _targets(schedule) if costs.sends_block else {}
    for worker, op in walk(schedule):
        start = free[worker]
        for need in needs(schedule, op):
            at = ready[need]
            if need.stage != op.stage and (source := pipes[need.pipe][need.stage]) != worker:
                at += costs.transfer(need, source, worker)
            if at > start:
                start = at
        end = start + costs.seconds(op)
        free[worker] = end + (costs.transfer(op, worker, sends_to[op]) if op in sends_to else 0)
        ready[op] = end
        if op.kind is Kind.REDUCE:
            ready[op] = max(start, summed[worker]) + costs.allreduce(op)
            if costs.allreduces_queue:
                summed[worker] = ready[op]
        yield worker, op, start, end


def _targets(schedule: Schedule) -> dict[Op, int]:
    """The worker to which each op sends what it makes, where that is another one."""
    return {
        need: worker
        for worker, op in walk(schedule)
        for need in from_elsewhere(schedule, op)
        if schedule.worker(need) != worker
    }


def makespan(schedule: Schedule, costs: OpCosts) -> float:
    """Seconds until the last op of `schedule` has ended."""
    return max((end for *_, end in timed(schedule, costs)), default=0)
