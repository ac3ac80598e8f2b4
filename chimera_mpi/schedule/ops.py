"""A schedule is a value: for each worker, an ordered list of ops.

There are no times, no idle slots and no messages in it. A message is implied wherever an op
needs what another place made; `needs` says where that is, and nothing else does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import NamedTuple

from ..errors import InputError
from .explain import rows_around


class Kind(str, Enum):
    """What an op does with one micro-batch at one stage, or with the stage's gradients."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradient in one
    INPUT = "I"  # input gradient alone
    WEIGHT = "W"  # weight gradient alone, after INPUT
    REDUCE = "R"  # start the all-reduce of the stage's gradients over its replicas
    UPDATE = "U"  # wait for it and step the optimizer

    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
HOLDS = {kind: 0 for kind in Kind} | {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}  # activations, more or fewer
FREES = tuple(kind for kind in Kind if HOLDS[kind] < 0)

UPDATES = frozenset({Kind.REDUCE, Kind.UPDATE})


class Op(NamedTuple):
    """One step of a worker. `index` is the micro-batch; for REDUCE and UPDATE, the update."""

    kind: Kind
    pipe: int
    stage: int
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        suffix = f"@{self.pipe}" if self.pipe else ""
        return f"{self.stage}{self.kind.value}{self.index}{suffix}"

    @property
    def place(self) -> Place:
        return self.pipe, self.stage


_op: Callable[[tuple[Kind, int, int, int]], Op] = partial(tuple.__new__, Op)  # Op(...) in half the time

Place = tuple[int, int]  # (pipe, stage): where one copy of a stage's weights lives


@dataclass(frozen=True)
class Schedule:
    """`pipes[p][s]` is the worker that holds stage `s` of pipeline `p`; `orders[w]` are its ops."""

    scheme: str
    pipes: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Op, ...], ...]

    @cached_property
    def depth(self) -> int:
        """The number of workers."""
        return len(self.orders)

    @cached_property
    def stages(self) -> int:
        """The number of stages of each pipeline; more than `depth` when workers hold several."""
        return len(self.pipes[0])

    def worker(self, op: Op) -> int:
        return self.pipes[op.pipe][op.stage]

    def places(self, worker: int) -> list[Place]:
        """The copies of stages that `worker` holds."""
        return [(p, s) for p, pipe in enumerate(self.pipes) for s, w in enumerate(pipe) if w == worker]

    @cached_property
    def pipe_of(self) -> dict[int, int]:
        """The pipeline that each micro-batch goes down."""
        return {op.index: op.pipe for order in self.orders for op in order if op.kind is Kind.FORWARD}

    @property
    def micro_batches(self) -> int:
        return len(self.pipe_of)

    @cached_property
    def updates(self) -> int:
        """How often the weights change: once for a flush, more often for a stream."""
        return len({op.index for order in self.orders for op in order if op.kind in UPDATES})

    @cached_property
    def split(self) -> frozenset[tuple[int, int, int]]:
        """The (pipe, stage, micro-batch) whose backward is split into INPUT and WEIGHT."""
        return frozenset(op[1:] for order in self.orders for op in order if op.kind is Kind.INPUT)

    @cached_property
    def shares(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The micro-batches of (pipe, update): those whose gradients the pipeline adds to it."""
        shares: dict[tuple[int, int], list[int]] = {}
        for index in sorted(self.pipe_of):
            shares.setdefault((self.pipe_of[index], self.update_of(index)), []).append(index)
        return {key: tuple(indices) for key, indices in shares.items()}

    def update_of(self, index: int) -> int:
        """The update to which micro-batch `index` adds its gradients: updates get equal shares, in order."""
        return index * max(self.updates, 1) // self.micro_batches

    @cached_property
    def walked(self) -> tuple[tuple[int, Op], ...]:
        """The ops with their workers, each after all it needs (see `walk`)."""
        return tuple(_walk(self, needs))

    def input_gradient(self, pipe: int, stage: int, index: int) -> Op:
        """The op that makes the gradient of the stage's input."""
        return _op((Kind.INPUT if (pipe, stage, index) in self.split else Kind.BACKWARD, pipe, stage, index))

    def weight_gradient(self, pipe: int, stage: int, index: int) -> Op:
        """The op that makes the gradient of the stage's weights."""
        return _op((Kind.WEIGHT if (pipe, stage, index) in self.split else Kind.BACKWARD, pipe, stage, index))


def needs(schedule: Schedule, op: Op) -> tuple[Op, ...]:
    """The ops that must be done before `op`: all the data flow there is in a pipeline.

    A need from another stage is a message (see `messages`), unless one worker holds both.
    """
    kind, pipe, stage, index = op
    if kind is Kind.FORWARD:
        return (_op((Kind.FORWARD, pipe, stage - 1, index)),) if stage else ()
    if kind is Kind.BACKWARD or kind is Kind.INPUT:
        own = _op((Kind.FORWARD, pipe, stage, index))
        last = stage + 1 == schedule.stages
        return (own,) if last else (own, schedule.input_gradient(pipe, stage + 1, index))
    if kind is Kind.WEIGHT:
        return (_op((Kind.INPUT, pipe, stage, index)),)
    if kind is Kind.REDUCE:
        return tuple(schedule.weight_gradient(pipe, stage, n) for n in schedule.shares.get((pipe, index), ()))
    return tuple(Op(Kind.REDUCE, p, stage, index) for p in range(len(schedule.pipes)))


def from_elsewhere(schedule: Schedule, op: Op) -> tuple[Op, ...]:
    """What `op` needs of other stages."""
    return tuple(need for need in needs(schedule, op) if need.stage != op.stage)


def forward_only(schedule: Schedule) -> Schedule:
    """The same pipelines and micro-batches without a way back: an evaluation."""
    forwards = (tuple(op for op in order if op.kind is Kind.FORWARD) for order in schedule.orders)
    return replace(schedule, orders=tuple(forwards))


def without_updates(schedule: Schedule) -> Schedule:
    """The compute ops alone."""
    orders = (tuple(op for op in order if op.kind in COMPUTE) for order in schedule.orders)
    return replace(schedule, orders=tuple(orders))


class Message(NamedTuple):
    """What `op` makes and another place needs: an activation or its gradient."""

    op: Op
    source: int
    target: int


def messages(schedule: Schedule) -> Iterator[Message]:
    """Every need of one stage from another, in the order in which each worker comes to need them.

    Messages with `source == target` stay on their worker.
    """
    for worker, order in enumerate(schedule.orders):
        for op in order:
            for need in from_elsewhere(schedule, op):
                yield Message(need, schedule.worker(need), worker)


def repeat(schedule: Schedule, steps: int) -> Schedule:
    """`steps` steps of `schedule` in a row, without a barrier: a worker begins the next when its own is done.

    Micro-batches and updates are numbered on.
    """
    counts = {kind: schedule.micro_batches if kind in COMPUTE else schedule.updates for kind in Kind}
    orders = (
        tuple(op._replace(index=op.index + step * counts[op.kind]) for step in range(steps) for op in order)
        for order in schedule.orders
    )
    return replace(schedule, orders=tuple(orders))


class ScheduleError(InputError):
    """A schedule that cannot be carried out."""


def fault(schedule: Schedule, worker: int, at: int, what: str) -> ScheduleError:
    """An error that says what is wrong with the op at place `at` of a worker's order, and shows it.

    The first line names worker, op and its neighbours; the lines after it are the rows round it.
    """
    order = schedule.orders[worker]
    before = f"after {order[at - 1]}" if at else "first"
    after = f"before {order[at + 1]}" if at + 1 < len(order) else "last"
    line = f"{schedule.scheme}: worker {worker}, {order[at]} ({before}, {after}): {what}"
    return ScheduleError(f"{line}\n{rows_around(schedule.orders, {worker: at})}")


class Deadlock(ScheduleError):
    """Workers wait for each other in a ring, or for an op that no worker does."""


Needs = Callable[["Schedule", Op], tuple[Op, ...]]


def walk(schedule: Schedule, needs: Needs | None = None) -> Iterator[tuple[int, Op]]:
    """Yield `(worker, op)` so that every op comes after all it needs and after its worker's earlier ops.

    `needs` says what an op needs, if not what the data flow asks for. Takes time linear in the number of
    ops. Raises `Deadlock`, naming the ring of waiting workers.
    """
    return _walk(schedule, needs) if needs else iter(schedule.walked)


def _walk(schedule: Schedule, needs: Needs) -> Iterator[tuple[int, Op]]:
    rest = [iter(order) for order in schedule.orders]
    heads = [next(ops, None) for ops in rest]
    done: set[Op] = set()
    waiting: dict[Op, list[int]] = {}
    ready = deque(range(len(rest)))
    while ready:
        worker = ready.popleft()
        op, ops = heads[worker], rest[worker]
        while op is not None:
            needed = needs(schedule, op)
            if not done.issuperset(needed):
                missing = next(need for need in needed if need not in done)
                waiting.setdefault(missing, []).append(worker)
                break
            yield worker, op
            done.add(op)
            if op in waiting:
                ready.extend(waiting.pop(op))
            op = next(ops, None)
        heads[worker] = op
    if waiting:
        raise Deadlock(_ring(schedule, {w: (op, need) for need, ws in waiting.items() for w in ws if (op := heads[w])}))


def _ring(schedule: Schedule, stuck: dict[int, tuple[Op, Op]]) -> str:
    """Follow the waits from worker to worker until they close, and say and show so."""
    worker, seen = min(stuck), []
    while worker in stuck and worker not in seen:
        seen.append(worker)
        worker = schedule.worker(stuck[worker][1])
    if worker not in stuck:
        ring = seen[-1:]
        what = f"worker {ring[0]} is at {{}} and waits for {{}}, which worker {worker} never does"
    elif seen[-1] == worker:
        ring = [worker]
        what = f"worker {worker} does {{}} before {{}}, which it needs"
    else:
        ring = seen[seen.index(worker) :]
        what = "deadlock: " + ", ".join(f"worker {w} is at {{}} and waits for {{}}" for w in ring)
    what = what.format(*(op for worker in ring for op in stuck[worker]))
    rows = rows_around(schedule.orders, {w: schedule.orders[w].index(stuck[w][0]) for w in ring})
    return f"{schedule.scheme}: {what}\n{rows}"
