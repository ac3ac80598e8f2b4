"""The one loop: trips of micro-batches down their pipelines and back, laid over the workers in slots.

Slots put the ops of a worker in order; they are not times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .ops import Kind, Op, Schedule, ScheduleError

Row = dict[float, Op]  # what a worker does in each slot
Weights = Callable[[int, Row], Iterator[Op]]  # the ops of a worker's row with its weight gradients among them


class Trip(NamedTuple):
    """A micro-batch's way down its pipeline and back: the slots in which it enters and turns round.

    With a pace of one slot a stage it is at stage `s`, forward, in slot `enter + s`, and backward in slot
    `turn + stages - 1 - s`.
    """

    pipe: int
    enter: float
    turn: float


MOST_CELLS = 1_000_000  # of stages x micro-batches: planned in about a minute


def within_reach(what: str, stages: int, micro_batches: int, knobs: Mapping[str, int] | None = None) -> None:
    """Raises ScheduleError, before any time is spent, if there are more ops than can be planned.

    `knobs` are what can be turned down, as the user gives it, and the cells of one each.
    """
    if stages * micro_batches > MOST_CELLS:
        cells = knobs or {"micro_batches=": stages}
        few = [f"{knob}{MOST_CELLS // each}" for knob, each in cells.items() if each <= MOST_CELLS]
        raise ScheduleError(
            f"{what} of {stages} x {micro_batches} stages x micro-batches is more than can be planned at once, "
            f"{MOST_CELLS:,}: try {' or '.join(few) or f'{max(MOST_CELLS // micro_batches, 1)} stages'} or fewer"
        )


def weave(
    scheme: str,
    pipes: list[list[int]],
    trips: Iterable[Trip],
    weights: Weights | None = None,
    forth: Sequence[float] | None = None,
    back: Sequence[float] | None = None,
) -> Schedule:
    """Lay the trips of micro-batches 0, 1, ... over the workers and read off each one's ops in slot order.

    `weights` splits the backward and says where the weight gradients go (`in_gaps`, `trailing`). `forth[s]`
    and `back[s]` are the slots from a trip's entry and turn to stage `s`; by default one for each stage.
    """
    stages, depth = len(pipes[0]), 1 + max(max(pipe) for pipe in pipes)
    forth = range(stages) if forth is None else forth
    back = range(stages)[::-1] if back is None else back
    gradient = Kind.INPUT if weights else Kind.BACKWARD
    rows: list[Row] = [{} for _ in range(depth)]
    for index, (pipe, enter, turn) in enumerate(trips):
        for stage, worker in enumerate(pipes[pipe]):
            for kind, slot in (Kind.FORWARD, enter + forth[stage]), (gradient, turn + back[stage]):
                op = Op(kind, pipe, stage, index)
                if (other := rows[worker].setdefault(slot, op)) is not op:
                    raise ScheduleError(f"{scheme}: {other} and {op} both want slot {slot} of worker {worker}")
    orders = (tuple((weights or as_they_come)(worker, row)) for worker, row in enumerate(rows))
    return Schedule(scheme, tuple(map(tuple, pipes)), tuple(orders))


def as_they_come(worker: int, row: Row) -> Iterator[Op]:
    """The backward is whole: nothing to add."""
    return (row[slot] for slot in sorted(row))


def in_gaps(worker: int, row: Row) -> Iterator[Op]:
    """Weight gradients take the slots that are left free, the oldest first; the last ones come at the end."""
    waiting: deque[Op] = deque()
    clock: float = 0
    for slot in sorted(row):
        while waiting and clock < slot:
            yield waiting.popleft()
            clock += 1
        clock = slot + 1
        yield row[slot]
        if row[slot].kind is Kind.INPUT:
            waiting.append(weight_of(row[slot]))
    yield from waiting


def trailing(lag: Callable[[int], int]) -> Weights:
    """The weight gradients of worker `w` trail its input gradients by `lag(w)`."""

    def trail(worker: int, row: Row) -> Iterator[Op]:
        waiting: deque[Op] = deque()
        for op in as_they_come(worker, row):
            yield op
            if op.kind is Kind.INPUT:
                waiting.append(weight_of(op))
                if len(waiting) > lag(worker):
                    yield waiting.popleft()
        yield from waiting

    return trail


def weight_of(op: Op) -> Op:
    """The weight gradient that goes with an input gradient."""
    return op._replace(kind=Kind.WEIGHT)
