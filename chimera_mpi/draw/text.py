"""A timeline drawn in characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from textwrap import wrap

from ..schedule import COMPUTE, Op
from ..timeline import Span, Timeline
from . import look
from .facts import gaps, ticks
from .look import Colours, Lane, Titled

MOST_LINES = 240  # a drawing longer than this is squeezed instead of continued on further bands
MARKS = 2  # columns kept at the right for marks of what takes no time
BUBBLE, FILL = "·", "─"
_ASCII = str.maketrans({BUBBLE: ".", FILL: "-", "µ": "u"})


def text(timelines: Titled, width: int = 80, color: bool = False, ascii: bool = False) -> str:
    """Draw one timeline, or several by title on a common time axis, in at most `width` columns.

    An op is a box of columns that begins with its letter and micro-batch, in lower case where it runs up; a
    dot is a bubble. Where the width allows, one unit of time has a fixed number of columns, so that boxes
    line up as in the papers' figures; a drawing that is too long goes on below, like a score.
    """
    by_title = look.titled(timelines)
    names = max(len(f"P{t.schedule.depth - 1} ") for t in by_title.values())
    scale = _scale(list(by_title.values()), max(width - names, 8))
    paint = _ansi if color else _plain
    lines: list[str] = []
    for title, timeline in by_title.items():
        lines += [
            *wrap(look.headline(title, timeline), max(width, 8)),
            *_bands(timeline, scale, names, paint),
            "",
        ]
    if scale.squeezed:
        column = look.duration(1 / scale.columns_per_s)
        lines += wrap(f"Squeezed: a column is {column}, ops cover each other.", max(width, 8))
    lines += _legend(list(by_title.values()), width, paint)
    drawing = "\n".join(line.rstrip() for line in lines)
    return drawing.translate(_ASCII) if ascii else drawing


# ---- how many columns a second gets


@dataclass(frozen=True)
class Scale:
    """`columns_per_s`, and the columns of a band: all of them where the drawing fits beside the names."""

    columns_per_s: float
    band: int
    squeezed: bool = False

    def column(self, seconds: float) -> int:
        # Half a column is rounded up, always: round() would go to the even one and make equal boxes unequal.
        return math.floor(float(seconds) * self.columns_per_s + 0.5)


def _scale(timelines: list[Timeline], room: int) -> Scale:
    """The roomiest scale that fits; else the tightest that can be read, in bands; else squeeze."""
    total = float(max(t.makespan_s for t in timelines))
    readable = _readable(timelines)
    for scale in readable:
        if total * scale + MARKS <= room:
            return Scale(scale, room - MARKS)
    depth = sum(t.schedule.depth + 3 for t in timelines)
    for scale, cell in zip(readable[1:], _cells(timelines)[1:], strict=False):
        band = max((room - MARKS) // cell, 1) * cell
        if math.ceil(total * scale / band) * depth <= MOST_LINES:
            return Scale(scale, band)
    return Scale((room - MARKS) / total, room - MARKS, squeezed=True)


def _cells(timelines: list[Timeline]) -> list[int]:
    """Columns for a short op, from roomy to tight: the widest label with two, one, no columns to spare."""
    widest = max(len(look.label(op, Lane(False, 0))) for op in _compute(timelines))
    ticks = max(len(look.lap_mark(lane)) for t in timelines for lane in look.lanes(t.schedule).values())
    return [widest + ticks + spare for spare in (2, 1, 0)]


def _readable(timelines: list[Timeline]) -> list[float]:
    """Columns per second at which a short op takes each of `_cells`."""
    short = look.short(timelines)
    return [cell / short for cell in _cells(timelines)]


def _compute(timelines: list[Timeline]) -> Iterator[Op]:
    return (span.op for t in timelines for span in t.spans if span.op.kind in COMPUTE)


# ---- rows of characters


@dataclass
class Row:
    """A line of characters with their colours, which grows to the right as it is written to."""

    chars: list[str] = field(default_factory=list)
    looks: list[Colours | None] = field(default_factory=list)

    def write(self, column: int, words: str, colours: Colours | None = None) -> None:
        missing = column + len(words) - len(self.chars)
        self.chars += " " * missing
        self.looks += [None] * missing
        for at, char in enumerate(words, column):
            self.chars[at], self.looks[at] = char, colours

    def at(self, column: int) -> str:
        return self.chars[column] if 0 <= column < len(self.chars) else " "


def _bands(timeline: Timeline, scale: Scale, names: int, paint: Paint) -> Iterator[str]:
    """The rows of the workers under a time axis, as often as it takes to come to the end."""
    rows = [(look.unit_of(float(timeline.makespan_s))[0], _axis(timeline, scale))]
    rows += [(f"P{worker}", row) for worker, row in enumerate(_rows(timeline, scale))]
    columns = max(len(row.chars) for _, row in rows[1:])
    # What takes no time may mark up to MARKS columns after the end: they need no band of their own.
    for first in range(0, max(columns - MARKS, 1), scale.band):
        if first:
            yield ""
        for name, row in rows:
            last = first + scale.band + MARKS >= columns and row is not rows[0][1]
            part = slice(first, first + scale.band + (MARKS if last else 0))
            yield name.ljust(names) + paint(row.chars[part], row.looks[part])


def _rows(timeline: Timeline, scale: Scale) -> Iterator[Row]:
    begin = timeline.begin_s
    end = begin + timeline.makespan_s
    lane_of = look.lanes(timeline.schedule)

    for spans in timeline.rows:
        row = Row()
        for start_s, end_s in gaps(spans, begin, end):
            columns = scale.column(end_s - begin) - scale.column(start_s - begin)
            row.write(scale.column(start_s - begin), _padded(BUBBLE * (columns - 1), columns, BUBBLE))
        for span in spans:
            _box(row, span, lane_of[span.op.place], scale, begin)
        for span in spans:
            if span.op.kind not in COMPUTE and span.start_s == span.end_s:
                _mark(row, span.op.kind.value, scale.column(span.start_s - begin))
        yield row


def _box(row: Row, span: Span, lane: Lane, scale: Scale, begin_s: float) -> None:
    first, last = scale.column(span.start_s - begin_s), scale.column(span.end_s - begin_s)
    words = look.label(span.op, lane)
    if len(words) > last - first:
        words = words[0]
    if last > first:
        filled = _padded(words.ljust(last - first - 1, FILL), last - first, "")
        row.write(first, filled, look.colours(span.op.kind, lane))
        if filled.endswith(" "):
            row.write(last - 1, " ")


def _padded(words: str, columns: int, alone: str) -> str:
    """`words` in `columns`, with an empty column at the end that sets the next box off, if there is room."""
    return (words or alone).ljust(columns)[: max(columns, 0)]


def _mark(row: Row, letter: str, column: int) -> None:
    """A thin mark for what takes no time: in the empty column before its time, or over the bubble after."""
    for at in (column - 1, column, column + 1):
        if at >= 0 and row.at(at) in (" ", BUBBLE if at >= column else " ", letter):
            row.write(at, letter)
            return


def _axis(timeline: Timeline, scale: Scale) -> Row:
    """Times over the columns where they are."""
    row = Row()
    makespan = float(timeline.makespan_s)
    _, size = look.unit_of(makespan)
    # Room for the longest number and a few columns more.
    most = max(int(scale.column(makespan) / (len(f"{makespan / size:g}"[:6]) + 5)), 1)
    for at in ticks(makespan / size, most):
        words, column = f"{at:g}", scale.column(at * size)
        if column % scale.band + len(words) <= scale.band + MARKS:
            row.write(column, words)
    return row


# ---- lines of characters

Paint = Callable[[list[str], list[Colours | None]], str]


def _plain(chars: list[str], looks: list[Colours | None]) -> str:
    return "".join(chars)


def _ansi(chars: list[str], looks: list[Colours | None]) -> str:
    """With the 256 colours that every terminal of today has."""
    parts, now = [], None
    for char, colours in zip(chars, looks, strict=True):
        if colours != now:
            parts.append(_escape(colours) if colours else "\x1b[0m")
            now = colours
        parts.append(char)
    return "".join(parts) + ("\x1b[0m" if now else "")


def _escape(colours: Colours) -> str:
    return f"\x1b[38;5;{_cube(colours.ink)};48;5;{_cube(colours.fill)}m"


def _cube(rgb: tuple[int, int, int]) -> int:
    red, green, blue = (0 if part < 48 else 1 if part < 115 else (part - 35) // 40 for part in rgb)
    return 16 + 36 * red + 6 * green + blue


def _legend(timelines: list[Timeline], width: int, paint: Paint) -> Iterator[str]:
    """What the letters mean, in as few lines as the width allows."""
    entries = [(look.letter(entry), entry.name, entry) for entry in look.legend(timelines)]
    line, used = "", 0
    for letter, name, entry in entries:
        colours = look.colours(entry.kind, entry.lane) if entry.kind in COMPUTE else None
        need = len(letter) + 1 + len(name)
        if used and used + 3 + need > width:
            yield line
            line, used = "", 0
        line += ("   " if used else "") + paint(list(letter), [colours] * len(letter)) + " " + name
        used += need + (3 if used else 0)
    last = f"{BUBBLE} bubble"
    if used + 3 + len(last) > width:
        yield line
        line = last
    else:
        line += "   " + last
    yield line
