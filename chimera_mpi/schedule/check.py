"""Is a schedule sound? Each op once, every need met, no deadlock however the messages travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from .ops import Kind, Op, Schedule, ScheduleError, needs, walk


def check(schedule: Schedule) -> Schedule:
    """Return `schedule` if it can be carried out, else raise `ScheduleError` with the op and worker at fault.

    An all-reduce may block: workers start those they share in orders that fit. A send never does: a worker
    goes on at once and waits for its sends at the flush, which the walk has shown every receiver to reach,
    so synchronous sends change nothing.
    """
    _check_placement(schedule)
    _check_each_op_once(schedule)
    for _ in walk(schedule):
        pass
    for _ in walk(schedule, _with_blocking_reduces(schedule)):
        pass
    return schedule


def _check_placement(schedule: Schedule) -> None:
    if len({len(pipe) for pipe in schedule.pipes}) != 1:
        raise ScheduleError(f"{schedule.scheme}: pipelines of {[len(pipe) for pipe in schedule.pipes]} stages")
    for worker, order in enumerate(schedule.orders):
        for op in order:
            if not (0 <= op.pipe < len(schedule.pipes) and 0 <= op.stage < schedule.stages):
                raise ScheduleError(f"{schedule.scheme}: worker {worker} has {op}, but there is no such stage")
            if schedule.worker(op) != worker:
                raise ScheduleError(
                    f"{schedule.scheme}: worker {worker} has {op}, but worker {schedule.worker(op)} holds that stage"
                )


def _check_each_op_once(schedule: Schedule) -> None:
    for op, times in Counter(op for order in schedule.orders for op in order).items():
        if times > 1:
            raise ScheduleError(f"{schedule.scheme}: worker {schedule.worker(op)} does {op} {times} times")
    done = {op for order in schedule.orders for op in order}
    for op in expected_ops(schedule):
        if op not in done:
            raise ScheduleError(f"{schedule.scheme}: worker {schedule.worker(op)} never does {op}")
    extra = done.difference(expected_ops(schedule))
    if extra:
        op = min(extra)
        raise ScheduleError(f"{schedule.scheme}: worker {schedule.worker(op)} does {op}, which nothing asks for")


def expected_ops(schedule: Schedule) -> list[Op]:
    """All ops that the micro-batches and updates of `schedule` call for, in no order."""
    ops = []
    for index, pipe in schedule.pipe_of.items():
        for stage in range(schedule.stages):
            gradients = {schedule.input_gradient(pipe, stage, index), schedule.weight_gradient(pipe, stage, index)}
            ops += [Op(Kind.FORWARD, pipe, stage, index), *gradients]
    for update in range(schedule.updates):
        for pipe in range(len(schedule.pipes)):
            for stage in range(schedule.stages):
                ops += [Op(kind, pipe, stage, update) for kind in (Kind.REDUCE, Kind.UPDATE)]
    return ops


def _with_blocking_reduces(schedule: Schedule) -> Callable[[Schedule, Op], tuple[Op, ...]]:
    """What ops need where an all-reduce holds its worker until every replica has come to its own."""
    before = {op: earlier for order in schedule.orders for earlier, op in pairwise(order)}
    replicas = range(len(schedule.pipes))

    def blocking_needs(schedule: Schedule, op: Op) -> tuple[Op, ...]:
        if op.kind is not Kind.REDUCE:
            return needs(schedule, op)
        others = (op._replace(pipe=pipe) for pipe in replicas if pipe != op.pipe)
        return (*needs(schedule, op), *(before[other] for other in others if other in before))

    return blocking_needs
