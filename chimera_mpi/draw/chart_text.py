"""Charts in characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from math import isfinite
from statistics import median

from .axes import Frame
from .chart import Bar, Bars, Chart, Drawn, short

_SIGNS, _SIGNS_ASCII = "●○▲△■□◆◇▼▽", "*o+x#=%@&$"
_FILLS, _FILLS_ASCII = "█▒░▓▖", "#=-+."


def chart_text(chart: Drawn, width: int = 80, height: int = 12, ascii: bool = False) -> str:
    """The chart in at most `width` columns, the legend below. Where points fall together, the first series shows."""
    lines = _bars_text(chart, width, ascii) if isinstance(chart, Bars) else _points_text(chart, width, height, ascii)
    return "\n".join(line.rstrip() for line in lines)


def _points_text(chart: Chart, width: int, height: int, ascii: bool) -> Iterator[str]:
    frame, signs = Frame(chart), _SIGNS_ASCII if ascii else _SIGNS
    labels = {round(frame.y(tick) * (height - 1)): short(tick) for tick in frame.y.ticks}
    gutter = max(map(len, labels.values())) + 1
    across = max(width - gutter - 6, 16)
    cells: dict[tuple[int, int], str] = {}
    marked = [series for series in chart.series if not series.guide]
    for sign, series in reversed(list(zip(cycle(signs), marked, strict=False))):
        for x, y in _by_column(frame, series.points, across):
            cells[round(frame.y(y) * (height - 1)), x] = sign
    edge, floor = ("|", "-") if ascii else ("│", "─")
    yield chart.y
    for row in reversed(range(height)):
        body = "".join(cells.get((row, column), " ") for column in range(across))
        yield f"{labels.get(row, ''):>{gutter - 1}} {edge}{body}"
    yield " " * gutter + ("+" if ascii else "└") + floor * across
    yield " " * (gutter + 1) + _x_labels(frame, across, 5)
    names = [f"{sign} {series.name}" for sign, series in zip(cycle(signs), marked, strict=False)]
    yield from _flow([chart.x, *(names if len(names) > 1 else [])], gutter + 1, width)


def _by_column(frame: Frame, points: Sequence[tuple[float, float]], across: int) -> Iterator[tuple[int, float]]:
    """The points by column; where many fall into one, as those of a long run do, their median stands for them."""
    places = [(round(frame.x(x) * (across - 1)), y) for x, y in points]
    if len(points) <= 2 * across:
        yield from places
        return
    of_column: dict[int, list[float]] = {}
    for column, y in places:
        of_column.setdefault(column, []).append(y)
    yield from ((column, median(ys)) for column, ys in of_column.items())


def _x_labels(frame: Frame, across: int, over: int) -> str:
    """As many as find room, each beginning under its point or a little before."""
    line = ""
    for tick in frame.x_ticks:
        words = short(tick)
        start = max(round(frame.x(tick) * (across - 1)) - len(words) // 2, 0)
        start = min(start, across + over - len(words))
        if not line or start > len(line):
            line = line.ljust(start) + words
    return line


def _flow(words: Sequence[str], indent: int, width: int) -> Iterator[str]:
    """The words side by side, on as many lines as it takes."""
    line = ""
    for word in words:
        if line and indent + len(line) + 3 + len(word) > width:
            yield " " * indent + line
            line = word
        else:
            line += ("   " if line else "") + word
    yield " " * indent + line


def _bars_text(chart: Bars, width: int, ascii: bool) -> Iterator[str]:
    """Bars to the right, each with its number."""
    fills = _FILLS_ASCII if ascii else _FILLS
    names = [group if chart.stacked else f"{group} {bar.name}".strip() for group, bar in _bars_of(chart)]
    left = min(max(map(len, names)), max(width // 2, 8))
    room = max(width - left - 12, 8)
    most = chart.tallest
    yield chart.y
    for name, (group, bar) in zip(names, _bars_of(chart), strict=True):
        at = chart.groups.index(group)
        if chart.stacked:
            ends, body, total = 0, "", 0.0
            for fill, part in zip(cycle(fills), chart.bars, strict=False):
                total += part.values[at] if isfinite(part.values[at]) else 0.0
                ends = round(room * total / most)
                body += fill * (ends - len(body))
        else:
            total = bar.values[at]
            body = fills[0] * round(room * total / most)
        yield f"{name[:left]:{left}} {body} {short(total)}"
    if chart.stacked:
        yield from _flow([f"{f} {part.name}" for f, part in zip(cycle(fills), chart.bars, strict=False)], 0, width)


def _bars_of(chart: Bars) -> list[tuple[str, Bar]]:
    """In the order in which they stand, those that are there; of stacked ones the first for all."""
    bars = chart.bars[:1] if chart.stacked else chart.bars
    return [
        (group, bar)
        for at, group in enumerate(chart.groups)
        for bar in bars
        if chart.stacked or isfinite(bar.values[at])
    ]
