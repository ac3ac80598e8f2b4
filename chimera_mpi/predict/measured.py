"""Costs that a run has shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from ..schedule import Kind
from ..timeline import Span
from .costs import Costs, at_stage


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

    inputs, weights = per_stage(Kind.INPUT), per_stage(Kind.WEIGHT)
    halves = [i + w for i, w in zip(inputs, weights, strict=True)]
    wholes = [whole or both for whole, both in zip(per_stage(Kind.BACKWARD), halves, strict=True)]
    return Costs(
        forward_s=per_stage(Kind.FORWARD),
        backward_s=wholes,
        input_s=inputs if any(inputs) else None,
        weight_s=weights if any(weights) else None,
        update_s=per_stage(Kind.UPDATE),
    )


def merged(costs: Costs, stages: int, into: int) -> Costs:
    """The costs of the same layers as `into` stages of equally many of the `stages`: whole backwards only."""

    def merge(values: Sequence[float]) -> list[float]:
        return [sum(values[at * stages // into : (at + 1) * stages // into]) for at in range(into)]

    whole = [
        [at_stage(of, stage) for stage in range(stages)] for of in (costs.forward_s, costs.backward_s, costs.update_s)
    ]
    forward_s, backward_s, update_s = map(merge, whole)
    return Costs(forward_s=forward_s, backward_s=backward_s, update_s=update_s)
