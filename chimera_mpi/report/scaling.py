"""How configurations scale with the number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ..draw.chart import Chart, Drawn, Series
from ..draw.table import Table
from .configuration import Configuration, timed
from .one import interval_figures
from .stats import Interval, ratio


class Scaled(NamedTuple):
    """A point of a scaling study, beside the same on the fewest ranks."""

    configuration: Configuration
    speedup: Interval
    efficiency: Interval

    def figures(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration.number,
            "ranks": self.configuration.ranks,
            "samples_per_s": interval_figures(self.configuration.throughput),
            "speedup": interval_figures(self.speedup),
            "efficiency": interval_figures(self.efficiency),
        }


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

    def table(self) -> Table:
        heads = ["", "scheme", "ranks", "D", "N", "B", "samples/s", "speed-up", "efficiency, %"]
        rows = [
            [
                str(point.configuration.number), label, str(point.configuration.ranks), str(point.configuration.depth),
                str(point.configuration.micro_batches), f"{point.configuration.first.micro_batch_size:g}",
                str(point.configuration.throughput), str(point.speedup), str(point.efficiency.scaled(100)),
            ]
            for label, points in self.schemes.items()
            for point in points
        ]  # fmt: skip
        note = "Beside the fewest ranks, of each scheme and number of ranks the fastest; ± as above."
        return Table(self.title, heads, rows, note)

    def charts(self) -> list[Drawn]:
        throughput = [
            Series(
                label,
                [(float(p.configuration.ranks), p.configuration.throughput.value) for p in points],
                spread=[p.configuration.throughput.ends for p in points],
            )
            for label, points in self.schemes.items()
        ]
        efficiency = [
            Series(
                label,
                [(float(p.configuration.ranks), 100 * p.efficiency.value) for p in points],
                spread=[(100 * low, 100 * high) for low, high in (p.efficiency.ends for p in points)],
            )
            for label, points in self.schemes.items()
        ]
        return [
            Chart(self.title, "ranks", "samples/s", [*throughput, _ideal(throughput)], log_y=True),
            Chart(f"{self.title}: efficiency", "ranks", "% of the fewest", efficiency),
        ]

    def figures(self) -> dict[str, Any]:
        schemes = {label: [point.figures() for point in points] for label, points in self.schemes.items()}
        return {"batch": float(self.batch), "schemes": schemes}


def scalings_of(configurations: Sequence[Configuration]) -> list[Scaling]:
    """Strong ones first, where a scheme has two numbers of ranks at least."""
    return [*_scalings(configurations, True), *_scalings(configurations, False)]


def _scalings(configurations: Sequence[Configuration], strong: bool) -> Iterator[Scaling]:
    by_batch: dict[Fraction, dict[str, list[Configuration]]] = defaultdict(lambda: defaultdict(list))
    for configuration in configurations:
        batch = Fraction(configuration.mini_batch, 1 if strong else configuration.ranks)
        by_batch[batch][configuration.label].append(configuration)
    for batch in sorted(by_batch):
        schemes = {label: points for label, made in by_batch[batch].items() if len(points := _scaled(made)) > 1}
        if schemes:
            yield Scaling(strong, batch, schemes)


def _scaled(made: Sequence[Configuration]) -> list[Scaled]:
    best: dict[int, Configuration] = {}
    for each in timed(made):
        best[each.ranks] = max(best.get(each.ranks, each), each, key=lambda one: one.throughput.value)
    points = [best[ranks] for ranks in sorted(best)]
    return [_beside(points[0], point) for point in points]


def _beside(first: Configuration, point: Configuration) -> Scaled:
    speedup = Interval(1.0, 0.0) if point is first else ratio(point.throughput, first.throughput)
    return Scaled(point, speedup, speedup.scaled(first.ranks / point.ranks))


def _ideal(series: Sequence[Series]) -> Series:
    """From the fastest on the fewest ranks."""
    points = [point for each in series for point in each.points]
    first = min(x for x, _ in points)
    last, per_rank = max(x for x, _ in points), max(y / x for x, y in points if x == first)
    return Series("ideal", [(first, first * per_rank), (last, last * per_rank)], guide=True)
