"""What the ops of a schedule cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..schedule import Kind, Op

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds of the ops on one micro-batch; each a number, or a sequence with one for each stage.

    Input and weight gradient are halves of the backward when not given. `transfer_s` is a message's way
    from one worker to another, `allreduce_s` a stage's all-reduce, which runs in the background.
    """

    forward_s: PerStage = 1
    backward_s: PerStage = 2
    input_s: PerStage | None = None
    weight_s: PerStage | None = None
    transfer_s: PerStage = 0
    allreduce_s: PerStage = 0
    update_s: PerStage = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, Sequence) else (value,):
                if number is not None and not 0 <= number < float("inf"):
                    raise ValueError(f"{field.name} must be a time of 0 s or more, not {number}")

    def seconds(self, op: Op) -> float:
        """How long `op` keeps its worker busy."""
        return at_stage(self._of_kind(op.kind), op.stage)

    def transfer(self, op: Op) -> float:
        """How long what `op` made travels to another worker."""
        return at_stage(self.transfer_s, op.stage)

    def allreduce(self, op: Op) -> float:
        """How long the all-reduce that `op` starts takes, once all replicas have started it."""
        return at_stage(self.allreduce_s, op.stage)

    def _of_kind(self, kind: Kind) -> PerStage:
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.backward_s
        if kind is Kind.INPUT:
            return half(self.backward_s) if self.input_s is None else self.input_s
        if kind is Kind.WEIGHT:
            return half(self.backward_s) if self.weight_s is None else self.weight_s
        return self.update_s if kind is Kind.UPDATE else 0


def at_stage(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


def half(value: PerStage) -> PerStage:
    return [number / 2 for number in value] if isinstance(value, Sequence) else value / 2
