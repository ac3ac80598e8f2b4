"""A timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..schedule import COMPUTE, needs
from ..timeline import Timeline
from . import look
from .facts import memory
from .look import Titled

Event = dict[str, Any]


def chrome_trace(timelines: Titled) -> str:
    """The JSON text of a trace in the Trace Event Format.

    A timeline is a process and a worker a thread of it; an op is a complete event, a message between two
    workers an arrow, the activations that a worker holds a counter. Times are microseconds from the start
    of the step.
    """
    events: list[Event] = []
    for pid, (title, timeline) in enumerate(look.titled(timelines).items()):
        events += _names(pid, look.headline(title, timeline), timeline)
        events += _ops(pid, timeline)
        events += _messages(pid, timeline, first_id=len(events))
        events += _memory(pid, timeline)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _names(pid: int, title: str, timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    for worker in range(timeline.schedule.depth):
        yield {"ph": "M", "pid": pid, "tid": worker, "name": "thread_name", "args": {"name": f"P{worker}"}}
        yield {"ph": "M", "pid": pid, "tid": worker, "name": "thread_sort_index", "args": {"sort_index": worker}}


def _ops(pid: int, timeline: Timeline) -> Iterator[Event]:
    begin = timeline.begin_s
    lane_of = look.lanes(timeline.schedule)
    for span in timeline.spans:
        kind, pipe, stage, index = span.op
        lane = lane_of[span.op.place]
        way = " up" if lane.up and kind in COMPUTE else ""
        yield {
            "ph": "X",
            "pid": pid,
            "tid": span.worker,
            "name": look.label(span.op, lane),
            "cat": look.NAMES[kind] + way,
            "ts": _microseconds(span.start_s - begin),
            "dur": _microseconds(span.end_s - span.start_s),
            "args": {
                "op": str(span.op),
                "kind": look.NAMES[kind],
                "pipeline": pipe,
                "stage": stage,
                "micro-batch" if kind in COMPUTE else "update": index,
            },
        }


def _messages(pid: int, timeline: Timeline, first_id: int) -> Iterator[Event]:
    """An arrow from the op that makes an activation or a gradient to the op that needs it elsewhere.

    An arrow hangs on the event that surrounds its ends, so it leaves from the middle of the sender's.
    """
    begin = timeline.begin_s
    by_op = {span.op: span for span in timeline.spans}
    arrow = first_id
    for span in timeline.spans:
        for need in needs(timeline.schedule, span.op):
            source = by_op.get(need)
            if need.stage == span.op.stage or source is None or source.worker == span.worker:
                continue
            name = {"name": "message", "cat": "message", "pid": pid, "id": arrow}
            leaves = _microseconds((source.start_s + source.end_s) / 2 - begin)
            yield {**name, "ph": "s", "tid": source.worker, "ts": leaves}
            yield {**name, "ph": "f", "bp": "e", "tid": span.worker, "ts": _microseconds(span.start_s - begin)}
            arrow += 1


def _memory(pid: int, timeline: Timeline) -> Iterator[Event]:
    begin = timeline.begin_s
    for worker, row in enumerate(timeline.rows):
        for level in memory(row, begin, begin + timeline.makespan_s):
            name = {"ph": "C", "pid": pid, "name": f"live activations P{worker}"}
            yield {**name, "ts": _microseconds(level.start_s - begin), "args": {"live": level.live}}
