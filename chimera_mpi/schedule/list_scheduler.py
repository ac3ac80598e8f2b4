"""Find an order: whenever a worker is free, it gets the best op that is ready and fits in its memory."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from .collectives import is_sound_in_collectives
from .ops import COMPUTE, FREES, HOLDS, Kind, Op, Schedule, ScheduleError, needs
from .sync import with_updates
from .timing import OpCosts, makespan

Rank = Mapping[Op, float]  # the smallest goes first


@dataclass(frozen=True)
class Plan:
    """How a worker chooses among the forwards and gradients that are ready: the smallest `rank` first.

    It may pass over no more than `window` ops that are before it in rank and not ready. A weight gradient
    is for when there is no choice, and is put off if something else is known to arrive within `patience`
    times its length.
    """

    rank: Rank
    window: float = inf
    patience: float = 0


def ordered_for(costs: OpCosts, schedule: Schedule, sync: str) -> Schedule:
    """The best order for `costs` of those the list scheduler finds and the one `schedule` has.

    None takes more memory than the most that a worker of `schedule` needs, and none that is found could wait for good
    in an all-reduce. A stream stays as it is.
    """
    if schedule.updates:
        return schedule
    limits = [max(peaks(schedule))] * schedule.depth
    plans = plans_for(schedule)[: max(OPS_TRIED // len(schedule.walked), 1)]
    found = (list_schedule(schedule, costs, plan, limits) for plan in plans)
    drawn = with_updates(schedule, sync)
    orders = (drawn, *(with_updates(order, sync) for order in found))
    ranked = sorted(orders, key=lambda order: makespan(order, costs))
    return next(order for order in ranked if order is drawn or is_sound_in_collectives(order))


OPS_TRIED = 250_000  # a few seconds


def plans_for(schedule: Schedule) -> list[Plan]:
    """Plans worth trying, the best first: to depart from the order of `schedule` a little, more, at will."""
    drawn = as_drawn(schedule)
    patiences = (0, 0.5) if schedule.split else (0,)
    near = [Plan(drawn, window, patience) for window in (2, 4, 1, 8, 0) for patience in patiences]
    return [*near, Plan(gradients_first(schedule))]


def peaks(schedule: Schedule, sizes: Sequence[float] | None = None) -> list[float]:
    """The most that each worker holds at once: activations, or the sum of the `sizes` of their stages."""
    most = []
    for order in schedule.orders:
        live = peak = 0.0
        for op in order:
            live += HOLDS[op.kind] * (sizes[op.stage] if sizes else 1)
            if live > peak:
                peak = live
        most.append(peak)
    return most


def as_drawn(schedule: Schedule) -> Rank:
    """Earlier in `schedule`, earlier here."""
    return {op: place for order in schedule.orders for place, op in enumerate(order)}


def gradients_first(schedule: Schedule) -> Rank:
    """Backward before forward, the older micro-batch first."""
    many = schedule.micro_batches
    return {op: op.index + (op.kind is Kind.FORWARD) * many for order in schedule.orders for op in order}


def list_schedule(
    schedule: Schedule,
    costs: OpCosts,
    plan: Plan,
    limits: Sequence[float],
    sizes: Sequence[float] | None = None,
) -> Schedule:
    """Put the compute ops of `schedule` in a new order, made for `costs`; other ops are left out.

    Only the placement, and which backwards are split, is taken from `schedule`. Of the ops that are ready a
    worker chooses by `plan`. `limits[w]` is the memory of worker `w`, `sizes[s]` what stage `s` keeps of a
    micro-batch from its forward to the end of its backward, both in bytes or, by default, in activations.

    No order deadlocks, and none fills the memory with forwards that cannot finish: what the oldest
    micro-batch under way will need is always kept free, so it can finish and free what it holds; then the
    next is the oldest. Raises `ScheduleError` if a worker cannot hold even one micro-batch.
    """
    memory = _Memory(schedule, limits, sizes or [1] * schedule.stages)
    run = _Run(schedule, costs, memory, plan)
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
        """Whether there is memory for a forward that is not of the oldest, which always has its own."""
        left = self._free[worker] - self._sizes[forward.stage]
        return left + self._held[self.oldest][worker] >= self._enough[worker]

    def start(self, worker: int, op: Op) -> bool:
        """Take and give what `op` does; True when the oldest micro-batch is through."""
        size = self._sizes[op.stage] * HOLDS[op.kind]
        self._free[worker] -= size
        self._held[op.index][worker] += size  # type: ignore[assignment]
        self._left[op.index] -= op.kind in FREES
        through = self._left[op.index] == 0 and op.index == self.oldest
        if through:
            self.oldest = next((index for index in self._line if self._left[index]), -1)
        return through


class _Run:
    """One pass of the list scheduler over the time line."""

    def __init__(self, schedule: Schedule, costs: OpCosts, memory: _Memory, plan: Plan) -> None:
        self._schedule, self._costs, self._memory, self._plan = schedule, costs, memory, plan
        self._events: list[tuple[float, int, int, Op | None]] = []  # an op has all it needs, or a worker is free
        self._turn = count()
        self._lines = [_Line(order, plan) for order in schedule.orders]
        self._free: list[float] = [0] * schedule.depth
        self._missing: dict[Op, int] = {}
        self._users: dict[Op, list[Op]] = defaultdict(list)
        self._arrival: dict[Op, float] = defaultdict(int)
        for _, op in schedule.walked:
            if op.kind in COMPUTE:
                self._expect(op)

    def _expect(self, op: Op) -> None:
        needed = needs(self._schedule, op)
        self._missing[op] = len(needed)
        for need in needed:
            self._users[need].append(op)
        if not needed:
            self._announce(op)

    def _announce(self, op: Op) -> None:
        """All that `op` needs is done: say when it will have arrived."""
        worker, at = self._schedule.worker(op), self._arrival[op]
        heappush(self._events, (at, worker, next(self._turn), op))
        if op.kind is not Kind.WEIGHT:
            heappush(self._lines[worker].coming, at)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        """Yield the ops and their workers as they start."""
        while self._events:
            now = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] == now:
                _, worker, _, op = heappop(self._events)
                touched.add(worker)
                if op is not None:
                    self._lines[worker].add(op)
            yield from self._dispatch(now, touched)

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
        line = self._lines[worker]
        op = line.best(lambda op: self._memory.admits(worker, op), self._memory.oldest)
        if op is None and line.weights:
            patience = self._plan.patience * self._costs.seconds(line.weights[0])
            return None if line.arrives(now, now + patience) else line.weights[0]
        return op

    def _start(self, now: float, worker: int, op: Op) -> bool:
        """Do `op`; True when others, that are idle for want of memory, may now go on."""
        self._lines[worker].remove(op)
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


class _Line:
    """The ops of one worker that are ready, in line for it."""

    def __init__(self, order: tuple[Op, ...], plan: Plan) -> None:
        self._rank, self._window = plan.rank, plan.window
        line = (op for op in order if op.kind in COMPUTE and op.kind is not Kind.WEIGHT)
        self._drawn = sorted(line, key=self._rank.__getitem__) if self._window < inf else []
        self._head = 0
        self._started: set[Op] = set()
        self._heaps: dict[bool, list[tuple[float, Op]]] = {True: [], False: []}  # forwards, and gradients
        self._ready: dict[int, Op] = {}  # both, by micro-batch: it can have one only
        self.weights: deque[Op] = deque()
        self.coming: list[float] = []  # when others than weight gradients will be ready

    def add(self, op: Op) -> None:
        if op.kind is Kind.WEIGHT:
            self.weights.append(op)
        else:
            self._ready[op.index] = op
            heappush(self._heaps[op.kind is Kind.FORWARD], (self._rank[op], op))

    def remove(self, op: Op) -> None:
        if op.kind is Kind.WEIGHT:
            self.weights.popleft()
        else:
            del self._ready[op.index]
            self._started.add(op)

    def best(self, admits: Callable[[Op], bool], oldest: int) -> Op | None:
        """The forward or gradient of the smallest rank that may go; the oldest micro-batch's always may."""
        tops = (self._top(self._heaps[forward]) for forward in (True, False))
        ranked = [(self._rank[op], op) for op in (*tops, self._ready.get(oldest)) if op is not None]
        for _, op in sorted(ranked):
            if op.index == oldest or (self._in_window(op) and (op.kind is not Kind.FORWARD or admits(op))):
                return op
        return None

    def _top(self, heap: list[tuple[float, Op]]) -> Op | None:
        while heap and heap[0][1] in self._started:
            heappop(heap)
        return heap[0][1] if heap else None

    def _in_window(self, op: Op) -> bool:
        if self._window == inf:
            return True
        while self._drawn[self._head] in self._started:
            self._head += 1
        return op in self._drawn[self._head : self._head + 1 + int(self._window)]

    def arrives(self, now: float, by: float) -> bool:
        """Whether another op is known to be ready after `now` and before `by`."""
        while self.coming and self.coming[0] <= now:
            heappop(self.coming)
        return bool(self.coming) and self.coming[0] < by
