"""Improve an order by small moves, and say how far from the best conceivable it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .collectives import is_sound_in_collectives
from .list_scheduler import peaks
from .ops import COMPUTE, Deadlock, Op, Schedule, ScheduleError, needs, without_updates
from .sync import with_updates
from .timing import OpCosts, timed

Progress = Callable[[int, float, float], None]  # moves tried, best makespan so far, lower bound

_FARTHEST = 3  # places that an op moves at most


@dataclass(frozen=True)
class Found:
    """What a search ends with: an order, its makespan, a bound below which no order is, the moves tried."""

    schedule: Schedule
    makespan_s: float
    bound_s: float
    moves: int

    @property
    def gap(self) -> float:
        """How much longer the order takes than the bound, as a share of the bound; 0 is proved best."""
        return self.makespan_s / self.bound_s - 1 if self.bound_s else 0.0


def improve(
    schedule: Schedule,
    costs: OpCosts,
    *,
    sync: str = "eager_opt",
    moves: int = 2000,
    seconds: float = float("inf"),
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """Search near `schedule`, a flush, for an order that takes less time under `costs`, in which no worker
    holds more activations than the one that holds the most does now.

    A move puts one op of a worker a few places earlier, mostly one of the critical path that waited only for
    its worker; what is no worse is kept. It ends after `moves` moves or `seconds`, or at the bound. The same
    `seed` finds the same unless the time runs out first.
    """
    if schedule.updates > 1:
        raise ScheduleError(f"{schedule.scheme} is a stream: only the order of a flush can be improved")
    now = _State(without_updates(schedule), costs, sync)
    best, limit, bound = now, max(peaks(schedule)), lower_bound(schedule, costs)
    chance, until, tried = random.Random(seed), time.monotonic() + seconds, 0
    while tried < moves and best.makespan_s > bound and time.monotonic() < until:
        tried += 1
        trial = now.moved(chance, limit)
        if trial and trial.makespan_s <= now.makespan_s and is_sound_in_collectives(trial.schedule):
            now = trial
            best = min(best, now, key=lambda state: state.makespan_s)
        if progress:
            progress(tried, best.makespan_s, bound)
    return Found(best.schedule, best.makespan_s, bound, tried)


def lower_bound(schedule: Schedule, costs: OpCosts) -> float:
    """Seconds below which no order of these ops on these workers can be.

    A worker has its work to do, no sooner than the first of it can be at hand, and when its last op is done
    what waits for that is still to come; nor can any chain of needs be done in less time than it takes.
    """
    heads, tails = _heads(schedule, costs), _tails(schedule, costs)
    bound = max(heads[op] + costs.seconds(op) + tails[op] for op in heads)
    for order in without_updates(schedule).orders:
        if order:
            first, last = min(heads[op] for op in order), min(tails[op] for op in order)
            bound = max(bound, first + sum(costs.seconds(op) for op in order) + last)
    return bound


def _heads(schedule: Schedule, costs: OpCosts) -> dict[Op, float]:
    """When each compute op could start, were workers always free."""
    heads: dict[Op, float] = {}
    for worker, op in schedule.walked:
        if op.kind in COMPUTE:
            ready = (heads[n] + costs.seconds(n) + _way(schedule, costs, n, worker) for n in needs(schedule, op))
            heads[op] = max(ready, default=0)
    return heads


def _tails(schedule: Schedule, costs: OpCosts) -> dict[Op, float]:
    """What is to come after the end of each compute op, were workers always free."""
    tails: dict[Op, float] = {}
    for worker, op in reversed(schedule.walked):
        if op.kind in COMPUTE:
            tail = tails.setdefault(op, 0) + costs.seconds(op)
            for need in needs(schedule, op):
                tails[need] = max(tails.get(need, 0), tail + _way(schedule, costs, need, worker))
    return tails


def _way(schedule: Schedule, costs: OpCosts, need: Op, worker: int) -> float:
    source = schedule.worker(need)
    return costs.transfer(need, source, worker) if source != worker else 0


class _State:
    """An order of the compute ops, with its times. Raises Deadlock if it has none."""

    def __init__(self, plain: Schedule, costs: OpCosts, sync: str) -> None:
        self._plain, self._costs, self._sync = plain, costs, sync
        self.schedule = with_updates(plain, sync)
        self._times = {op: (start, end) for _, op, start, end in timed(self.schedule, costs)}
        self.makespan_s = max(end for _, end in self._times.values())

    def moved(self, chance: random.Random, limit: float) -> _State | None:
        """This order with one op earlier, one that matters if possible; None if that cannot be."""
        held_up = self._held_up() if chance.random() < 0.8 else []
        worker, at = chance.choice(held_up or self._anywhere(chance))
        order = list(self._plain.orders[worker])
        order.insert(max(at - chance.randint(1, _FARTHEST), 0), order.pop(at))
        orders = (*self._plain.orders[:worker], tuple(order), *self._plain.orders[worker + 1 :])
        plain = replace(self._plain, orders=orders)
        try:
            return _State(plain, self._costs, self._sync) if max(peaks(plain)) <= limit else None
        except Deadlock:
            return None

    def _anywhere(self, chance: random.Random) -> list[tuple[int, int]]:
        worker = chance.randrange(self._plain.depth)
        return [(worker, chance.randrange(len(self._plain.orders[worker])))]

    def _held_up(self) -> list[tuple[int, int]]:
        """Worker and place of the ops on the critical path that wait for nothing but their worker."""
        places = {op: (worker, at) for worker, order in enumerate(self._plain.orders) for at, op in enumerate(order)}
        op: Op | None = max(places, key=lambda op: self._times[op][1])
        held_up = []
        while op is not None:
            worker, at = places[op]
            before = self._plain.orders[worker][at - 1] if at else None
            if before is not None and self._times[before][1] == self._times[op][0]:
                held_up.append((worker, at))
                op = before
            else:
                op = max(needs(self._plain, op), key=lambda need: self._times[need][1], default=None)
        return held_up
