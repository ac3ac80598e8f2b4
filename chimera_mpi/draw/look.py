"""What an op looks like, wherever it is drawn: its letter, its lane, its colours, its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from ..errors import InputError
from ..schedule import COMPUTE, Kind, Op, Schedule
from ..timeline import Timeline

Titled = Timeline | Mapping[str, Timeline]

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
    Kind.REDUCE: "all-reduce starts",
    Kind.UPDATE: "update",
}


class Colours(NamedTuple):
    """Fill and ink of a box, as (red, green, blue)."""

    fill: tuple[int, int, int]
    ink: tuple[int, int, int]


WHITE, INK = (255, 255, 255), (17, 17, 17)

# Okabe and Ito's palette, which people with any colour blindness can tell apart. A kind is a hue; the way
# is its lightness: light runs down, dark runs up, so that the two differ in grey as well.
_DOWN = {
    Kind.FORWARD: (86, 180, 233),
    Kind.BACKWARD: (230, 159, 0),
    Kind.INPUT: (240, 228, 66),
    Kind.WEIGHT: (204, 121, 167),
    Kind.REDUCE: (0, 158, 115),
    Kind.UPDATE: (17, 17, 17),
}
_UP = _DOWN | {
    Kind.FORWARD: (0, 98, 158),
    Kind.BACKWARD: (176, 69, 0),
    Kind.INPUT: (122, 113, 0),
    Kind.WEIGHT: (125, 52, 94),
}


class Lane(NamedTuple):
    """Which way an op's micro-batch travels, and on which of the laps that way (chunks of one pipeline)."""

    up: bool
    lap: int


def lanes(schedule: Schedule) -> dict[tuple[int, int], Lane]:
    """The lane of each place (pipe, stage).

    A pipeline with more stages than workers passes them in chunks, each its own way: down and up again in a
    V, always down when interleaved. Each further chunk the same way is a further lap.
    """
    lanes = {}
    for pipe, workers in enumerate(schedule.pipes):
        laps = {False: 0, True: 0}
        for first in range(0, len(workers), schedule.depth):
            chunk = workers[first : first + schedule.depth]
            up = runs_up(chunk)
            lanes.update({(pipe, stage): Lane(up, laps[up]) for stage in range(first, first + len(chunk))})
            laps[up] += 1
    return lanes


def runs_up(workers: Iterable[int]) -> bool:
    """Whether a row of workers leads to lower numbers more often than to higher: it may wrap round the ring."""
    return sum((after < before) - (after > before) for before, after in pairwise(workers)) > 0


def label(op: Op, lane: Lane) -> str:
    """The op in a word: `F3`; in lower case when it runs up; with a tick for each further lap."""
    if op.kind not in COMPUTE:
        return op.kind.value
    letter = op.kind.value.lower() if lane.up else op.kind.value
    return f"{letter}{op.index}{lap_mark(lane)}"


def lap_mark(lane: Lane) -> str:
    return ("", "'", '"')[lane.lap] if lane.lap < 3 else f"^{lane.lap}"


def colours(kind: Kind, lane: Lane) -> Colours:
    """The colours of a kind of op in a lane. Further laps are paler."""
    fill = (_UP if lane.up else _DOWN)[kind]
    pale = 1 - 0.7**lane.lap
    mixed = tuple(round(part + (255 - part) * pale * 0.75) for part in fill)
    return Colours((mixed[0], mixed[1], mixed[2]), INK if _luminance(mixed) > 0.25 else WHITE)


def _luminance(fill: tuple[int, ...]) -> float:
    """How light a colour is, 0 to 1, as WCAG measures it for contrast."""
    red, green, blue = ((part / 255) ** 2.2 for part in fill)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class Entry(NamedTuple):
    """A line of the legend: one sort of op that occurs."""

    kind: Kind
    lane: Lane
    name: str


def legend(timelines: Iterable[Timeline]) -> list[Entry]:
    """One entry for each kind and lane that occurs, in the order F B I W R U, down before up."""
    seen: dict[tuple[Kind, Lane], None] = {}
    for timeline in timelines:
        lane_of = lanes(timeline.schedule)
        plain = Lane(False, 0)
        seen.update({(op.kind, lane_of[op.place] if op.kind in COMPUTE else plain): None for op in _ops(timeline)})
    both_ways = len({lane.up for kind, lane in seen if kind in COMPUTE}) > 1
    several_laps = any(lane.lap for _, lane in seen)
    order = list(Kind)
    return [
        Entry(kind, lane, _name(kind, lane, both_ways, several_laps))
        for kind, lane in sorted(seen, key=lambda pair: (order.index(pair[0]), pair[1]))
    ]


def letter(entry: Entry) -> str:
    """How the labels of these ops look, without the micro-batch: `F`, `b'`."""
    return (entry.kind.value.lower() if entry.lane.up else entry.kind.value) + lap_mark(entry.lane)


def _ops(timeline: Timeline) -> Iterable[Op]:
    return (span.op for span in timeline.spans)


def _name(kind: Kind, lane: Lane, both_ways: bool, several_laps: bool) -> str:
    way = (" up" if lane.up else " down") if both_ways and kind in COMPUTE else ""
    lap = f", lap {lane.lap + 1}" if several_laps and kind in COMPUTE else ""
    return f"{NAMES[kind]}{way}{lap}"


def short(timelines: list[Timeline]) -> float:
    """How long a short forward or backward is. In a measured step the very shortest may be an outlier."""
    lengths = sorted(float(s.end_s - s.start_s) for t in timelines for s in t.spans if s.op.kind in COMPUTE)
    lengths = [length for length in lengths if length > 0]
    return lengths[len(lengths) // 10] if lengths else max(float(t.makespan_s) for t in timelines)


def titled(timelines: Titled) -> dict[str, Timeline]:
    """Timelines by title, whether one was given or several. Raises InputError if there is nothing to draw."""
    by_title = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    for timeline in by_title.values():
        if not timeline.spans or not timeline.makespan_s:
            raise InputError(f"{timeline.schedule.scheme}: nothing to draw, the step takes no time")
        if not isfinite(timeline.makespan_s):
            raise InputError(f"{timeline.schedule.scheme}: nothing to draw, the step takes {timeline.makespan_s} s")
    return by_title


ASCII = str.maketrans({"µ": "u", "±": "+-", "·": "-", "…": "~"})  # for a terminal that has no others

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit that suits a time, and how many seconds it has."""
    return next((unit for unit in _UNITS if abs(seconds) >= unit[1]), _UNITS[-1] if seconds else _UNITS[0])


def duration(seconds: float, digits: int = 6) -> str:
    """Seconds, to so many digits, in the unit that suits them: `16 s`, `12.5 ms`, `40 µs`."""
    rounded = float(f"{float(seconds):.{digits}g}")
    unit, size = unit_of(rounded)
    return f"{rounded / size:.6g} {unit}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `1:02:03`."""
    if not isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def size(size_bytes: float) -> str:
    """To three digits, in thousands: `2.5 GB`."""
    unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size_bytes >= s), ("B", 1))
    return f"{size_bytes / scale:.3g} {unit}"


def figure(number: float) -> str:
    """A loss or the like: `2.8289`, and no row of digits where it has diverged, `1e+300`."""
    return f"{number:.4f}" if abs(number) < 1e9 else f"{number:.5g}"


def percent(ratio: float) -> str:
    return f"{100 * float(ratio):.1f} %"


def headline(title: str, timeline: Timeline) -> str:
    """What a drawing says above itself. A title that begins with the scheme, such as scheme:option=value, names it."""
    schedule = timeline.schedule
    name = title if title.startswith(schedule.scheme) else f"{title}: {schedule.scheme}" if title else schedule.scheme
    return (
        f"{name}, D={schedule.depth}, N={schedule.micro_batches}: "
        f"makespan {duration(timeline.makespan_s)}, bubble {percent(timeline.bubble_ratio)}"
    )
