"""Costs that a run has shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from ..schedule import Kind
from ..timeline import Span
from .costs import Costs


def measured_costs(spans: Iterable[Span], stages: int) -> Costs:
    """For each stage the median seconds of its forward and backward (or its halves) and update, over all spans.

    An op that was never seen costs nothing. Messages and all-reduces count as free: what they cost hides
    in waits, which a measured span does not hold.
    """
    seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in spans:
        seen[span.op.kind, span.op.stage].append(span.end_s - span.start_s)

    def per_stage(kind: Kind) -> list[float]:
        return [median(seen[kind, stage]) if seen[kind, stage] else 0.0 for stage in range(stages)]

    return Costs(
        forward_s=per_stage(Kind.FORWARD),
        backward_s=per_stage(Kind.BACKWARD),
        input_s=per_stage(Kind.INPUT),
        weight_s=per_stage(Kind.WEIGHT),
        update_s=per_stage(Kind.UPDATE),
    )
