"""A timeline: what each worker did, or would do, and when. Forecast and measurement are the same type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .schedule import COMPUTE, Kind, Op, Schedule, needs


class Span(NamedTuple):
    """One op of one worker. `start_s` is when it began to work, its inputs at hand."""

    worker: int
    op: Op
    start_s: float
    end_s: float


class Wait(NamedTuple):
    """`cause` came last of what an op needs and what its worker did before it; None for a first op.

    `idle_s` is how long its worker had been doing nothing.
    """

    cause: Span | None
    idle_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step of `schedule`. Seconds may be any numbers: int, float or Fraction."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each worker by start."""
        rows: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            rows[span.worker].append(span)
        return tuple(tuple(sorted(rows[w], key=lambda span: span.start_s)) for w in range(self.schedule.depth))

    @cached_property
    def begin_s(self) -> float:
        """When the step begins: a measured one need not begin at 0."""
        return min(span.start_s for span in self.spans)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first op's start to the last one's end."""
        return max(span.end_s for span in self.spans) - self.begin_s

    @cached_property
    def idle_ratios(self) -> tuple[float, ...]:
        """For each worker, the share of the step that it spends in neither forward nor backward."""
        return tuple(
            (self.makespan_s - sum(s.end_s - s.start_s for s in row if s.op.kind in COMPUTE)) / self.makespan_s
            for row in self.rows
        )

    @property
    def bubble_ratio(self) -> float:
        """Idle worker time / (workers * makespan)."""
        return sum(self.idle_ratios) / len(self.idle_ratios)

    @cached_property
    def exposed_allreduce_s(self) -> tuple[float, ...]:
        """For each worker, the seconds it waits for all-reduces: what is idle just before its updates."""
        return tuple(
            sum(later.start_s - earlier.end_s for earlier, later in pairwise(row) if later.op.kind is Kind.UPDATE)
            for row in self.rows
        )

    @cached_property
    def waits(self) -> dict[Op, Wait]:
        """For each op the reason why it did not start earlier."""
        span_of = {span.op: span for span in self.spans}
        return {
            span.op: Wait(
                _cause(span, before, [span_of[need] for need in needs(self.schedule, span.op) if need in span_of]),
                max(span.start_s - (before.end_s if before else self.begin_s), 0),
            )
            for row in self.rows
            for before, span in zip([None, *row], row, strict=False)
        }

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of compute ops, first to last, in which each waited for the one before it."""
        path = []
        span: Span | None = max((s for s in self.spans if s.op.kind in COMPUTE), key=lambda span: span.end_s)
        while span is not None:
            path.append(span)
            span = self.waits[span.op].cause
        return tuple(span for span in reversed(path) if span.op.kind in COMPUTE)

    def on_critical_path(self, *kinds: Kind) -> int:
        """How many ops of these kinds the critical path has: C_f and C_b of the paper (Section 3.4)."""
        return sum(span.op.kind in kinds for span in self.critical_path)


class Breakdown(NamedTuple):
    """How a worker spent a step, in seconds: computing, waiting for messages, for all-reduces, updating."""

    compute_s: float
    wait_s: float
    allreduce_wait_s: float
    update_s: float


def breakdown(row: Sequence[Span], start_s: float) -> Breakdown:
    """Add up one worker's spans of a step that began at `start_s`, and the gaps before them."""
    spent = Breakdown(0.0, 0.0, 0.0, 0.0)
    for span in row:
        gap, busy = span.start_s - start_s, span.end_s - span.start_s
        if span.op.kind in COMPUTE:
            spent = spent._replace(wait_s=spent.wait_s + gap, compute_s=spent.compute_s + busy)
        elif span.op.kind is Kind.UPDATE:
            spent = spent._replace(allreduce_wait_s=spent.allreduce_wait_s + gap, update_s=spent.update_s + busy)
        start_s = span.end_s
    return spent


def _cause(span: Span, before: Span | None, makers: list[Span]) -> Span | None:
    """What `span` waited for: what its worker did before, or what came last of all it needs.

    If the worker was idle in between, by more than it takes to turn to the next op, it waited for a message or
    for an all-reduce.
    """
    sent = [maker for maker in makers if maker.worker != span.worker or maker.op.kind is Kind.REDUCE]
    if before and sent and span.start_s - before.end_s > (span.end_s - span.start_s) / 100:
        return max(sent, key=lambda maker: maker.end_s)
    return max([*makers, *([before] if before else [])], key=lambda cause: cause.end_s, default=None)
