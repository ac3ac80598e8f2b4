"""The performance model of the Chimera paper (Li and Hoefler 2021, Section 3.4, Eq. 1), for every scheme.

    T = (F + Comm) C_f + (B + Comm) C_b + max over workers of Comm_unoverlapped

C_f and C_b are the passes on the critical path of the schedule when messages are free. Comm_unoverlapped is what
all-reduces last beyond the last backward of all: their free regions, from their start to there, are taken off. Where
the backward is split, input gradients stand in for backwards, and weight gradients are passes without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul, sub
from typing import NamedTuple

from ..schedule import COMPUTE, Kind, Op, Place, Schedule
from ..schedule.timing import timed
from .costs import Costs, at_stage


class Passes(NamedTuple):
    """Forwards, backwards (whole, or input gradients) and weight gradients alone: how many, or the seconds of one."""

    forward: float
    backward: float
    weight: float


@dataclass(frozen=True)
class Performance:
    """The terms of Eq. 1 for a step, in seconds.

    `passes` are C_f, C_b and C_w. As many of them as the worker with most to do has itself take what they take there,
    `busiest_s`; the others, on the ways there and back, what they take in the mean stage: the paper's stages are alike.
    """

    passes: Passes
    own: Passes
    busiest_s: Passes
    mean_s: Passes
    transfer_s: float
    unoverlapped_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        others = map(sub, self.passes, self.own)
        return (
            sum(map(mul, self.own, self.busiest_s))
            + sum(map(mul, others, self.mean_s))
            + self.transfer_s * (self.passes.forward + self.passes.backward)
            + self.unoverlapped_s
            + self.update_s
        )


Weighted = Sequence[tuple[float, Schedule]]  # schedules whose weighted sum is a step


def performance(schedules: Weighted, costs: Costs) -> Performance:
    """Eq. 1 of a step that is the weighted sum of `schedules` (one with weight 1, or see `estimate.stepped`)."""
    weights, built = zip(*schedules, strict=True)
    schedule = built[-1]
    costs = costs.on(schedule)
    worker, busiest_s = _busiest(schedule, costs)
    counted, regions = zip(*(critical_passes(of, busiest_s) for of in built), strict=True)
    passes = _weighted(weights, counted)
    own = Passes(*map(min, passes, _weighted(weights, (_passes_of(of, worker) for of in built))))
    updates = sum(weight * of.updates for weight, of in schedules)
    if schedule.updates > 1:  # a stream: the update follows at once, so nothing hides its all-reduce
        exposed_s = updates * max(costs.allreduce(op) for op in _reduces(schedule))
    else:
        exposed_s = _unoverlapped_s(schedule, costs, regions[-1])
    return Performance(
        passes,
        own,
        busiest_s,
        _mean_s(schedule, costs, [place for at in range(schedule.depth) for place in schedule.places(at)]),
        _transfer_s(schedule, costs),
        exposed_s,
        updates * _update_s(schedule, costs),
    )


def _weighted(weights: Sequence[float], passes: Iterable[Passes]) -> Passes:
    return Passes(*(sum(map(mul, weights, column)) for column in zip(*passes, strict=True)))


def critical_passes(schedule: Schedule, passes_s: Passes) -> tuple[Passes, dict[Op, float]]:
    """C_f, C_b and C_w, and the free region of each all-reduce: the seconds from its start to the last backward's end.

    `passes_s` are the seconds of a forward, a backward or input gradient, and a weight gradient.
    """
    counting = _Counting(passes_s)
    end: float = 0
    starts = {}
    for _, op, start, until in timed(schedule, counting):
        if op.kind is Kind.REDUCE:
            starts[op] = start
        elif op.kind in COMPUTE and until > end:
            end = until
    return counting.passes(end), {op: counting.seconds_of(end) - counting.seconds_of(at) for op, at in starts.items()}


def _unoverlapped_s(schedule: Schedule, costs: Costs, regions: dict[Op, float]) -> float:
    """How long after the last backward the last all-reduce is done, if it is."""
    done_s: dict[int, float] = {}
    for op, free_s in regions.items():
        worker = schedule.worker(op)
        queued_s = done_s.get(worker, -free_s) if costs.allreduces_queue else -free_s
        end_s = max(-free_s, queued_s) + costs.allreduce(op)
        done_s[worker] = max(done_s.get(worker, end_s), end_s)
    return max([0.0, *done_s.values()])


class _Counting:
    """Costs that are whole numbers of ticks, with a digit below the ticks for each kind that counts its ops.

    So the makespan, which is the sum of the ops on the critical path, tells how many of each there are.
    """

    _BITS = 24  # of a digit: more ops than can be planned
    _TICKS = 1 << 32
    sends_block = False
    allreduces_queue = False

    def __init__(self, passes_s: Passes) -> None:
        self._per_s = self._TICKS / (sum(passes_s) or 1)
        forward, backward, weight = (
            (round(seconds * self._per_s) << 3 * self._BITS) + (1 << at * self._BITS)
            for at, seconds in enumerate(passes_s)
        )
        self._of = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: backward, Kind.WEIGHT: weight}

    def on(self, schedule: Schedule) -> _Counting:
        return self

    def seconds(self, op: Op) -> int:
        return self._of.get(op.kind, 0)

    def transfer(self, op: Op, source: int, target: int) -> int:
        return 0

    def allreduce(self, op: Op) -> int:
        return 0

    def passes(self, end: float) -> Passes:
        mask = (1 << self._BITS) - 1
        return Passes(*(int(end) >> at * self._BITS & mask for at in range(3)))

    def seconds_of(self, moment: float) -> float:
        return (int(moment) >> 3 * self._BITS) / self._per_s


def _busiest(schedule: Schedule, costs: Costs) -> tuple[int, Passes]:
    """The worker with most to do, and the seconds of a mean pass of its stages."""
    of_workers = [_mean_s(schedule, costs, schedule.places(worker)) for worker in range(schedule.depth)]
    worker = max(range(schedule.depth), key=lambda worker: sum(of_workers[worker]))
    return worker, of_workers[worker]


def _mean_s(schedule: Schedule, costs: Costs, places: Sequence[Place]) -> Passes:
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if schedule.split else (Kind.FORWARD, Kind.BACKWARD)
    seconds = [sum(costs.seconds(Op(kind, *place, 0)) for place in places) / len(places) for kind in kinds]
    return Passes(*seconds, *[0.0] * (3 - len(seconds)))


def _passes_of(schedule: Schedule, worker: int) -> Passes:
    """How many passes of each kind the worker does."""
    kinds = Counter(op.kind for op in schedule.orders[worker])
    return Passes(kinds[Kind.FORWARD], kinds[Kind.BACKWARD] + kinds[Kind.INPUT], kinds[Kind.WEIGHT])


def _transfer_s(schedule: Schedule, costs: Costs) -> float:
    """Of the mean message from stage to stage, there and back."""
    ways = [
        costs.transfer(op, source, target) if source != target else 0
        for pipe, workers in enumerate(schedule.pipes)
        for stage, pair in enumerate(pairwise(workers))
        for op, (source, target) in (
            (Op(Kind.FORWARD, pipe, stage, 0), pair),
            (Op(Kind.BACKWARD, pipe, stage + 1, 0), pair[::-1]),
        )
    ]
    return sum(ways) / len(ways) if ways else 0


def _reduces(schedule: Schedule) -> Iterable[Op]:
    return (op for order in schedule.orders for op in order if op.kind is Kind.REDUCE)


def _update_s(schedule: Schedule, costs: Costs) -> float:
    """What the worker with most to update does at each update."""
    return max(
        sum(at_stage(costs.update_s, stage) for _, stage in schedule.places(worker)) for worker in range(schedule.depth)
    )
