"""What the ops of a schedule cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import add, mul

from ..errors import InputError
from ..schedule import Kind, Op

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Link:
    """A way from worker to worker: a message of `n` bytes takes `latency_s + n * s_per_byte` seconds."""

    latency_s: float = 0
    s_per_byte: float = 0

    def __post_init__(self) -> None:
        _check(self, "latency_s", "s_per_byte")

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.s_per_byte


@dataclass(frozen=True)
class Costs:
    """Seconds of the ops on one micro-batch; each a number, or a sequence with one for each stage.

    Input and weight gradient are halves of the backward when not given. With `recompute` the backward (or
    the input gradient) does the forward once more.

    A message takes `transfer_s` of the stage that makes it, plus the time that `message_bytes` of the
    stage whose output it is, or the gradient of whose output, take on `link`; on `node_link` if both workers
    are on one node, of `workers_per_node` each. `sends_block` keeps the sender busy meanwhile.

    `allreduce_s` is a stage's all-reduce, which runs in the background but takes the share
    `allreduce_busy` of its time from its worker. `jitter` makes each op longer or shorter by up to that
    share, by chance, the same for the same `seed`.
    """

    forward_s: PerStage = 1
    backward_s: PerStage = 2
    input_s: PerStage | None = None
    weight_s: PerStage | None = None
    transfer_s: PerStage = 0
    allreduce_s: PerStage = 0
    update_s: PerStage = 0
    recompute: bool = False
    message_bytes: PerStage = 0
    link: Link | None = None
    node_link: Link | None = None
    workers_per_node: int = 1
    sends_block: bool = False
    allreduce_busy: float = 0
    jitter: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in PER_STAGE:
            if hasattr(value := getattr(self, name), "__len__"):
                object.__setattr__(self, name, tuple(value))
        _check(self, *PER_STAGE, "jitter", "allreduce_busy")
        if self.workers_per_node < 1:
            raise InputError(f"workers_per_node must be at least 1, not {self.workers_per_node}")
        if self.jitter > 1 or self.allreduce_busy > 1:
            raise InputError("jitter and allreduce_busy are shares: try 0.1")

    def seconds(self, op: Op) -> float:
        """How long `op` keeps its worker busy."""
        seconds = at_stage(self._of_kind[op.kind], op.stage)
        if self.jitter:
            seconds *= 1 + random.Random(f"{self.seed} {op}").uniform(-self.jitter, self.jitter)
        return seconds

    def transfer(self, op: Op, source: int = 0, target: int = 1) -> float:
        """How long what `op` made travels from worker `source` to worker `target`."""
        near = source // self.workers_per_node == target // self.workers_per_node
        link = self.node_link if near and self.node_link else self.link
        seconds = at_stage(self.transfer_s, op.stage)
        if link:
            seconds += link.seconds(at_stage(self.message_bytes, op.stage - (op.kind is not Kind.FORWARD)))
        return seconds

    def allreduce(self, op: Op) -> float:
        """How long the all-reduce that `op` starts takes, once all replicas have started it."""
        return at_stage(self.allreduce_s, op.stage)

    def for_stages(self, stages: int) -> Costs:
        """These costs, if they suit a pipeline of so many stages, else an InputError with both numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != stages:
                raise InputError(f"{field.name} has values for {len(value)} stages, the schedule has {stages}")
        return self

    @cached_property
    def _of_kind(self) -> dict[Kind, PerStage]:
        again = self.forward_s if self.recompute else 0
        halves = per_stage(lambda seconds: seconds / 2, self.backward_s)
        return {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: per_stage(add, self.backward_s, again),
            Kind.INPUT: per_stage(add, halves if self.input_s is None else self.input_s, again),
            Kind.WEIGHT: halves if self.weight_s is None else self.weight_s,
            Kind.REDUCE: per_stage(mul, self.allreduce_s, self.allreduce_busy),
            Kind.UPDATE: self.update_s,
        }


def at_stage(value: PerStage, stage: int) -> float:
    """The value of one stage; an InputError if there are not so many."""
    if not isinstance(value, (tuple, list)):
        return value  # type: ignore[return-value]
    if stage >= len(value):
        raise InputError(f"there is a stage {stage}, but costs for {len(value)} stages only: give one for each")
    return value[stage]


def per_stage(function: Callable[..., float], *values: PerStage) -> PerStage:
    """The function of these values, stage by stage where one of them has stages."""
    stages = max((len(value) for value in values if isinstance(value, Sequence)), default=0)
    if not stages:
        return function(*values)
    return tuple(function(*(at_stage(value, stage) for value in values)) for stage in range(stages))


PER_STAGE = (
    "forward_s",
    "backward_s",
    "input_s",
    "weight_s",
    "transfer_s",
    "allreduce_s",
    "update_s",
    "message_bytes",
)


def _check(costs: Costs | Link, *names: str) -> None:
    for name in names:
        value = getattr(costs, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not 0 <= number < float("inf"):
                raise InputError(f"{name} must be 0 or more and finite, not {number}")
