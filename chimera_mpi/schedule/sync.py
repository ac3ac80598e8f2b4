"""When gradients are summed over the replicas of a stage, and when the weights change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from .ops import FREES, Kind, Op, Place, Schedule, ScheduleError, repeat, without_updates

SYNCS = ("lazy", "eager", "eager_opt")


def with_updates(schedule: Schedule, sync: str) -> Schedule:
    """Add to a flush its REDUCE and UPDATE ops (Chimera, Section 3.2); leave a schedule that has them as it is.

    `lazy` starts every all-reduce when the worker is through with its micro-batches, `eager` each one as
    soon as the stage's gradients are whole, `eager_opt` does so only for the later half of the stages,
    which have a bubble after them.

    Workers start the all-reduces of their stages from the last stage down, and none before their last
    forward and, of a split backward, their last input gradient. So two workers that share two stages start
    them in one order, and a worker that waits in an all-reduce owes the others nothing but whole backwards of
    earlier stages. As the schemes are drawn that deadlocks none even where an all-reduce blocks; of four
    pipelines in another order it may (see `check_collectives`).
    """
    if sync not in SYNCS:
        raise ScheduleError(f"unknown sync '{sync}': choose from {', '.join(SYNCS)}")
    if schedule.updates:
        return schedule
    orders = (tuple(_with_updates(schedule, worker, sync)) for worker in range(schedule.depth))
    return replace(schedule, orders=tuple(orders))


def accumulated(schedule: Schedule, times: int, sync: str) -> Schedule:
    """`times` steps of a flushing schedule in a row, without a barrier, whose gradients add up to one update."""
    return with_updates(repeat(without_updates(schedule), times), sync)


def with_stream_updates(schedule: Schedule, updates: int) -> Schedule:
    """Change the weights of each stage `updates` times, as soon as the gradients for it are whole.

    Micro-batches are shared out evenly to the updates, in order (see `Schedule.update_of`).
    """
    last = {-(-(n + 1) * schedule.micro_batches // updates): n for n in range(updates)}

    def streamed(order: tuple[Op, ...]) -> Iterator[Op]:
        done: Counter[Place] = Counter()
        for op in order:
            yield op
            if op.kind in FREES:
                done[op.place] += 1
                if done[op.place] in last:
                    yield from (Op(kind, *op.place, last[done[op.place]]) for kind in (Kind.REDUCE, Kind.UPDATE))

    return replace(schedule, orders=tuple(tuple(streamed(order)) for order in schedule.orders))


def completing(schedule: Schedule, worker: int) -> frozenset[Op]:
    """The ops right after which the all-reduce of their own place starts: it may as well start during them,
    and no other collective comes between."""
    order = schedule.orders[worker]
    return frozenset(op for op, after in pairwise(order) if after.kind is Kind.REDUCE and after.place == op.place)


def _with_updates(schedule: Schedule, worker: int, sync: str) -> Iterator[Op]:
    order = schedule.orders[worker]
    places = sorted(schedule.places(worker), key=lambda place: (-place[1], place[0]))
    ready = max((at for at, op in enumerate(order) if op.kind in (Kind.FORWARD, Kind.INPUT)), default=0)
    last = {op[1:3]: at for at, op in enumerate(order)}
    reduces = defaultdict(list)
    for place in places:
        ready = max(ready, last.get(place, 0))
        start = ready if _is_eager(schedule, place[1], sync) else len(order) - 1
        reduces[start].append(Op(Kind.REDUCE, *place, 0))
    for at, op in enumerate(order):
        yield op
        yield from reduces[at]
    yield from (Op(Kind.UPDATE, *place, 0) for place in places)


def _is_eager(schedule: Schedule, stage: int, sync: str) -> bool:
    return sync == "eager" or (sync == "eager_opt" and 2 * stage > schedule.stages)
