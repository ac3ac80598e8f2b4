"""Charts as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite

from .axes import Frame, Scale
from .chart import COLOURS, GUIDE, MARKED, Bar, Bars, Chart, Drawn, Series, colour, dashes, short
from .svg import FONT

_LEFT, _RIGHT, _TOP, _AXIS, _LINE = 76, 40, 40, 40, 18  # of a panel, in pixels; a line of the legend
_LETTER = 6.6  # width of a letter of the legend, in pixels
_LONGEST = 20  # letters of a name that is turned


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
    frame = Frame(chart)
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


def _axes(title: str, y_name: str, scale: Scale, across: int, down: int) -> Iterator[str]:
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


def _line(frame: Frame, series: Series, dash: str, across: int, down: int) -> Iterator[str]:
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
    scale = Scale([chart.tallest], False, True)
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


def _row(chart: Bars, number: int, bar: Bar, scale: Scale, each: float, down: int) -> Iterator[str]:
    width = min(0.8 * each / len(chart.bars), 46)
    for at, value in enumerate(bar.values):
        if isfinite(value):
            x = each * (at + 0.5) + width * (number - len(chart.bars) / 2)
            yield _rect(chart, at, bar, x, width, down * (1 - scale(value)), down * scale(value))
            if at < len(bar.spread):
                ends = [down * (1 - scale(max(end, 0))) for end in bar.spread[at]]
                error = _error_bar(x + width / 2, ends[0], ends[1])
                yield error.replace("currentColor", "#444")


def _stack(chart: Bars, number: int, bar: Bar, scale: Scale, each: float, down: int) -> Iterator[str]:
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
