"""Steps as they were planned with what was measured, and as they were."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

from ..predict import Costs, measured_costs, merged, simulate
from ..sampled import timelines
from ..schedule import build
from ..timeline import Timeline
from .part import Part

MOST_SAMPLES = 64  # sampled steps that medians are taken over, evenly spread over all of them


class Steps(NamedTuple):
    """One step of a run as it was planned with the costs that were measured, the same of 1F1B, and as it was."""

    planned: Timeline
    planned_1f1b: Timeline
    measured: Timeline

    @property
    def titled(self) -> dict[str, Timeline]:
        """The two of the run's own scheme, to be drawn one above the other."""
        scheme = self.planned.schedule.scheme
        return {f"{scheme}, planned": self.planned, f"{scheme}, measured": self.measured}


class Bubble(NamedTuple):
    """The idle share of a step: of each worker, by the plan with measured costs, as it was, and of a 1F1B."""

    planned: tuple[float, ...]
    measured: tuple[float, ...]
    planned_1f1b: tuple[float, ...]


def mean(ratios: tuple[float, ...]) -> float:
    return sum(ratios) / len(ratios)


@dataclass(frozen=True, eq=False)
class Sampled:
    """The sampled steps of a part of a run."""

    part: Part

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        every = -(-len(self.part.sampled_steps) // MOST_SAMPLES) or 1
        return self.part.sampled_steps[::-1][::every][::-1]

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Of all replicas."""
        return [timeline for step in self.numbers for timeline in timelines(self.part.run, step)]

    @cached_property
    def costs(self) -> Costs:
        """Medians."""
        spans = (span for timeline in self.timelines for span in timeline.spans)
        return measured_costs(spans, self.part.schedule.stages)

    @cached_property
    def planned(self) -> Timeline:
        return simulate(self.part.schedule, self.costs)

    @cached_property
    def planned_1f1b(self) -> Timeline:
        schedule = self.part.schedule
        rival = build("1f1b", schedule.depth, schedule.micro_batches)
        return simulate(rival, merged(self.costs, schedule.stages, schedule.depth))

    def steps(self, step: int | None = None) -> Steps:
        """Raises InputError if `step` was not sampled."""
        measured = self.part.timeline(step)
        return Steps(self.planned, self.planned_1f1b, measured)

    @cached_property
    def bubble(self) -> Bubble | None:
        """None before a step was sampled."""
        if not self.timelines or not self.planned.makespan_s:
            return None
        workers = range(self.part.schedule.depth)
        measured = tuple(median(timeline.idle_ratios[w] for timeline in self.timelines) for w in workers)
        return Bubble(self.planned.idle_ratios, measured, self.planned_1f1b.idle_ratios)
