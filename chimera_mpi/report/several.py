"""Several runs side by side: configurations with their repeats, and how they scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from ..draw.chart import Bar, Bars, Chart, Drawn, Series, thinned
from ..draw.look import figure, percent, unit_of
from ..draw.table import Table
from ..errors import InputError
from ..timeline import Timeline
from .one import MOST_POINTS, Report, Times, breakdown_chart, interval_figures, loss_chart
from .part import INCIDENTAL, LEARNING, MODEL, SHAPE, canonical, differing, without
from .stats import Interval, over_runs, ratio
from .steps import mean

MOST_DRAWN = 8  # measured steps in one drawing


@dataclass(frozen=True, eq=False)
class Configuration:
    """Runs that do the same; they may differ in seed and files. `label` and `learning` tell it from the others beside
    its shape; what is learnt does not change how long it takes."""

    number: int
    label: str
    learning: str
    reports: tuple[Report, ...]

    @property
    def first(self) -> Report:
        return self.reports[0]

    @property
    def ranks(self) -> int:
        return self.first.start.ranks

    @property
    def depth(self) -> int:
        return self.first.start.config.depth

    @property
    def micro_batches(self) -> int:
        return self.first.start.config.micro_batches

    @property
    def mini_batch(self) -> int:
        return self.first.mini_batch

    @cached_property
    def throughput(self) -> Interval:
        """Samples per second: the mean of the runs' medians, or the median of the steps of the only run."""
        return self._over(lambda report: report.throughput)

    @cached_property
    def step_s(self) -> Interval:
        return self._over(lambda report: report.step_s)

    def _over(self, of: Callable[[Report], Interval]) -> Interval:
        intervals = [of(report) for report in self.reports]
        return over_runs([each.value for each in intervals]) if len(intervals) > 1 else intervals[0]

    @cached_property
    def bubble_planned(self) -> float:
        return self._bubble("planned")

    @cached_property
    def bubble_measured(self) -> float:
        return self._bubble("measured")

    def _bubble(self, which: str) -> float:
        return _mean([mean(getattr(report.bubble, which)) for report in self.reports if report.bubble])

    @property
    def loss(self) -> float:
        return _mean([report.loss for report in self.reports])

    @property
    def validation(self) -> float:
        return _mean([report.validation for report in self.reports])

    @cached_property
    def times(self) -> Times:
        """Of the average worker."""
        everyone = [times for report in self.reports for times in report.times]
        return Times(*(_mean(column) for column in zip(*everyone, strict=True)))

    @property
    def name(self) -> str:
        return f"{self.label} {self.learning}".strip()

    @property
    def shape(self) -> dict[str, str]:
        """By the letters of the tables; P are the ranks."""
        size = f"{self.first.micro_batch_size:g}"
        return {"P": str(self.ranks), "D": str(self.depth), "N": str(self.micro_batches), "B": size}


class Scaled(NamedTuple):
    """A point of a scaling study, beside the same on the fewest ranks."""

    configuration: Configuration
    speedup: Interval
    efficiency: Interval


class Scaling(NamedTuple):
    """Points over ranks with the same mini-batch, `strong`, or the same mini-batch per rank: `batch` samples. Of each
    scheme and number of ranks the fastest."""

    strong: bool
    batch: Fraction
    schemes: dict[str, list[Scaled]]

    @property
    def title(self) -> str:
        batch = str(self.batch) if self.batch.denominator == 1 else f"{float(self.batch):.4g}"
        return (
            f"{'Strong' if self.strong else 'Weak'} scaling, {batch} samples a step{'' if self.strong else ' and rank'}"
        )


@dataclass(frozen=True, eq=False)
class Comparison:
    configurations: tuple[Configuration, ...]

    @cached_property
    def scalings(self) -> list[Scaling]:
        """Strong ones first, where a scheme has two numbers of ranks at least."""
        return [*self._scalings(True), *self._scalings(False)]

    def _scalings(self, strong: bool) -> Iterator[Scaling]:
        by_batch: dict[Fraction, dict[str, list[Configuration]]] = defaultdict(lambda: defaultdict(list))
        for configuration in self.configurations:
            batch = Fraction(configuration.mini_batch, 1 if strong else configuration.ranks)
            by_batch[batch][configuration.label].append(configuration)
        for batch in sorted(by_batch):
            schemes = {label: points for label, made in by_batch[batch].items() if len(points := _scaled(made)) > 1}
            if schemes:
                yield Scaling(strong, batch, schemes)

    # ---- tables

    def tables(self) -> list[Table]:
        return [self._table(), *map(_scaling_table, self.scalings), self._files()]

    def _table(self) -> Table:
        """What says the same of all of them is left out."""
        unit, size = unit_of(max(each.step_s.value for each in self.configurations))
        heads = ["", "scheme", "D", "W", "N", "B", "ranks", "samples/s", f"step, {unit}", "bubble planned", "measured",
                 "loss", "validation", "intervals over"]  # fmt: skip
        rows = [
            [
                str(each.number), each.name, str(each.depth), str(each.first.start.width), str(each.micro_batches),
                f"{each.first.micro_batch_size:g}", str(each.ranks), str(each.throughput),
                str(scaled(each.step_s, 1 / size)), _known(each.bubble_planned, percent),
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
            *(chart for scaling in self.scalings for chart in _scaling_charts(scaling)),
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
        for made in _timed(self.configurations):
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
            "configurations": [_figures(made) for made in self.configurations],
            "strong_scaling": [_scaling_figures(each) for each in self.scalings if each.strong],
            "weak_scaling": [_scaling_figures(each) for each in self.scalings if not each.strong],
        }


def compared(reports: Sequence[Report], different: bool = False) -> Comparison:
    """Runs that have steps, in the order of ranks, mini-batch and throughput.

    Raises InputError if they are of different models and that is not said to be meant.
    """
    for report in reports[1:]:
        if not different:
            _check_same_model(reports[0], report)
    groups: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        groups[_same(report)].append(report)
    firsts = [made[0] for made in groups.values()]
    labels = _labels([report.start.config.scheme for report in firsts], [_told_keys(report) for report in firsts])
    words = zip(labels, _learning(labels, firsts), groups.values(), strict=True)
    found = [Configuration(0, label, learning, tuple(made)) for label, learning, made in words]
    found.sort(key=lambda made: (made.ranks, made.mini_batch, -made.throughput.value))
    return Comparison(tuple(replace(made, number=number) for number, made in enumerate(found, 1)))


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


def _same(report: Report) -> str:
    """Equal for repeats of one configuration. Its batch may have been given by either of two sizes."""
    start = report.start
    parts = {
        "ranks": start.ranks,
        "hosts": len(start.hosts),
        "mini_batch": report.mini_batch,
        "parameters": start.attributes.get("parameters"),
    }
    return canonical({**without(start.keys, INCIDENTAL, frozenset({"micro_batch_size", "mini_batch_size"})), **parts})


def _labels(names: Sequence[str], told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each name with the keys that the others have otherwise."""
    keys = [key for key in differing(told) if key != "scheme"]
    return [" ".join([name, *_values(each, keys)]).strip() for name, each in zip(names, told, strict=True)]


def _told_keys(report: Report) -> dict[str, Any]:
    return without(report.start.keys, INCIDENTAL, SHAPE, LEARNING)


def _learning(labels: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """What those learn otherwise that have the same label and shape."""
    alike: dict[str, list[int]] = defaultdict(list)
    for at, (label, report) in enumerate(zip(labels, reports, strict=True)):
        alike[canonical({"label": label, "ranks": report.start.ranks, **_shape(report)})].append(at)
    found = [""] * len(labels)
    for places in alike.values():
        told = [{key: reports[at].start.keys.get(key) for key in sorted(LEARNING)} for at in places]
        for at, words in zip(places, _labels([""] * len(places), told), strict=True):
            found[at] = words
    return found


def _shape(report: Report) -> dict[str, Any]:
    config = report.start.config
    return {"depth": config.depth, "micro_batches": config.micro_batches, "mini_batch": report.mini_batch}


def _values(keys: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    yield from (f"{name}={keys[name]}" for name in names if keys.get(name) is not None)


def _told(report: Report) -> str:
    part, path = report.part, str(report.run.path)
    numbers = [str(start.number) for start in part.starts]
    return path if part.is_whole else f"{path} (session{'s' * (len(numbers) > 1)} {', '.join(numbers)})"


def _mean(numbers: Sequence[float]) -> float:
    there = [number for number in numbers if isfinite(number)]
    return sum(there) / len(there) if there else nan


def _known(number: float, told: Callable[[float], str] = figure) -> str:
    return told(number) if isfinite(number) else "-"


def scaled(interval: Interval, by: float) -> Interval:
    return interval._replace(value=interval.value * by, half=interval.half * by)


# ---- scaling


def _timed(made: Iterable[Configuration]) -> list[Configuration]:
    """Those of which it is known how long a step takes."""
    return [each for each in made if 0 < each.throughput.value < inf]


def _scaled(made: Sequence[Configuration]) -> list[Scaled]:
    best: dict[int, Configuration] = {}
    for each in _timed(made):
        best[each.ranks] = max(best.get(each.ranks, each), each, key=lambda one: one.throughput.value)
    points = [best[ranks] for ranks in sorted(best)]
    return [_beside(points[0], point) for point in points]


def _beside(first: Configuration, point: Configuration) -> Scaled:
    speedup = Interval(1.0, 0.0) if point is first else ratio(point.throughput, first.throughput)
    return Scaled(point, speedup, scaled(speedup, first.ranks / point.ranks))


def _scaling_table(scaling: Scaling) -> Table:
    heads = ["", "scheme", "ranks", "D", "N", "B", "samples/s", "speed-up", "efficiency, %"]
    rows = [
        [
            str(point.configuration.number), label, str(point.configuration.ranks), str(point.configuration.depth),
            str(point.configuration.micro_batches), f"{point.configuration.first.micro_batch_size:g}",
            str(point.configuration.throughput), str(point.speedup), str(scaled(point.efficiency, 100)),
        ]
        for label, points in scaling.schemes.items()
        for point in points
    ]  # fmt: skip
    note = "Beside the fewest ranks, of each scheme and number of ranks the fastest; ± as above."
    return Table(scaling.title, heads, rows, note)


def _scaling_charts(scaling: Scaling) -> list[Drawn]:
    throughput = [
        Series(
            label,
            [(float(p.configuration.ranks), p.configuration.throughput.value) for p in points],
            spread=[p.configuration.throughput.ends for p in points],
        )
        for label, points in scaling.schemes.items()
    ]
    efficiency = [
        Series(
            label,
            [(float(p.configuration.ranks), 100 * p.efficiency.value) for p in points],
            spread=[(100 * low, 100 * high) for low, high in (p.efficiency.ends for p in points)],
        )
        for label, points in scaling.schemes.items()
    ]
    return [
        Chart(scaling.title, "ranks", "samples/s", [*throughput, _ideal(throughput)], log_y=True),
        Chart(f"{scaling.title}: efficiency", "ranks", "% of the fewest", efficiency),
    ]


def _ideal(series: Sequence[Series]) -> Series:
    """From the fastest on the fewest ranks."""
    points = [point for each in series for point in each.points]
    first = min(x for x, _ in points)
    last, per_rank = max(x for x, _ in points), max(y / x for x, y in points if x == first)
    return Series("ideal", [(first, first * per_rank), (last, last * per_rank)], guide=True)


# ---- figures


def _figures(made: Configuration) -> dict[str, Any]:
    return {
        "number": made.number,
        "label": made.label,
        "learning": made.learning,
        "scheme": made.first.start.config.scheme,
        "depth": made.depth,
        "width": made.first.start.width,
        "micro_batches": made.micro_batches,
        "micro_batch_size": made.first.micro_batch_size,
        "mini_batch_size": made.mini_batch,
        "ranks": made.ranks,
        "paths": [str(report.run.path) for report in made.reports],
        "samples_per_s": interval_figures(made.throughput),
        "step_s": interval_figures(made.step_s),
        "bubble_planned": made.bubble_planned,
        "bubble_measured": made.bubble_measured,
        "loss": made.loss,
        "validation_loss": made.validation,
        "average_worker": made.times._asdict(),
    }


def _scaling_figures(scaling: Scaling) -> dict[str, Any]:
    schemes = {label: [_scaled_figures(point) for point in points] for label, points in scaling.schemes.items()}
    return {"batch": float(scaling.batch), "schemes": schemes}


def _scaled_figures(point: Scaled) -> dict[str, Any]:
    return {
        "configuration": point.configuration.number,
        "ranks": point.configuration.ranks,
        "samples_per_s": interval_figures(point.configuration.throughput),
        "speedup": interval_figures(point.speedup),
        "efficiency": interval_figures(point.efficiency),
    }
