"""Do the workers of a schedule start their all-reduces so that none waits for good?"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from .ops import Kind, Needs, Op, Schedule, ScheduleError, fault, needs, walk


def check_collectives(schedule: Schedule) -> None:
    """Workers that share stages start the all-reduces of those in one order, and could block in them. Raises
    ScheduleError."""
    if len(schedule.pipes) == 1:
        return
    sharers = [frozenset(pipe[stage] for pipe in schedule.pipes) for stage in range(schedule.stages)]
    first: dict[tuple[frozenset[int], int], tuple[int, Op]] = {}
    for worker, order in enumerate(schedule.orders):
        started: Counter[frozenset[int]] = Counter()
        reduced: set[tuple[int, int]] = set()
        for at, op in enumerate(order):
            if op.kind is Kind.REDUCE and (op.stage, op.index) not in reduced:
                reduced.add((op.stage, op.index))
                group = sharers[op.stage]
                leader, other = first.setdefault((group, started[group]), (worker, op))
                started[group] += 1
                if (other.stage, other.index) != (op.stage, op.index):
                    raise fault(schedule, worker, at, f"worker {leader}, with which it shares it, starts {other} first")
    for _ in walk(schedule, _with_blocking_reduces(schedule)):
        pass


def _with_blocking_reduces(schedule: Schedule) -> Needs:
    """What ops need where an all-reduce holds its worker until every other worker has come to its own.

    A worker that holds several replicas of a stage does not wait for itself.
    """
    before = {op: earlier for order in schedule.orders for earlier, op in pairwise(order) if op.kind is Kind.REDUCE}

    def blocking_needs(schedule: Schedule, op: Op) -> tuple[Op, ...]:
        if op.kind is not Kind.REDUCE:
            return needs(schedule, op)
        replicas = (op._replace(pipe=pipe) for pipe in range(len(schedule.pipes)))
        others = (other for other in replicas if schedule.worker(other) != schedule.worker(op))
        return (*needs(schedule, op), *(before[other] for other in others if other in before))

    return blocking_needs


def is_sound_in_collectives(schedule: Schedule) -> bool:
    """Whether `check_collectives` takes `schedule`."""
    try:
        check_collectives(schedule)
    except ScheduleError:
        return False
    return True
