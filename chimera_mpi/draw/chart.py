"""Numbers as charts: points over numbers, or bars in groups. Drawn in characters or as a self-contained SVG; `plot`
draws the same by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle, pairwise
from math import isfinite, log
from statistics import median
from typing import NamedTuple

from .facts import ticks
from .svg import FONT

COLOURS = ("#00629e", "#b04500", "#009e73", "#7d365e", "#7a7100", "#111111")  # Okabe and Ito's, darkened
GUIDE = "#999999"
_DASHES = ("", "7 3", "2 3")
_SIGNS, _SIGNS_ASCII = "●○▲△■□◆◇▼▽", "*o+x#=%@&$"
_FILLS, _FILLS_ASCII = "█▒░▓▖", "#=-+."
_LEFT, _RIGHT, _TOP, _AXIS, _LINE = 76, 40, 40, 40, 18  # of a panel, in pixels; a line of the legend
_LETTER = 6.6  # width of a letter of the legend, in pixels
_LONGEST = 20  # letters of a name that is turned
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


# ---- from numbers to shares of the width and of the height


class _Axis:
    """From numbers to shares of a length."""

    def __init__(self, low: float, high: float, is_log: bool):
        self._is_log = is_log
        self._ends = self._scaled(low), self._scaled(high)

    def __call__(self, value: float) -> float:
        low, high = self._ends
        if self._is_log and value <= 0:  # the end of a long error bar
            return 0.0
        return (self._scaled(value) - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return log(value) if self._is_log else value


class _Scale(_Axis):
    """One with room at its ends, and round numbers to mark."""

    def __init__(self, values: Sequence[float], is_log: bool, from_zero: bool, most: int = 6):
        low, high = min(values), max(values)
        if is_log:
            self.ticks = _powers(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        elif from_zero:
            low, high = min(low, 0.0), max(high * 1.05, 0.0) or 1.0
            self.ticks = between(low, high, most)
        else:
            room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
            low, high = low - room, high + room
            self.ticks = between(low, high, most)
        super().__init__(low, high, is_log)


class _Frame:
    def __init__(self, chart: Chart):
        points = [point for series in chart.series for point in series.points]
        xs = [x for x, _ in points]
        ys = [y for _, y in points] + [end for series in chart.series for ends in series.spread for end in ends]
        if chart.log_y:
            ys = [y for y in ys if y > 0]
        self.y = _Scale(ys, chart.log_y, chart.from_zero)
        self.x = _Axis(min(xs), max(xs), chart.log_x)
        self.x_ticks = sorted(set(xs)) if chart.log_x else between(min(xs), max(xs), 6)


def between(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them."""
    found = ticks(high - low, most)
    step = found[1] if len(found) > 1 else high - low
    if step <= 0:
        return [low]
    first = -int(-low // step) if low > 0 else int(low / step)
    return [step * at for at in range(first, int(high / step + 1e-9) + 1)] or [low]


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


# ---- in characters


def chart_text(chart: Drawn, width: int = 80, height: int = 12, ascii: bool = False) -> str:
    """The chart in at most `width` columns, the legend below. Where points fall together, the first series shows."""
    lines = _bars_text(chart, width, ascii) if isinstance(chart, Bars) else _points_text(chart, width, height, ascii)
    return "\n".join(line.rstrip() for line in lines)


def _points_text(chart: Chart, width: int, height: int, ascii: bool) -> Iterator[str]:
    frame, signs = _Frame(chart), _SIGNS_ASCII if ascii else _SIGNS
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


def _by_column(frame: _Frame, points: Sequence[tuple[float, float]], across: int) -> Iterator[tuple[int, float]]:
    """The points by column; where many fall into one, as those of a long run do, their median stands for them."""
    places = [(round(frame.x(x) * (across - 1)), y) for x, y in points]
    if len(points) <= 2 * across:
        yield from places
        return
    of_column: dict[int, list[float]] = {}
    for column, y in places:
        of_column.setdefault(column, []).append(y)
    yield from ((column, median(ys)) for column, ys in of_column.items())


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
    most = _tallest(chart)
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


def _tallest(chart: Bars) -> float:
    columns = zip(*(bar.values for bar in chart.bars), strict=True)
    there = [[value for value in column if isfinite(value)] for column in columns]
    tops = [sum(column) if chart.stacked else max(column, default=0.0) for column in there]
    tops += [high for bar in chart.bars for _, high in bar.spread if isfinite(high)]
    return max(tops, default=0.0) or 1.0


# ---- as SVG


def chart_svg(charts: Sequence[Drawn], across: int = 520, down: int = 240) -> str:
    """The charts one above the other, each with axes of `across` x `down` pixels. Points and bars have a `<title>`,
    which browsers show when one points at them; classes let a page give them other colours."""
    width = _LEFT + across + _RIGHT
    panels: list[str] = []
    top = 0.0
    for chart in charts:
        panels.append(f'<g transform="translate({_LEFT} {top + _TOP:g})">')
        panels += _bars_panel(chart, across, down) if isinstance(chart, Bars) else _panel(chart, across, down)
        panels.append("</g>")
        last_line = max(line for line, _ in _legend_places(chart, across))
        top += _TOP + down + _foot(chart, across) + _LINE * (1 + last_line) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:g}" viewBox="0 0 {width} {top:g}" '
        f'{FONT} font-size="12" fill="#111">',
        f'<rect class="paper" width="{width}" height="{top:g}" fill="#fff"/>',
        *panels,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _panel(chart: Chart, across: int, down: int) -> Iterator[str]:
    frame = _Frame(chart)
    yield from _axes(chart.title, chart.y, frame.y, across, down)
    free = -float(across)
    for tick in frame.x_ticks:
        x = across * frame.x(tick)
        yield f'<path class="axis" d="M{x:.1f} {down}v5" stroke="#666"/>'
        if x - free > 44:
            yield f'<text x="{x:.1f}" y="{down + 18}" text-anchor="middle" font-size="11">{short(tick)}</text>'
            free = x
    yield f'<text x="{across}" y="{down + 34}" text-anchor="end" font-size="11">{escape(chart.x)}</text>'
    for at, series in enumerate(chart.series):
        yield _coloured(at, series.guide)
        yield from _line(frame, series, "5 4" if series.guide else dashes(at), across, down)
        yield "</g>"
    yield from _legend(chart, across, down)


def _axes(title: str, y_name: str, scale: _Scale, across: int, down: int) -> Iterator[str]:
    yield f'<text x="{8 - _LEFT}" y="-22" font-weight="bold" font-size="13">{escape(title)}</text>'
    for tick in scale.ticks:
        y = down * (1 - scale(tick))
        yield f'<path class="grid" d="M0 {y:.1f}H{across}" stroke="#e3e3e3"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" font-size="11">{short(tick)}</text>'
    yield f'<path class="axis" d="M0 0V{down}H{across}" stroke="#666" fill="none"/>'
    yield f'<text x="{8 - _LEFT}" y="-6" font-size="11">{escape(y_name)}</text>'


def _coloured(at: int, guide: bool = False) -> str:
    """A group whose lines and areas have the colour of the series at this place."""
    return f'<g class="guide" color="{GUIDE}">' if guide else f'<g class="s{at % len(COLOURS)}" color="{colour(at)}">'


def _line(frame: _Frame, series: Series, dash: str, across: int, down: int) -> Iterator[str]:
    places = [(across * frame.x(x), down * (1 - frame.y(y))) for x, y in series.points]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dense = len(places) > MARKED
    yield (
        f'<polyline points="{way}" fill="none" stroke="currentColor" stroke-width="{1.3 if dense else 2}" '
        f'stroke-linejoin="round"{_dashed(dash)}/>'
    )
    for (x, _), ends in zip(places, series.spread, strict=False):
        yield _error_bar(x, *(down * (1 - frame.y(end)) for end in ends))
    if not series.guide:
        for (x, y), (number, value) in zip(places, series.points, strict=True):
            told = escape(f"{series.name}: {value:.4g} at {number:g}")
            radius = 1.2 if dense else 3.5
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="currentColor"><title>{told}</title></circle>'


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _error_bar(x: float, low: float, high: float) -> str:
    return (
        f'<path class="error" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8" '
        f'stroke="currentColor" stroke-width="1.4"/>'
    )


def _bars_panel(chart: Bars, across: int, down: int) -> Iterator[str]:
    scale = _Scale([_tallest(chart)], False, True)
    yield from _axes(chart.title, chart.y, scale, across, down)
    each = across / len(chart.groups)
    turned = _is_turned(chart, across)
    for at, group in enumerate(chart.groups):
        x = each * (at + 0.5)
        turn = f' transform="rotate(-35 {x:.1f} {down + 16})" text-anchor="end"' if turned else ' text-anchor="middle"'
        name = group if not turned or len(group) <= _LONGEST else group[: _LONGEST - 1] + "…"
        yield f'<text x="{x:.1f}" y="{down + 16}" font-size="11"{turn}>{escape(name)}</text>'
    for at, bar in enumerate(chart.bars):
        yield _coloured(at)
        yield from (_stack if chart.stacked else _row)(chart, at, bar, scale, each, down)
        yield "</g>"
    yield from _legend(chart, across, down)


def _is_turned(chart: Bars, across: int) -> bool:
    """Whether the names of the groups are too long to stand side by side."""
    return max(map(len, chart.groups)) * _LETTER > across / len(chart.groups)


def _foot(chart: Drawn, across: int) -> float:
    """From the axes down to the legend."""
    if not isinstance(chart, Bars) or not _is_turned(chart, across):
        return _AXIS
    return _AXIS + 0.57 * _LETTER * min(max(map(len, chart.groups)), _LONGEST)


def _row(chart: Bars, number: int, bar: Bar, scale: _Scale, each: float, down: int) -> Iterator[str]:
    width = min(0.8 * each / len(chart.bars), 46)
    for at, value in enumerate(bar.values):
        if isfinite(value):
            x = each * (at + 0.5) + width * (number - len(chart.bars) / 2)
            yield _rect(chart, at, bar, x, width, down * (1 - scale(value)), down * scale(value))
            if at < len(bar.spread):
                ends = [down * (1 - scale(max(end, 0))) for end in bar.spread[at]]
                error = _error_bar(x + width / 2, ends[0], ends[1])
                yield error.replace("currentColor", "#444")


def _stack(chart: Bars, number: int, bar: Bar, scale: _Scale, each: float, down: int) -> Iterator[str]:
    width = min(0.7 * each, 60)
    for at, value in enumerate(bar.values):
        below = sum(v for v in (other.values[at] for other in chart.bars[:number]) if isfinite(v))
        if isfinite(value):
            x = each * (at + 0.5) - width / 2
            yield _rect(chart, at, bar, x, width, down * (1 - scale(below + value)), down * scale(value))


def _rect(chart: Bars, at: int, bar: Bar, x: float, width: float, y: float, height: float) -> str:
    told = escape(f"{chart.groups[at]}, {bar.name}: {bar.values[at]:.4g} {chart.y}")
    return (
        f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{max(height, 0):.1f}" '
        f'fill="currentColor"><title>{told}</title></rect>'
    )


def _legend_places(chart: Drawn, across: int) -> list[tuple[int, float]]:
    """The line and the left edge of each entry."""
    places, line, x = [], 0, 0.0
    for named in chart.named:
        need = 40 + _LETTER * len(named.name)
        if x and x + need - 14 > across + _RIGHT:
            line, x = line + 1, 0.0
        places.append((line, x))
        x += need
    return places or [(0, 0.0)]


def _legend(chart: Drawn, across: int, down: int) -> Iterator[str]:
    named: Sequence[Bar | Series] = chart.named
    for at, ((line, left), each) in enumerate(zip(_legend_places(chart, across), named, strict=True)):
        y = round(down + _foot(chart, across) + 6 + _LINE * line, 1)
        yield _coloured(at, isinstance(each, Series) and each.guide)
        looks = 'stroke-width="9"' if isinstance(each, Bar) else f'stroke-width="2"{_dashed(dashes(at))}'
        yield f'<path d="M{left:.1f} {y}h16" stroke="currentColor" {looks}/>'
        yield f'</g><text x="{left + 21:.1f}" y="{y + 4}" font-size="11.5">{escape(each.name)}</text>'
