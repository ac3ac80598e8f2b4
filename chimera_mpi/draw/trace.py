"""Timelines as a Chrome trace, for ui.perfetto.dev.

The format is the Trace Event Format. What it leaves to its readers is held to what Perfetto's importer does:

    slices of a thread follow each other without overlap, so times are whole nanoseconds before they are written
    an arrow binds to the slice in which its end lies, so it leaves from the middle of the sender's
    what overlaps has a lane of its own: an asynchronous slice, whose id is a text
    process and thread 0 are the idle ones, so both count from above it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from ..errors import InputError
from ..schedule import COMPUTE, Kind, needs
from ..timeline import Span, Timeline
from . import look
from .facts import memory
from .look import Titled

Event = dict[str, Any]
Clock = Callable[[float], int]  # from a timeline's seconds to nanoseconds of the trace
RUN = 1  # the process of a run's steps; those of its replicas follow


class SampledStep(NamedTuple):
    """A measured step: where its seconds lie on the axis of its run, its timelines, of each replica one, all from the
    step's start on, and figures to show with it."""

    step: int
    start_s: float
    end_s: float
    replicas: tuple[Timeline, ...]
    figures: Mapping[str, float]


class _Process(NamedTuple):
    """Where events of a timeline go, and by what clock; `ids` tells arrows and lanes of all processes apart."""

    pid: int
    clock: Clock
    ids: Iterator[int]

    def at(self, phase: str, worker: int, seconds: float, **more: Any) -> Event:
        return {"ph": phase, "pid": self.pid, "tid": thread(self.pid, worker), "ts": self.clock(seconds) / 1e3, **more}

    def slice(self, worker: int, start_s: float, end_s: float, **more: Any) -> Event:
        return self.at("X", worker, start_s, dur=(self.clock(end_s) - self.clock(start_s)) / 1e3, **more)


def chrome_trace(timelines: Titled) -> str:
    """The JSON text of a trace of these timelines, each from 0 on.

    A timeline is a process and a worker a thread of it; an op is a complete event, a message between two workers an
    arrow, an all-reduce an asynchronous slice from its start to the update, the activations that a worker holds a
    counter.
    """
    ids, events = count(1), list[Event]()
    for pid, (title, timeline) in enumerate(look.titled(timelines).items(), 1):
        events += _names(pid, look.headline(title, timeline), [f"P{w}" for w in range(timeline.schedule.depth)])
        events += _timeline(_Process(pid, _clock(timeline.begin_s, 0.0), ids), timeline)
    return _text(events)


def run_trace(steps: Iterable[SampledStep], name: str = "run") -> str:
    """The JSON text of a trace of a run's sampled steps, one after the other on the run's axis.

    A replica is a process and a worker a thread of it, as in `chrome_trace`; one process more has the steps
    themselves. Raises InputError if there is no step.
    """
    ids, events, depths = count(1), list[Event](), dict[int, int]()
    for step in steps:
        whole = _Process(RUN, _clock(0.0, 0.0), ids)
        args = {"step": step.step, **step.figures}
        events.append(whole.slice(0, step.start_s, step.end_s, name=f"step {step.step}", cat="step", args=args))
        for replica, timeline in enumerate(step.replicas):
            process = _Process(RUN + 1 + replica, _clock(0.0, step.start_s), ids)
            sums = len(step.replicas) * len(timeline.schedule.pipes) > 1
            events += _timeline(process, timeline, sums)
            depths[replica] = max(depths.get(replica, 0), timeline.schedule.depth)
    if not events:
        raise InputError(f"{name}: no sampled step to draw")
    names = [*_names(RUN, name, ["steps"])]
    for replica, depth in sorted(depths.items()):
        names += _names(RUN + 1 + replica, f"replica {replica}", [f"P{worker}" for worker in range(depth)])
    return _text(names + events)


def thread(pid: int, worker: int) -> int:
    """The number of a worker's thread: never that of its process, which would be a main thread and come first."""
    return 1000 * pid + worker


def _clock(begin_s: float, at_s: float) -> Clock:
    """By which `begin_s` is at `at_s` of the trace."""
    return lambda seconds: round((float(seconds) - float(begin_s) + at_s) * 1e9)


def _text(events: Sequence[Event]) -> str:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _names(pid: int, title: str, workers: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for worker, name in enumerate(workers):
        where = {"ph": "M", "pid": pid, "tid": thread(pid, worker)}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": worker}}


def _timeline(process: _Process, timeline: Timeline, sums: bool = True) -> Iterator[Event]:
    """The slices first: an arrow that begins with a slice must come after it. With `sums` all-reduces too."""
    yield from _ops(process, timeline)
    yield from _messages(process, timeline)
    if sums:
        yield from _allreduces(process, timeline)
    yield from _memory(process, timeline)


def _ops(process: _Process, timeline: Timeline) -> Iterator[Event]:
    lane_of = look.lanes(timeline.schedule)
    for span in timeline.spans:
        kind, pipe, stage, index = span.op
        lane = lane_of[span.op.place]
        way = " up" if lane.up and kind in COMPUTE else ""
        yield process.slice(
            span.worker,
            span.start_s,
            span.end_s,
            name=look.label(span.op, lane),
            cat=look.NAMES[kind] + way,
            args={
                "op": str(span.op),
                "kind": look.NAMES[kind],
                "pipeline": pipe,
                "stage": stage,
                "micro-batch" if kind in COMPUTE else "update": index,
            },
        )


def _messages(process: _Process, timeline: Timeline) -> Iterator[Event]:
    """An arrow from the op that makes an activation or a gradient to the op that needs it elsewhere."""
    by_op = {span.op: span for span in timeline.spans}
    for span in timeline.spans:
        for need in needs(timeline.schedule, span.op):
            source = by_op.get(need)
            if need.stage == span.op.stage or source is None or source.worker == span.worker:
                continue
            if span.end_s < source.start_s:  # by clocks that differ by more than two ops take
                continue
            leaves_s, arrives_s = _ends(source, span)
            name = {"name": "message", "cat": "message", "id": next(process.ids)}
            yield process.at("s", source.worker, leaves_s, **name)
            yield process.at("f", span.worker, arrives_s, bp="e", **name)


def _ends(source: Span, target: Span) -> tuple[float, float]:
    """When an arrow leaves and arrives, each within its span. It leaves first, also where the clocks of two workers
    differ by more than an op takes."""
    leaves_s = min((source.start_s + source.end_s) / 2, max(source.start_s, target.start_s))
    return leaves_s, max(target.start_s, leaves_s)


def _allreduces(process: _Process, timeline: Timeline) -> Iterator[Event]:
    """Of each place and update a slice from where its worker starts to add up gradients to where it has the sum."""
    by_op = {span.op: span for span in timeline.spans}
    for update in timeline.spans:
        start = by_op.get(update.op._replace(kind=Kind.REDUCE))
        if update.op.kind is not Kind.UPDATE or start is None or update.start_s <= start.start_s:
            continue
        _, pipe, stage, index = update.op
        name = {
            "name": f"all-reduce, stage {stage} on P{update.worker}",
            "cat": "all-reduce",
            "id": f"a{next(process.ids)}",
        }
        yield process.at("b", update.worker, start.start_s, **name, args={"pipeline": pipe, "update": index})
        yield process.at("e", update.worker, update.start_s, **name)


def _memory(process: _Process, timeline: Timeline) -> Iterator[Event]:
    begin_s = timeline.begin_s
    end_s = begin_s + timeline.makespan_s
    for worker, row in enumerate(timeline.rows):
        name = f"live activations P{worker}"
        for level in memory(row, begin_s, end_s):
            yield process.at("C", worker, level.start_s, name=name, args={"live": level.live})
        yield process.at("C", worker, end_s, name=name, args={"live": 0})
