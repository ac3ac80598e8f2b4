"""What the ops of a schedule cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from math import lcm, log2
from operator import add, mul
from typing import Any

from ..errors import InputError
from ..schedule import Kind, Op, Schedule

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

    A stage's all-reduce runs in the background but takes the share `allreduce_busy` of its time from its
    worker. With `allreduces_queue` those of a worker take turns, as they do where one port carries them all.
    It is over as many replicas as the schedule has pipelines, in each of `groups` groups of workers that train
    side by side (the paper's W), and takes `allreduce_s` plus what `gradient_bytes` take on `link`:
    2 log2(r) latencies and 2 (r - 1) / r of the bytes over r replicas (Chimera, Section 3.4). Over one
    replica it takes no time.

    `jitter` makes each op longer or shorter by up to that share, by chance, the same for the same `seed`.
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
    gradient_bytes: PerStage = 0
    groups: int = 1
    allreduce_busy: float = 0
    allreduces_queue: bool = False
    jitter: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in PER_STAGE:
            if hasattr(value := getattr(self, name), "__len__"):
                object.__setattr__(self, name, tuple(value))
        _check(self, *PER_STAGE, "jitter", "allreduce_busy")
        for name in "workers_per_node", "groups":
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
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

    def on(self, schedule: Schedule) -> Costs:
        """These costs where a stage has the replicas that `schedule` gives it: `allreduce_s` is all there is.

        Raises InputError, with both numbers, if they are for another number of stages.
        """
        for name in PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != schedule.stages:
                raise InputError(f"{name} has values for {len(value)} stages, the schedule has {schedule.stages}")
        replicas = len(schedule.pipes) * self.groups
        if replicas == 1:
            return replace(self, allreduce_s=0, gradient_bytes=0) if self.allreduce_s or self.gradient_bytes else self
        return self._reducing_over(replicas) if self.gradient_bytes else self

    def _reducing_over(self, replicas: int) -> Costs:
        link = self.link or Link()
        latency_s, share = 2 * log2(replicas) * link.latency_s, Fraction(2 * (replicas - 1), replicas)
        gradients_s = per_stage(
            lambda size_bytes: latency_s + share * size_bytes * link.s_per_byte, self.gradient_bytes
        )
        return replace(self, allreduce_s=per_stage(add, self.allreduce_s, gradients_s), gradient_bytes=0)

    def in_ticks(self) -> tuple[Costs, int]:
        """These costs in ticks, of which all times are whole numbers, and the ticks of a second.

        So sums are as exact as with fractions, and much quicker. With jitter nothing is exact: a tick is a second.
        """
        if self.jitter:
            return self, 1
        per_s = 2 * lcm(*(Fraction(number).denominator for number in self._times()))  # a backward may be halved
        ticks = partial(_times_over, per_s)
        changes: dict[str, Any] = {
            name: per_stage(ticks, value) for name in TIMES if (value := getattr(self, name)) is not None
        }
        for name in "link", "node_link":
            if link := getattr(self, name):
                changes[name] = Link(ticks(link.latency_s), ticks(link.s_per_byte))
        return replace(self, **changes), per_s

    def _times(self) -> Iterator[float]:
        """All numbers of seconds in these costs."""
        for name in TIMES:
            value = getattr(self, name)
            yield from value if isinstance(value, tuple) else () if value is None else (value,)
        for link in filter(None, (self.link, self.node_link)):
            yield from (link.latency_s, link.s_per_byte)

    @cached_property
    def _of_kind(self) -> dict[Kind, PerStage]:
        again = self.forward_s if self.recompute else 0
        halves = per_stage(_half, self.backward_s)
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
    "gradient_bytes",
)
TIMES = tuple(name for name in PER_STAGE if name.endswith("_s"))


def _half(seconds: float) -> float:
    """Half of it, a whole number where that is one."""
    return seconds // 2 if isinstance(seconds, int) and seconds % 2 == 0 else seconds / 2


def _times_over(factor: int, number: float) -> float:
    """Their product, exactly."""
    product = Fraction(number) * factor
    return product.numerator if product.denominator == 1 else product  # type: ignore[return-value]


def _check(costs: Costs | Link, *names: str) -> None:
    for name in names:
        value = getattr(costs, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not 0 <= number < float("inf"):
                raise InputError(f"{name} must be 0 or more and finite, not {number}")
