"""Charts as PNG or PDF, by matplotlib: the extra `plot`. As SVG they are drawn without it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import cycle
from math import ceil, isfinite, isnan
from pathlib import Path
from typing import Any

from ..errors import InputError, unwritable
from .chart import GUIDE, MARKED, Bars, Chart, Drawn, colour, dashes, short

Axes = Any  # of matplotlib, which may not be installed

_PANEL = 6.2, 3.3  # inches
_MARKS = "o^sDv<>Ph*"


def plot(charts: Sequence[Drawn], path: Path) -> None:
    """Write the charts into one PNG or PDF, by the name of `path`, two abreast.

    Raises InputError where matplotlib is missing or the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        raise InputError(
            f"{path}: a {kind.upper()} needs matplotlib: pip install 'chimera-mpi[plot]', or write an SVG instead"
        ) from None
    across = min(len(charts), 2)
    down = ceil(len(charts) / across)
    figure = figures.Figure(figsize=(_PANEL[0] * across, _PANEL[1] * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes, chart in zip(grid, charts, strict=False):
        if isinstance(chart, Bars):
            _bars(axes, chart)
        else:
            _points(axes, chart)
        _finish(axes, chart)
    for axes in grid[len(charts) :]:
        axes.axis("off")
    try:
        figure.savefig(path, format=kind, dpi=160)
    except OSError as error:
        raise unwritable(path, error) from None


def _points(axes: Axes, chart: Chart) -> None:
    for at, (series, mark) in enumerate(zip(chart.series, cycle(_MARKS), strict=False)):
        xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
        if series.guide:
            axes.plot(xs, ys, color=GUIDE, linestyle="--", linewidth=1.2, label=series.name, zorder=1)
        elif len(xs) > MARKED:
            axes.plot(xs, ys, color=colour(at), linestyle=_style(at), linewidth=1, label=series.name)
        else:
            axes.errorbar(
                xs, ys, yerr=_errors(ys, series.spread), color=colour(at), linestyle=_style(at), marker=mark,
                markersize=4.5, linewidth=1.6, capsize=3, label=series.name,
            )  # fmt: skip
    axes.set_xlabel(chart.x, parse_math=False)
    if chart.log_x:
        axes.set_xscale("log")
        numbers = sorted({x for series in chart.series for x, _ in series.points})
        axes.set_xticks(numbers, [short(number) for number in numbers])
        axes.minorticks_off()
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda number, _: short(number))
        axes.yaxis.set_minor_formatter(lambda number, _: short(number))
        axes.tick_params(axis="y", which="minor", labelsize=7)
    elif chart.from_zero:
        axes.set_ylim(0, 1.05 * axes.dataLim.y1)


def _style(at: int) -> Any:
    """Of a line: an even number of lengths, or whole."""
    lengths = [float(length) for length in dashes(at).split()]
    return (0, lengths) if lengths else "-"


def _bars(axes: Axes, chart: Bars) -> None:
    places = list(range(len(chart.groups)))
    bottom = [0.0] * len(places)
    width = 0.7 if chart.stacked else 0.8 / len(chart.bars)
    for at, bar in enumerate(chart.bars):
        shift = 0 if chart.stacked else width * (at - (len(chart.bars) - 1) / 2)
        there = [place for place in places if isfinite(bar.values[place])]
        heights = [bar.values[place] for place in there]
        errors = None if chart.stacked else _errors(heights, [bar.spread[p] for p in there] if bar.spread else ())
        axes.bar(
            [place + shift for place in there], heights, width, [bottom[place] for place in there], yerr=errors,
            color=colour(at), edgecolor="white", linewidth=0.5, capsize=2.5, ecolor="#444444", label=bar.name,
        )  # fmt: skip
        if chart.stacked:
            for place in there:
                bottom[place] += bar.values[place]
    long = max(map(len, chart.groups)) * len(places) > 60
    axes.set_xticks(
        places, chart.groups, rotation=25 if long else 0, ha="right" if long else "center", parse_math=False
    )


def _errors(values: Sequence[float], spread: Sequence[tuple[float, float]]) -> list[list[float]] | None:
    """Downward and upward; none where they cannot be told."""
    if not spread:
        return None

    def known(length: float) -> float:
        return 0.0 if isnan(length) else max(length, 0.0)

    return [
        [known(value - low) for value, (low, _) in zip(values, spread, strict=True)],
        [known(high - value) for value, (_, high) in zip(values, spread, strict=True)],
    ]


def _finish(axes: Axes, chart: Drawn) -> None:
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    axes.set_ylabel(chart.y, parse_math=False)
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.named) > 1 or isinstance(chart, Bars):
        legend = axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for words in legend.get_texts():
            words.set_parse_math(False)
