"""Is a schedule sound? Each op once, every need met, no deadlock however the messages travel."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from .ops import Kind, Op, Schedule, ScheduleError, walk


def check(schedule: Schedule) -> Schedule:
    """Return `schedule` if it can be carried out, else raise `ScheduleError` with the op and worker at fault.

    An all-reduce may block: workers start those they share in orders that fit. A send never does: a worker
    goes on at once and waits for its sends at the flush, which the walk has shown every receiver to reach,
    so synchronous sends change nothing.
    """
    _check_placement(schedule)
    _check_each_op_once(schedule)
    walk(schedule)
    if len(schedule.pipes) > 1:
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


def _with_blocking_reduces(schedule: Schedule) -> dict[Op, tuple[Op, ...]]:
    """What ops need where an all-reduce holds its worker until every other worker has come to its own.

    A worker that holds several replicas of a stage does not wait for itself.
    """
    before = {op: earlier for order in schedule.orders for earlier, op in pairwise(order)}
    needed = dict(schedule.needed)
    for op in needed:
        if op.kind is Kind.REDUCE:
            replicas = (op._replace(pipe=pipe) for pipe in range(len(schedule.pipes)))
            others = (other for other in replicas if schedule.worker(other) != schedule.worker(op))
            needed[op] += tuple(before[other] for other in others if other in before)
    return needed
