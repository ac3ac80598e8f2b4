"""Give a schedule times."""

from __future__ import annotations

from ..schedule import Kind, Op, Schedule, needs, walk
from ..timeline import Span, Timeline
from .costs import Costs


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Start each op once its worker is free and all it needs has arrived.

    An all-reduce runs in the background: it keeps no worker busy, begins when its last replica has
    started it, and an update waits for it. Only sums and maxima are formed, so exact costs (int,
    Fraction) give exact times.
    """
    free: list[float] = [0] * schedule.depth
    done: dict[Op, float] = {}
    spans = []
    for worker, op in walk(schedule):
        start = free[worker]
        for need in needs(schedule, op):
            start = max(start, _arrival(schedule, costs, need, worker, done))
        end = start + costs.seconds(op)
        free[worker] = done[op] = end
        spans.append(Span(worker, op, start, end))
    return Timeline(schedule, tuple(spans))


def _arrival(schedule: Schedule, costs: Costs, need: Op, worker: int, done: dict[Op, float]) -> float:
    if need.kind is Kind.REDUCE:
        return done[need] + costs.allreduce(need)
    return done[need] + (costs.transfer(need) if schedule.worker(need) != worker else 0)
