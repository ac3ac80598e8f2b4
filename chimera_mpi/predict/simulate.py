"""Give a schedule times."""

from __future__ import annotations

from ..schedule import COMPUTE, Schedule, paused_collector, repeat
from ..schedule.timing import timed
from ..timeline import Span, Timeline
from .costs import Costs


@paused_collector()
def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Start each op once its worker is free and all it needs has arrived (see `timed`).

    An all-reduce runs in the background, begins when its last replica has started it, and an update waits
    for it. Exact costs (int, Fraction) give exact times. Time is linear in the number of ops.
    """
    return Timeline(schedule, tuple(Span(*row) for row in timed(schedule, costs)))


def steady_step_s(schedule: Schedule, costs: Costs = Costs(), steps: int = 4) -> float:
    """Seconds that each further step takes when steps follow each other without a barrier.

    A worker begins its next step when its own updates are done, so the ramps of two steps overlap. Taken
    between the ends of the last two of `steps` steps, 2 at least.
    """
    steps = max(steps, 2)
    ends: list[float] = [0] * steps
    for _, op, _, end in timed(repeat(schedule, steps), costs):
        step = op.index // (schedule.micro_batches if op.kind in COMPUTE else schedule.updates)
        ends[step] = max(ends[step], end)
    return ends[-1] - ends[-2]
