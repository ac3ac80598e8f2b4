"""What the log of a run says, and what those of several say together: in lines and tables, as charts and pictures, as
a page, for TensorBoard and as JSON."""

from __future__ import annotations

from .. import config
from ..predict import Costs
from ..runlog import Run
from .one import Report, report_of, summary
from .part import Part, part_of
from .sessions import deaths
from .several import Comparison, compared
from .steps import Sampled, Steps

__all__ = [
    "Comparison",
    "Part",
    "Report",
    "Sampled",
    "Steps",
    "compared",
    "config_of",
    "costs_of",
    "deaths",
    "part_of",
    "plan_of",
    "report_of",
    "steps_of",
    "summary",
]


def steps_of(run: Run, step: int | None = None, session: int | None = None) -> Steps:
    """The sampled step `step`, by default the last one of the layout. Raises InputError if it was not sampled."""
    return Sampled(part_of(run, session)).steps(step)


def config_of(run: Run, session: int | None = None) -> config.Config:
    return part_of(run, session).last.config


def plan_of(run: Run, session: int | None = None) -> config.Steps:
    """The schedule that was carried out."""
    return part_of(run, session).last.plan


def costs_of(run: Run, session: int | None = None) -> Costs:
    """Medians over the sampled steps, of all replicas."""
    return Sampled(part_of(run, session)).costs
