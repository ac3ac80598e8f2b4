"""Numbers as charts: points over numbers, or bars in groups. `chart_text` draws them in characters, `chart_svg` as a
self-contained SVG, `plot` by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

COLOURS = ("#00629e", "#b04500", "#009e73", "#7d365e", "#7a7100", "#111111")  # Okabe and Ito's, darkened
GUIDE = "#999999"
_DASHES = ("", "7 3", "2 3")
MARKED = 24  # points of a series that get a mark each; the marks of more are dots on the line


class Series(NamedTuple):
    """Points of one kind, by x; `guide` is a line to look along, without marks. `spread` are the ends of an error bar
    for each point."""

    name: str
    points: Sequence[tuple[float, float]]
    guide: bool = False
    spread: Sequence[tuple[float, float]] = ()


class Chart(NamedTuple):
    """What is plotted over what. Numbers of x, all above 0, stand at equal ratios unless `log_x` is off; those of y do
    if `log_y`. Otherwise y begins at 0, or with `from_zero` off a little below its smallest number."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_y: bool = False
    log_x: bool = True
    from_zero: bool = True

    @property
    def named(self) -> Sequence[Series]:
        """What the legend has."""
        return self.series


class Bar(NamedTuple):
    """What one kind of bar is in each group; nan where it is not. `spread` as of a `Series`."""

    name: str
    values: Sequence[float]
    spread: Sequence[tuple[float, float]] = ()


class Bars(NamedTuple):
    """Bars side by side in groups, or in each group one on the other."""

    title: str
    y: str
    groups: Sequence[str]
    bars: Sequence[Bar]
    stacked: bool = False

    @property
    def named(self) -> Sequence[Bar]:
        """What the legend has."""
        return self.bars

    @property
    def tallest(self) -> float:
        """The end of the longest bar, its error bar included."""
        columns = zip(*(bar.values for bar in self.bars), strict=True)
        there = [[value for value in column if isfinite(value)] for column in columns]
        tops = [sum(column) if self.stacked else max(column, default=0.0) for column in there]
        tops += [high for bar in self.bars for _, high in bar.spread if isfinite(high)]
        return max(tops, default=0.0) or 1.0


Drawn = Chart | Bars


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if isfinite(point[0]) and isfinite(point[1])]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """About `most` of the points, which are by x: of each stretch the lowest and the highest, so that no peak is
    lost, and the ends."""
    if len(points) <= most:
        return list(points)
    stretches = max((most - 2) // 2, 1)
    edges = [1 + at * (len(points) - 2) // stretches for at in range(stretches + 1)]
    kept = {0, len(points) - 1}
    for first, last in pairwise(edges):
        stretch = range(first, last)
        kept |= {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def short(number: float) -> str:
    """A number for an axis: `512`, `131k`, `2.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{number:.4g}"


def colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def dashes(at: int) -> str:
    """Of the line of a series; they tell apart those that share a colour."""
    return _DASHES[at // len(COLOURS) % len(_DASHES)]
