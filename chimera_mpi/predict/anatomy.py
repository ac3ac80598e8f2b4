"""Where the seconds of a step go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..schedule import COMPUTE, Kind, Schedule
from ..schedule.timing import makespan
from .costs import Costs
from .estimate import Choice, costs_of, stepped
from .machine import Machine
from .work import Work


class Anatomy(NamedTuple):
    """The seconds of a step, of the average worker: they add up to it.

    `uneven_s` it waits because another worker has more to do, `bubble_s` because of the order of the ops, even if
    messages were free; `messages_s` and `allreduce_s` are what the step would be shorter without these.
    """

    compute_s: float
    recompute_s: float
    update_s: float
    uneven_s: float
    bubble_s: float
    messages_s: float
    allreduce_s: float

    @property
    def step_s(self) -> float:
        return sum(self)


def anatomy(work: Work, machine: Machine, choice: Choice) -> Anatomy:
    """Of a step of the choice, simulated with and without what it might do without."""
    steps = stepped(choice)
    costs = costs_of(work, machine, choice, steps[-1][1])
    alone = replace(costs, allreduce_s=0, allreduce_busy=0)
    silent = replace(alone, transfer_s=0, link=None, node_link=None, sends_block=False)

    def summed(of: Callable[[Schedule], float]) -> float:
        return sum(weight * of(schedule) for weight, schedule in steps)

    whole_s, alone_s, silent_s = (summed(partial(makespan, costs=of)) for of in (costs, alone, silent))
    once = replace(silent, recompute=False)
    compute_s = summed(lambda schedule: _mean_s(schedule, once, COMPUTE))
    twice_s = summed(lambda schedule: _mean_s(schedule, silent, COMPUTE))
    update_s = summed(lambda schedule: _mean_s(schedule, silent, {Kind.UPDATE}))
    most_s = summed(lambda schedule: max(_busy_s(schedule, silent, {*COMPUTE, Kind.UPDATE})))
    return Anatomy(
        compute_s=compute_s,
        recompute_s=twice_s - compute_s,
        update_s=update_s,
        uneven_s=most_s - twice_s - update_s,
        bubble_s=silent_s - most_s,
        messages_s=alone_s - silent_s,
        allreduce_s=whole_s - alone_s,
    )


def _mean_s(schedule: Schedule, costs: Costs, kinds: set[Kind] | frozenset[Kind]) -> float:
    return sum(_busy_s(schedule, costs, kinds)) / schedule.depth


def _busy_s(schedule: Schedule, costs: Costs, kinds: set[Kind] | frozenset[Kind]) -> list[float]:
    """Seconds of the ops of these kinds, of each worker."""
    return [sum(costs.seconds(op) for op in order if op.kind in kinds) for order in schedule.orders]
