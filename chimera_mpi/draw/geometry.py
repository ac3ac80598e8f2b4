"""Where everything stands in a picture. SVG, PNG and the page put these shapes down and decide nothing.

Across, a place is a share of the time axis, from 0 to 1; down, it is in pixels. So a page can stretch time
without moving anything else. `Picture.x` gives pixels for pictures of a fixed size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..timeline import Span, Timeline
from . import look
from .facts import gaps, memory, ticks
from .look import Colours, Entry, Titled

ROW, MEMORY, SPACE = 26, 18, 5  # heights: a worker's row, the curve under it, the space to the next
HEAD, FOOT = 26, 34  # above a panel its title, below the last one the axis
GUTTER, MARGIN = 46, 84  # left the workers' names, right their bubble shares
LEGEND = 20  # height of a line of the legend
LETTER = 6.7  # width of a letter of a label, to tell whether it fits
THIN = 4  # width of the mark for what takes no time
_LEAST, _MOST = 560, 14_000  # width of the time axis
_SHORT_OP = 27


class Box(NamedTuple):
    """An op. `thin` is 0, or 1, 2, ... for the marks of ops that take no time and share one instant."""

    x: float
    width: float
    y: float
    height: float
    colours: Colours
    label: str
    span: Span
    thin: int


class Bubble(NamedTuple):
    x: float
    width: float
    y: float
    height: float


class Step(NamedTuple):
    """A stretch of the memory curve."""

    x: float
    width: float
    y: float
    height: float
    live: int


class Words(NamedTuple):
    """Words that are centred vertically on `y`: a panel's title, a worker's name, its bubble share."""

    words: str
    y: float


class Tick(NamedTuple):
    x: float
    words: str


class Swatch(NamedTuple):
    """An entry of the legend, in pixels; no colours stand for the bubble."""

    x: float
    y: float
    colours: Colours | None
    label: str
    words: str


@dataclass(frozen=True)
class Panel:
    """One timeline in the picture."""

    timeline: Timeline
    title: Words
    workers: tuple[Words, ...]
    shares: tuple[Words, ...]
    peaks: tuple[Words, ...]
    boxes: tuple[Box, ...]
    bubbles: tuple[Bubble, ...]
    curve: tuple[Step, ...]
    top: float
    bottom: float


@dataclass(frozen=True)
class Picture:
    """The panels one above the other on one time axis of `chart` pixels."""

    panels: tuple[Panel, ...]
    ticks: tuple[Tick, ...]
    unit: str
    swatches: tuple[Swatch, ...]
    chart: float
    short: float  # width of a short op, as a share of the axis
    axis: float
    height: float

    @property
    def width(self) -> float:
        return GUTTER + self.chart + MARGIN

    def x(self, share: float) -> float:
        return GUTTER + share * self.chart

    def span_of(self, box: Box) -> tuple[float, float]:
        """The left edge and the width of a box in pixels."""
        if box.thin:
            return self.x(box.x) + (box.thin - 1) * THIN, THIN - 0.5
        return self.x(box.x), max(box.width * self.chart, 0.5)


def fits(label: str, pixels: float) -> bool:
    return len(label) * LETTER + 3 <= pixels


def picture(timelines: Titled, with_memory: bool = False) -> Picture:
    """Lay out one timeline, or several by title, the longest over the whole axis."""
    by_title = look.titled(timelines)
    total = float(max(t.makespan_s for t in by_title.values()))
    short = look.short(list(by_title.values())) / total
    chart = min(max(_SHORT_OP / short, _LEAST), _MOST)
    panels: list[Panel] = []
    for title, timeline in by_title.items():
        top = panels[-1].bottom + SPACE if panels else 0
        panels.append(_panel(look.headline(title, timeline), timeline, total, top, with_memory))
    axis = panels[-1].bottom
    unit, size = look.unit_of(total)
    marks = tuple(Tick(at * size / total, f"{at:g}") for at in ticks(total / size, int(chart / 45)))
    swatches = tuple(_swatches(look.legend(by_title.values()), GUTTER + chart + MARGIN, axis + FOOT))
    return Picture(tuple(panels), marks, unit, swatches, chart, short, axis, swatches[-1].y + LEGEND)


def _panel(title: str, timeline: Timeline, total: float, top: float, with_memory: bool) -> Panel:
    begin = timeline.begin_s
    pitch = ROW + (MEMORY if with_memory else 0) + SPACE
    tops = [top + HEAD + worker * pitch for worker in range(timeline.schedule.depth)]
    return Panel(
        timeline=timeline,
        title=Words(title, top + HEAD / 2),
        workers=tuple(Words(f"P{worker}", y + ROW / 2) for worker, y in enumerate(tops)),
        shares=tuple(
            Words(look.percent(idle), y + ROW / 2) for idle, y in zip(timeline.idle_ratios, tops, strict=True)
        ),
        peaks=tuple(Words(f"max {most}", y + ROW + MEMORY / 2) for most, y in zip(_peaks(timeline), tops, strict=True)),
        boxes=tuple(_boxes(timeline, tops, begin, total)),
        bubbles=tuple(_bubbles(timeline, tops, begin, total)),
        curve=tuple(_curve(timeline, tops, begin, total)) if with_memory else (),
        top=top + HEAD,
        bottom=tops[-1] + pitch,
    )


def _boxes(timeline: Timeline, tops: list[float], begin: float, total: float) -> Iterator[Box]:
    """Those that take no time come last: they lie on top."""
    lane_of = look.lanes(timeline.schedule)
    at_once: Counter[tuple[int, float]] = Counter()
    for span in sorted(timeline.spans, key=lambda span: (span.end_s == span.start_s, span.worker, span.start_s)):
        x = float(span.start_s - begin) / total
        width = float(span.end_s - span.start_s) / total
        at_once[span.worker, x] += not width
        thin = 0 if width else at_once[span.worker, x]
        lane = lane_of[span.op.place]
        colours, label = look.colours(span.op.kind, lane), look.label(span.op, lane)
        yield Box(x, width, tops[span.worker], ROW, colours, label, span, thin)


def _bubbles(timeline: Timeline, tops: list[float], begin: float, total: float) -> Iterator[Bubble]:
    for row, y in zip(timeline.rows, tops, strict=True):
        for start_s, end_s in gaps(row, begin, begin + timeline.makespan_s):
            yield Bubble(float(start_s - begin) / total, float(end_s - start_s) / total, y, ROW)


def _peaks(timeline: Timeline) -> list[int]:
    """The most activations that each worker holds."""
    end = timeline.begin_s + timeline.makespan_s
    levels = (memory(row, timeline.begin_s, end) for row in timeline.rows)
    return [max((level.live for level in row), default=0) for row in levels]


def _curve(timeline: Timeline, tops: list[float], begin: float, total: float) -> Iterator[Step]:
    """All workers on one scale, so that they can be compared."""
    levels = [memory(row, begin, begin + timeline.makespan_s) for row in timeline.rows]
    most = max(1, *_peaks(timeline))
    for row, y in zip(levels, tops, strict=True):
        for level in row:
            height = (MEMORY - 3) * level.live / most
            x, width = float(level.start_s - begin) / total, float(level.end_s - level.start_s) / total
            yield Step(x, width, y + ROW + 1 + (MEMORY - 3 - height), height, level.live)


def _swatches(entries: list[Entry], width: float, top: float) -> Iterator[Swatch]:
    """From left to right, on as many lines as it takes."""
    x, y = float(GUTTER), top
    named = [(look.colours(e.kind, e.lane), look.letter(e), e.name) for e in entries]
    for colours, label, words in [*named, (None, "", "bubble")]:
        need = 30 + len(words) * LETTER + 14
        if x > GUTTER and x + need > width:
            x, y = float(GUTTER), y + LEGEND
        yield Swatch(x, y, colours, label, words)
        x += need
