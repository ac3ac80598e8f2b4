"""Several runs side by side: configurations with their repeats, and how they scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import isfinite, nan
from typing import Any

import numpy as np

from ..draw.chart import Bar, Bars, Chart, Drawn, Series, thinned
from ..draw.look import figure, percent, unit_of
from ..draw.table import Table
from ..errors import InputError
from ..timeline import Timeline
from .configuration import Configuration, configurations_of, timed
from .one import MOST_POINTS, Report, breakdown_chart, loss_chart
from .part import MODEL, differing
from .scaling import Scaling, scalings_of

MOST_DRAWN = 8  # measured steps in one drawing


@dataclass(frozen=True, eq=False)
class Comparison:
    configurations: tuple[Configuration, ...]

    @cached_property
    def scalings(self) -> list[Scaling]:
        return scalings_of(self.configurations)

    # ---- tables

    def tables(self) -> list[Table]:
        return [self._table(), *(scaling.table() for scaling in self.scalings), self._files()]

    def _table(self) -> Table:
        """What says the same of all of them is left out."""
        unit, size = unit_of(np.fmax.reduce([each.step_s.value for each in self.configurations]))
        heads = ["", "scheme", "D", "W", "N", "B", "ranks", "samples/s", f"step, {unit}", "bubble planned", "measured",
                 "loss", "validation", "intervals over"]  # fmt: skip
        rows = [
            [
                str(each.number), each.name, str(each.depth), str(each.first.start.width), str(each.micro_batches),
                f"{each.first.micro_batch_size:g}", str(each.ranks), str(each.throughput),
                str(each.step_s.scaled(1 / size)), _known(each.bubble_planned, percent),
                _known(each.bubble_measured, percent), _known(each.loss), _known(each.validation),
                each.throughput.over or "-",
            ]
            for each in self.configurations
        ]  # fmt: skip
        note = (
            "± is half of a 95 % confidence interval of the median step without warm-up: over runs where a "
            "configuration was repeated, else over blocks of neighbouring steps."
        )
        if not all(report.part.is_warm for each in self.configurations for report in each.reports):
            note += " Runs that have no steps but the warm-up are told by these."
        return Table("", heads, rows, note)

    def _files(self) -> Table:
        rows = [[str(each.number), ", ".join(map(_told, each.reports))] for each in self.configurations]
        return Table("", ["", "logs"], rows)

    # ---- charts

    def charts(self) -> list[Drawn]:
        drawn: list[Drawn | None] = [
            *(chart for scaling in self.scalings for chart in scaling.charts()),
            self._bars(),
            self._losses(),
            breakdown_chart("Where a step goes, average worker", self._names, [m.times for m in self.configurations]),
        ]
        return [chart for chart in drawn if chart]

    @property
    def _names(self) -> list[str]:
        """A word for each configuration: no longer than it takes to tell them apart."""
        shapes = [made.shape for made in self.configurations]
        for kept in (some for size in range(len(shapes[0]) + 1) for some in combinations(shapes[0], size)):
            names = [
                " ".join([made.name, *(f"{letter}={shape[letter]}" for letter in kept)])
                for made, shape in zip(self.configurations, shapes, strict=True)
            ]
            if len(set(names)) == len(names):
                return names
        return [f"{made.number}: {made.name}" for made in self.configurations]

    def _bars(self) -> Bars | None:
        """The fastest of each scheme for each number of ranks and mini-batch."""
        best: dict[str, dict[tuple[int, int], Configuration]] = defaultdict(dict)
        for made in timed(self.configurations):
            group, there = (made.ranks, made.mini_batch), best[made.label]
            there[group] = max(there.get(group, made), made, key=lambda each: each.throughput.value)
        groups = sorted({group for there in best.values() for group in there})
        bars = [
            Bar(
                label,
                [there[g].throughput.value if g in there else nan for g in groups],
                [there[g].throughput.ends if g in there else (nan, nan) for g in groups],
            )
            for label, there in best.items()
        ]
        names = [f"{ranks} rank{'s' * (ranks > 1)}, M={mini_batch}" for ranks, mini_batch in groups]
        return Bars("Throughput, fastest of each scheme", "samples/s", names, bars) if bars else None

    def _losses(self) -> Chart | None:
        series = [
            Series(name, thinned(made.first.loss_points(), MOST_POINTS))
            for name, made in zip(self._names, self.configurations, strict=True)
        ]
        series = [each for each in series if each.points]
        units = {made.first.loss_unit for made in self.configurations}
        return loss_chart(series, units.pop() if len(units) == 1 else "loss") if series else None

    def drawn(self) -> dict[str, Timeline]:
        """A measured step of the first run of each configuration that has one, as many as can be looked at."""
        named = [
            (name, made.first)
            for name, made in zip(self._names, self.configurations, strict=True)
            if made.first.drawable
        ]
        return {name: report.steps().measured for name, report in named[:MOST_DRAWN]}

    # ---- figures

    def figures(self) -> dict[str, Any]:
        return {
            "configurations": [made.figures() for made in self.configurations],
            "strong_scaling": [each.figures() for each in self.scalings if each.strong],
            "weak_scaling": [each.figures() for each in self.scalings if not each.strong],
        }


def compared(reports: Sequence[Report], different: bool = False) -> Comparison:
    """Runs that have steps, in the order of ranks, mini-batch and throughput.

    Raises InputError if they are of different models and that is not said to be meant.
    """
    for report in reports[1:]:
        if not different:
            _check_same_model(reports[0], report)
    return Comparison(configurations_of(reports))


def _model(report: Report) -> dict[str, Any]:
    keys = MODEL if report.start.config.model in ("gpt", "bert") else ("model", "sequence_length")
    return {
        **{key: report.start.keys.get(key) for key in keys},
        "parameters": report.start.attributes.get("parameters"),
    }


def _check_same_model(first: Report, other: Report) -> None:
    there, here = _model(first), _model(other)
    if keys := differing([there, here]):
        raise InputError(
            f"{other.run.path} has {keys[0]}={here.get(keys[0])} and {first.run.path} {there.get(keys[0])}: their "
            "samples are not the same work; give --different to compare them all the same"
        )


def _told(report: Report) -> str:
    part, path = report.part, str(report.run.path)
    numbers = [str(start.number) for start in part.starts]
    return path if part.is_whole else f"{path} (session{'s' * (len(numbers) > 1)} {', '.join(numbers)})"


def _known(number: float, told: Callable[[float], str] = figure) -> str:
    return told(number) if isfinite(number) else "-"
