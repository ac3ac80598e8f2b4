"""Give a schedule times."""

from __future__ import annotations

from ..schedule import Schedule
from ..schedule.timing import timed
from ..timeline import Span, Timeline
from .costs import Costs


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Start each op once its worker is free and all it needs has arrived (see `timed`).

    An all-reduce runs in the background, begins when its last replica has started it, and an update waits
    for it. Exact costs (int, Fraction) give exact times. Time is linear in the number of ops.
    """
    return Timeline(schedule, tuple(Span(*row) for row in timed(schedule, costs.for_stages(schedule.stages))))
