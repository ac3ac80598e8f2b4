"""Find an order: whenever a worker is free, it gets the best op that is ready and fits in its memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from .ops import COMPUTE, FREES, Kind, Op, Schedule, ScheduleError
from .sync import with_updates
from .timing import OpCosts, makespan

Rank = Mapping[Op, float]  # the smallest goes first


def ordered_for(costs: OpCosts, schedule: Schedule, sync: str) -> Schedule:
    """The best order for `costs` of those the list scheduler finds and the one `schedule` has.

    None takes more memory than the most that a worker of `schedule` needs. A stream stays as it is.
    """
    if schedule.updates:
        return schedule
    limits = [max(peaks(schedule))] * schedule.depth
    tails = remaining(schedule, costs)
    ranks = (as_drawn(schedule), gradients_first(schedule), {op: -tail for op, tail in tails.items()})
    found = (list_schedule(schedule, costs, rank, limits, patience=p) for rank in ranks for p in (0, 1))
    return min((with_updates(order, sync) for order in (schedule, *found)), key=lambda order: makespan(order, costs))


def peaks(schedule: Schedule, sizes: Sequence[float] | None = None) -> list[float]:
    """The most that each worker holds at once: activations, or the sum of the `sizes` of their stages."""
    most = []
    for order in schedule.orders:
        live = peak = 0.0
        for op in order:
            live += ((op.kind is Kind.FORWARD) - (op.kind in FREES)) * (sizes[op.stage] if sizes else 1)
            peak = max(peak, live)
        most.append(peak)
    return most


def as_drawn(schedule: Schedule) -> Rank:
    """Earlier in `schedule`, earlier here: its order, but for what is not ready when its turn comes."""
    return {op: place for order in schedule.orders for place, op in enumerate(order)}


def gradients_first(schedule: Schedule) -> Rank:
    """Backward before forward before weight gradient, the older micro-batch first."""
    classes = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}
    many = schedule.micro_batches
    return {op: classes[op.kind] * many + op.index for _, op in schedule.walked if op.kind in COMPUTE}


def remaining(schedule: Schedule, costs: OpCosts) -> dict[Op, float]:
    """Seconds from the start of each compute op to the end of all that waits for it, were workers always free."""
    tails: dict[Op, float] = defaultdict(int)
    for worker, op in reversed(schedule.walked):
        if op.kind in COMPUTE:
            tails[op] += costs.seconds(op)
            for need in schedule.needed[op]:
                source = schedule.worker(need)
                way = costs.transfer(need, source, worker) if source != worker else 0
                tails[need] = max(tails[need], way + tails[op])
    return tails


def list_schedule(
    schedule: Schedule,
    costs: OpCosts,
    rank: Rank,
    limits: Sequence[float],
    sizes: Sequence[float] | None = None,
    patience: float = 0,
) -> Schedule:
    """Put the compute ops of `schedule` in a new order, made for `costs`; other ops are left out.

    Only the placement, and which backwards are split, is taken from `schedule`. Of the ops that are ready
    a worker does the one of the smallest rank. `limits[w]` is the memory of worker `w`, `sizes[s]` what
    stage `s` keeps of a micro-batch from its forward to the end of its backward, both in bytes or, by
    default, in activations. A weight gradient is not begun if something else is known to arrive within
    `patience` times its length.

    No order deadlocks, and none fills the memory with forwards that cannot finish: what the oldest
    micro-batch under way will need is always kept free, so it can finish and free what it holds; then the
    next is the oldest. Raises `ScheduleError` if a worker cannot hold even one micro-batch.
    """
    memory = _Memory(schedule, limits, sizes or [1] * schedule.stages)
    run = _Run(schedule, costs, rank, memory, patience)
    orders: list[list[Op]] = [[] for _ in range(schedule.depth)]
    for worker, op in run:
        orders[worker].append(op)
    return replace(schedule, orders=tuple(map(tuple, orders)))


class _Memory:
    """What the workers have left, and what of it they keep for the oldest micro-batch under way.

    On every worker, what is free and what the oldest holds are together enough for any one micro-batch.
    """

    def __init__(self, schedule: Schedule, limits: Sequence[float], sizes: Sequence[float]) -> None:
        self._sizes, self._free = sizes, list(limits)
        self._enough = [0.0] * len(limits)
        for pipe in schedule.pipes:
            one: Counter[int] = Counter()
            for stage, worker in enumerate(pipe):
                one[worker] += sizes[stage]  # type: ignore[assignment]
                self._enough[worker] = max(self._enough[worker], one[worker])
        for worker, (size, limit) in enumerate(zip(self._enough, limits, strict=True)):
            if size > limit:
                raise ScheduleError(f"worker {worker} has memory for {limit}, but one micro-batch takes {size} there")
        self._held: dict[int, Counter[int]] = defaultdict(Counter)
        self._left = Counter(op.index for order in schedule.orders for op in order if op.kind in FREES)
        self._line = iter(sorted(self._left))
        self.oldest = next(self._line, -1)

    def admits(self, worker: int, forward: Op) -> bool:
        if forward.index == self.oldest:
            return True
        left = self._free[worker] - self._sizes[forward.stage]
        return left + self._held[self.oldest][worker] >= self._enough[worker]

    def start(self, worker: int, op: Op) -> bool:
        """Take and give what `op` does; True when the oldest micro-batch is through."""
        size = self._sizes[op.stage] * ((op.kind is Kind.FORWARD) - (op.kind in FREES))
        self._free[worker] -= size
        self._held[op.index][worker] += size  # type: ignore[assignment]
        self._left[op.index] -= op.kind in FREES
        through = self._left[op.index] == 0 and op.index == self.oldest
        if through:
            self.oldest = next((index for index in self._line if self._left[index]), -1)
        return through


class _Run:
    """One pass of the list scheduler over the time line."""

    def __init__(self, schedule: Schedule, costs: OpCosts, rank: Rank, memory: _Memory, patience: float) -> None:
        self._schedule, self._costs, self._rank = schedule, costs, rank
        self._memory, self._patience = memory, patience
        self._events: list[tuple[float, int, int, Op | None]] = []  # an op is ready, or a worker free
        self._turn = count()
        self._ranked: list[list[tuple[float, Op]]] = [[] for _ in schedule.orders]  # all that is ready but forwards
        self._forwards: list[list[tuple[float, Op]]] = [[] for _ in schedule.orders]
        self._ready: list[dict[int, Op]] = [{} for _ in schedule.orders]  # the forwards, by micro-batch
        self._coming: list[list[float]] = [[] for _ in schedule.orders]  # arrivals of all but weight gradients
        self._free: list[float] = [0] * schedule.depth
        self._missing: dict[Op, int] = {}
        self._users: dict[Op, list[Op]] = defaultdict(list)
        self._arrival: dict[Op, float] = defaultdict(int)
        for _, op in schedule.walked:
            if op.kind in COMPUTE:
                self._expect(op)

    def _expect(self, op: Op) -> None:
        needs = self._schedule.needed[op]
        self._missing[op] = len(needs)
        for need in needs:
            self._users[need].append(op)
        if not needs:
            self._announce(op)

    def _announce(self, op: Op) -> None:
        """All that `op` needs is done: say when it will have arrived."""
        worker, at = self._schedule.worker(op), self._arrival[op]
        heappush(self._events, (at, worker, next(self._turn), op))
        if op.kind is not Kind.WEIGHT:
            heappush(self._coming[worker], at)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        """Yield the ops and their workers as they start."""
        while self._events:
            now = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] == now:
                _, worker, _, op = heappop(self._events)
                touched.add(worker)
                if op is not None:
                    self._lay_out(worker, op)
            yield from self._dispatch(now, touched)

    def _lay_out(self, worker: int, op: Op) -> None:
        if op.kind is Kind.FORWARD:
            self._ready[worker][op.index] = op
            heappush(self._forwards[worker], (self._rank[op], op))
        else:
            heappush(self._ranked[worker], (self._rank[op], op))

    def _dispatch(self, now: float, workers: set[int]) -> Iterator[tuple[int, Op]]:
        while workers:
            worker = min(workers)
            workers.remove(worker)
            op = self._choice(now, worker) if self._free[worker] <= now else None
            if op is not None:
                yield worker, op
                if self._start(now, worker, op):
                    workers.update(range(self._schedule.depth))

    def _choice(self, now: float, worker: int) -> Op | None:
        forward, other = self._forward(worker), self._ranked[worker][0] if self._ranked[worker] else None
        if forward and (other is None or forward < other):
            return forward[1]
        if other is None or (other[1].kind is Kind.WEIGHT and self._worth_waiting(now, worker, other[1])):
            return None
        return other[1]

    def _forward(self, worker: int) -> tuple[float, Op] | None:
        """The best forward for which there is memory."""
        line, ready = self._forwards[worker], self._ready[worker]
        while line and line[0][1].index not in ready:
            heappop(line)
        if not line or self._memory.admits(worker, line[0][1]):
            return line[0] if line else None
        oldest = ready.get(self._memory.oldest)
        return None if oldest is None else (self._rank[oldest], oldest)

    def _worth_waiting(self, now: float, worker: int, weight: Op) -> bool:
        coming = self._coming[worker]
        while coming and coming[0] <= now:
            heappop(coming)
        return bool(coming) and coming[0] < now + self._patience * self._costs.seconds(weight)

    def _start(self, now: float, worker: int, op: Op) -> bool:
        """Do `op`; True when others, that are idle for want of memory, may now go on."""
        if op.kind is Kind.FORWARD:
            del self._ready[worker][op.index]
        else:
            heappop(self._ranked[worker])
        end = free = now + self._costs.seconds(op)
        for user in self._users[op]:
            target = self._schedule.worker(user)
            way = self._costs.transfer(op, worker, target) if target != worker else 0
            self._arrival[user] = max(self._arrival[user], end + way)
            self._missing[user] -= 1
            if self._costs.sends_block:
                free = max(free, end + way)
            if not self._missing[user]:
                self._announce(user)
        self._free[worker] = free
        heappush(self._events, (free, worker, next(self._turn), None))
        return self._memory.start(worker, op)
