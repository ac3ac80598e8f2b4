"""Points over numbers: a plot in characters, or as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import log
from typing import NamedTuple

from .facts import ticks
from .svg import FONT

COLOURS = ("#00629e", "#b04500", "#009e73", "#7d365e", "#7a7100", "#111111")  # Okabe and Ito's, darkened
_SIGNS, _SIGNS_ASCII = "●○▲△■□", "*o+x#="
_LEFT, _TOP, _WIDTH, _HEIGHT, _FOOT = 76, 40, 520, 240, 74  # of a panel, in pixels


class Series(NamedTuple):
    """Points of one kind, by x; `guide` is a line to look along, without marks."""

    name: str
    points: Sequence[tuple[float, float]]
    guide: bool = False


class Chart(NamedTuple):
    """What is plotted over what. Numbers of x, all above 0, stand at equal ratios; those of y too if `log_y`."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_y: bool = False


class _Frame:
    """From numbers to shares of the width and of the height."""

    def __init__(self, chart: Chart):
        xs, ys = ([point[at] for series in chart.series for point in series.points] for at in range(2))
        self._log_y = chart.log_y
        self._x = log(min(xs)), log(max(xs))
        low, high = (min(ys), max(ys)) if chart.log_y else (0.0, max(ys) * 1.05 or 1.0)
        self.y_ticks = _powers(low, high) if chart.log_y else ticks(high, 6)
        if chart.log_y:
            low, high = min(low, self.y_ticks[0]), max(high, self.y_ticks[-1])
        self._y = self._scaled(low), self._scaled(high)
        self.x_ticks = sorted(set(xs))

    def x(self, value: float) -> float:
        return _share(log(value), *self._x)

    def y(self, value: float) -> float:
        return _share(self._scaled(value), *self._y)

    def _scaled(self, value: float) -> float:
        return log(value) if self._log_y else value


def chart_text(chart: Chart, width: int = 80, height: int = 12, ascii: bool = False) -> str:
    """The points in at most `width` columns, the legend below. Where two fall together, the first series shows."""
    frame, signs = _Frame(chart), _SIGNS_ASCII if ascii else _SIGNS
    labels = {round(frame.y(tick) * (height - 1)): short(tick) for tick in frame.y_ticks}
    gutter = max(map(len, labels.values())) + 1
    across = max(width - gutter - 6, 16)
    cells: dict[tuple[int, int], str] = {}
    marked = [series for series in chart.series if not series.guide]
    for sign, series in reversed(list(zip(signs, marked, strict=False))):
        cells |= {(round(frame.y(y) * (height - 1)), round(frame.x(x) * (across - 1))): sign for x, y in series.points}
    edge, floor = ("|", "-") if ascii else ("│", "─")
    lines = [chart.y]
    for row in reversed(range(height)):
        body = "".join(cells.get((row, column), " ") for column in range(across))
        lines.append(f"{labels.get(row, ''):>{gutter - 1}} {edge}{body}".rstrip())
    lines.append(" " * gutter + ("+" if ascii else "└") + floor * across)
    lines.append(" " * (gutter + 1) + _x_labels(frame, across, 5))
    names = "   ".join(f"{sign} {series.name}" for sign, series in zip(signs, marked, strict=False))
    return "\n".join([*lines, f"{' ' * (gutter + 1)}{chart.x}   {names}"])


def _x_labels(frame: _Frame, across: int, over: int) -> str:
    """As many as find room, each beginning under its point or a little before."""
    line = ""
    for tick in frame.x_ticks:
        words = short(tick)
        start = max(round(frame.x(tick) * (across - 1)) - len(words) // 2, 0)
        start = min(start, across + over - len(words))
        if not line or start > len(line):
            line = line.ljust(start) + words
    return line


def chart_svg(charts: Sequence[Chart]) -> str:
    """The charts one above the other."""
    width, panel = _LEFT + _WIDTH + 40, _TOP + _HEIGHT + _FOOT
    height = panel * len(charts)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'{FONT} font-size="12" fill="#111">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for at, chart in enumerate(charts):
        lines += [f'<g transform="translate({_LEFT} {at * panel + _TOP})">', *_panel(chart), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(chart: Chart) -> Iterator[str]:
    frame = _Frame(chart)
    yield f'<text x="0" y="-16" font-weight="bold" font-size="13">{escape(chart.title)}</text>'
    for tick in frame.y_ticks:
        y = _HEIGHT * (1 - frame.y(tick))
        yield f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#e3e3e3"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" font-size="11">{short(tick)}</text>'
    free = -float(_WIDTH)
    for tick in frame.x_ticks:
        x = _WIDTH * frame.x(tick)
        yield f'<path d="M{x:.1f} {_HEIGHT}v5" stroke="#666"/>'
        if x - free > 44:
            yield f'<text x="{x:.1f}" y="{_HEIGHT + 18}" text-anchor="middle" font-size="11">{short(tick)}</text>'
            free = x
    yield f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" stroke="#666" fill="none"/>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 34}" text-anchor="end" font-size="11">{escape(chart.x)}</text>'
    yield f'<text x="-60" y="-2" font-size="11">{escape(chart.y)}</text>'
    left = 0
    for at, series in enumerate(chart.series):
        colour = "#999999" if series.guide else COLOURS[at % len(COLOURS)]
        yield from _line(frame, series, colour)
        yield f'<path d="M{left} {_HEIGHT + 46}h16" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{left + 21}" y="{_HEIGHT + 50}" font-size="11.5">{escape(series.name)}</text>'
        left += 40 + 7 * len(series.name)


def _line(frame: _Frame, series: Series, colour: str) -> Iterator[str]:
    places = [(_WIDTH * frame.x(x), _HEIGHT * (1 - frame.y(y))) for x, y in series.points]
    dashes = ' stroke-dasharray="5 4"' if series.guide else ""
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    if not series.guide:
        for (x, y), (number, value) in zip(places, series.points, strict=True):
            told = escape(f"{series.name}: {value:.4g} at {number:g}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{told}</title></circle>'


def short(number: float) -> str:
    """A number for an axis: `512`, `131k`, `2.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{number:.4g}"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _powers(low: float, high: float) -> list[float]:
    """Round numbers around and between: powers of ten, with their halves and fifths where these are few."""
    exponents = range(-12, 16)
    for mantissas in ((1, 2, 5), (1,)):
        numbers = [m * 10.0**e for e in exponents for m in mantissas]
        below = max((n for n in numbers if n <= low), default=numbers[0])
        above = min((n for n in numbers if n >= high), default=numbers[-1])
        found = [n for n in numbers if below <= n <= above]
        if len(found) <= 8:
            break
    return found
