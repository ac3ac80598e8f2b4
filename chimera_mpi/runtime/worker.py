"""One worker of a pipeline: it carries out the ops of its order, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..schedule import Kind, Op, Place, Schedule, completing
from ..timeline import Span
from .clock import DeviceStopwatch, Lap, Stopwatch
from .gradients import Gradients
from .mailbox import Mailbox, Tensors
from .norm import GlobalNorm
from .stage import COUNT, Recompute, Stage
from .staging import Staging
from .stash import Kept, Stash
from .tape import Segment, Tape, start_graph
from .weights import Weights

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (*outputs of the last layer, targets) -> sum, count
Targets = torch.Tensor | Tensors
Handler = tuple[Callable[[Op], Tensors], Callable[[Op, Tensors], None]]


@dataclass(frozen=True)
class MicroBatch:
    """`number` counts the micro-batches of a step over all pipeline groups. Inputs and targets are read where
    they are wanted, at the two ends of a pipeline, and once where these are on one rank."""

    step: int
    number: int
    read: Callable[[], tuple[Tensors, Targets]]

    @cached_property
    def tensors(self) -> tuple[Tensors, Targets]:
        """Inputs and targets."""
        return self.read()


Feed = Callable[[int], MicroBatch]  # the micro-batches of a pipeline group, by their index in the schedule


class Batches:
    """The micro-batches of a run, by the forward that wants them. One is kept until its last stage, if that is on this
    rank too."""

    def __init__(self, feed: Feed, schedule: Schedule, places: Container[Place]):
        self.feed, self.last_stage, self.places = feed, schedule.stages - 1, places
        self._under_way: dict[int, MicroBatch] = {}

    def of(self, op: Op) -> MicroBatch:
        batch = self._under_way.pop(op.index, None) or self.feed(op.index)
        if op.stage < self.last_stage and (op.pipe, self.last_stage) in self.places:
            self._under_way[op.index] = batch
        return batch


class Sums(NamedTuple):
    """What a worker has added up over a step, for all workers to add up: the losses and target tokens of its last
    stages, and its share of the squared gradient norm (of the step's last update, where it has several). The updates
    that were `skipped` are those of all workers alike."""

    loss: float
    targets: float
    square_norm: float
    skipped: int = 0


class Total(NamedTuple):
    """What `Sums` add up to over all ranks."""

    loss: float
    targets: float
    square_norm: float

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.targets, 1)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.square_norm)

    @property
    def grad_norm(self) -> float:
        return math.sqrt(self.square_norm)


class Judged(NamedTuple):
    """A step whose gradients all ranks have summed and judged by their norm. Its update needs no message any more."""

    step: int
    total: Total


class Tally:
    """Sums in the making."""

    def __init__(self) -> None:
        self.square_norm, self.skipped = 0.0, 0
        self._losses: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, targets: torch.Tensor) -> None:
        """Note a micro-batch's; nothing is read from the device yet."""
        self._losses.append(loss.detach())
        self._targets.append(targets.detach())

    def loss(self) -> float:
        """So far; waits for the device."""
        return _total(self._losses)

    def read(self) -> Sums:
        return Sums(self.loss(), _total(self._targets), self.square_norm, self.skipped)


class OpFailed(RuntimeError):
    """An op raised; the cause tells why, this tells where."""


class Whereabouts:
    """What a worker is at, for other threads to read: in a step an op, which it `acts` on once it has what it needs,
    or the end of the step; else whatever has an `excuse` to take its time, or nothing."""

    def __init__(self) -> None:
        self.step = -1  # outside of steps
        self.op: Op | None = None
        self.acts = False
        self.excuse = ""

    @contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """Around what may take as long as it takes. What fails in it leaves word of where that was."""
        before, self.excuse = self.excuse, what
        yield
        self.excuse = before


def interpret(
    schedule: Schedule,
    worker: int,
    handlers: Mapping[Kind, Handler],
    step: int,
    stopwatch: Stopwatch | DeviceStopwatch,
    here: Whereabouts,
) -> list[Span]:
    """Carry out a worker's order. A handler first waits for what its op needs, then acts; spans hold the acting."""
    read: Callable[[], Any] = stopwatch.read
    laps: list[Lap[Any]] = []
    for op in schedule.orders[worker]:
        wait, act = handlers[op.kind]
        here.op, here.acts = op, False
        try:
            received = wait(op)
            start = read()
            here.acts = True
            act(op, received)
            laps.append((op, start, read()))
        except Exception as error:
            raise OpFailed(f"step {step}, worker {worker}, stage {op.stage} of pipeline {op.pipe}, op {op}") from error
    return stopwatch.spans(worker, laps)


class Worker:
    """Trains its copies of stages as the schedule says, which covers `steps` steps: one, or more of a stream."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[Place, Stage],
        loss: Loss,
        mailbox: Mailbox,
        gradients: Gradients,
        weights: Mapping[Place, Weights],
        *,
        recompute: Recompute = Recompute(),
        norm: GlobalNorm | None = None,
        steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.schedule, self.stages, self.loss = schedule, stages, loss
        self.mailbox, self.gradients, self.weights = mailbox, gradients, weights
        self.recompute, self.norm, self.steps, self.staging = recompute, norm, steps, mailbox.staging
        self.stopwatch = self.staging.stopwatch(clock)
        self.worker, self.stash, self.here = mailbox.comm.rank, Stash(), Whereabouts()
        self.broken: set[int] = set()  # the layers whose gradients were not finite when `norm` last broke
        self.judged: Judged | None = None  # the last step that `norm` was for
        self._completing = completing(schedule, self.worker)
        self._handlers: dict[Kind, Handler] = {
            Kind.FORWARD: (self._receive, self._forward),
            Kind.BACKWARD: (self._receive, self._backward),
            Kind.INPUT: (self._receive, self._input),
            Kind.WEIGHT: (_nothing, self._weight),
            Kind.REDUCE: (_nothing, self._reduce),
            Kind.UPDATE: (self._await_gradients, self._update),
        }

    def run(self, feed: Feed, first_step: int, learning_rate: Callable[[int], float]) -> tuple[list[Span], list[Sums]]:
        """Do the steps from `first_step` on. Returns the spans, and what was added up in each step.

        Raises OpFailed.
        """
        self._batches, self._first_step = Batches(feed, self.schedule, self.stages), first_step
        self._learning_rate = learning_rate
        self._tallies = [Tally() for _ in range(self.steps)]
        for stage in self.stages.values():
            stage.train()
        self.here.step = first_step
        self.mailbox.open()
        spans = interpret(self.schedule, self.worker, self._handlers, first_step, self.stopwatch, self.here)
        self.here.op = None
        del self._batches
        self.mailbox.flush()
        self.stash.flush()
        for weights in self.weights.values():
            weights.flush()
        self.here.step = -1
        tallies, self._tallies = self._tallies, []
        return spans, [tally.read() for tally in tallies]

    @contextmanager
    def handling(self, change: Callable[[Handler], Handler]) -> Iterator[None]:
        """Within it ops are carried out by what `change` makes of their handlers."""
        plain = self._handlers
        self._handlers = {kind: change(handler) for kind, handler in plain.items()}
        try:
            yield
        finally:
            self._handlers = plain

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, so that small gradients of fp16 survive."""
        return self.norm.scale if self.norm else 1.0

    def _receive(self, op: Op) -> Tensors:
        return self.mailbox.receive(op, self.gradients.poke)

    def _forward(self, op: Op, received: Tensors) -> None:
        batch = self._batches.of(op)
        self.weights[op.place].use(op)
        tape = Tape(self._segments(op, batch), self.recompute.what != "none")
        outputs = tape.forward(start_graph(received) if op.stage else self.staging.brought(batch.tensors[0]))
        self.stash.put(op, Kept(tape, outputs[1:] if self._is_last(op) else ()))
        if self._is_last(op):
            self._add_loss(op, *outputs)
        else:
            self.mailbox.send(op, outputs)
        self._poke()

    def _segments(self, op: Op, batch: MicroBatch) -> list[Segment]:
        """The stage's layers as this micro-batch goes through them; the loss comes last."""
        stage = self.stages[op.place]
        runs = self.recompute.segments(stage.indices)
        segments: list[Segment] = [partial(stage, layers=r, step=batch.step, micro_batch=batch.number) for r in runs]
        if self._is_last(op):
            targets = brought_targets(self.staging, batch.tensors[1])
            segments[-1] = partial(then_loss, segments[-1], self.loss, targets)
        return segments

    def _add_loss(self, op: Op, loss: torch.Tensor, targets: torch.Tensor) -> None:
        self._tallies[op.index * self.steps // self.schedule.micro_batches].add(loss, targets)

    def _backward(self, op: Op, received: Tensors) -> None:
        self._go_back(op, received, Tape.backward)
        self.stash.pop(op)

    def _input(self, op: Op, received: Tensors) -> None:
        self._go_back(op, received, Tape.backward_inputs)

    def _weight(self, op: Op, received: Tensors) -> None:
        with self._filling(op):
            self.stash.pop(op).tape.backward_weights()
        self._poke()

    def _go_back(self, op: Op, received: Tensors, way: Callable[[Tape, Tensors], Tensors]) -> None:
        """From the gradients of a stage's outputs to those of its inputs; the number of targets rides along."""
        kept = self.stash.get(op)
        if self._is_last(op):
            (targets,) = kept.targets
            gradients: Tensors = (torch.full_like(targets, self.loss_scale), torch.zeros_like(targets))
        else:
            targets, *leaving = received
            gradients = tuple(leaving)
        self.weights[op.place].use(op)
        self.gradients.count(op.place, targets)
        with self._filling(op):
            entering = way(kept.tape, gradients)
        if op.stage:
            self.mailbox.send(op, (targets.to(COUNT.dtype), *entering))
        self._poke()

    def _filling(self, op: Op) -> AbstractContextManager[None]:
        return self.gradients.filling(op.place) if op in self._completing else nullcontext()

    def _reduce(self, op: Op, received: Tensors) -> None:
        self.gradients.start(op.place)

    def _await_gradients(self, op: Op) -> Tensors:
        if not self.gradients.settled(op.place):
            self.mailbox.push()
            places = self.stages if self.norm else [op.place]
            settle = partial(self.gradients.settle, loss_scale=self.loss_scale, meanwhile=self.mailbox.poke)
            squares = math.fsum(map(settle, places))
            self._add_squares(op, squares)
            if self.norm:
                tally = self._tallies[self._step_of(op)]
                factor = self.norm.judge(squares, tally.loss() if self.norm.guards else 0.0)
                self._heed(self.norm, factor, tally)
        return ()

    def _heed(self, norm: GlobalNorm, factor: float, tally: Tally) -> None:
        """Clip the gradients of an update, or see that it is skipped."""
        self.judged = Judged(self._first_step, Total(norm.loss, self.gradients.targets, norm.squares))
        tally.skipped += norm.skips
        if norm.broke:
            self.broken = self._layers_of(self.gradients.broken())
        if factor != 1:
            self.gradients.scale(factor)

    def finish(self, judged: Judged) -> None:
        """Update the weights by a step that others have `judged`, and this worker not: it was interrupted while it
        waited for the norm. So it has all sums."""
        assert self.norm is not None and judged.step == self._first_step
        assert all(self.gradients.settled(place) for place in self.stages)
        factor = self.norm.heed(judged.total.square_norm, judged.total.loss)
        self._heed(self.norm, factor, self._tallies[-1])
        for op in self.schedule.orders[self.worker]:
            if op.kind is Kind.UPDATE:
                self._update(op, ())

    def _layers_of(self, parameters: set[nn.Parameter]) -> set[int]:
        return {
            index
            for stage in self.stages.values()
            for index in stage.indices
            if not parameters.isdisjoint(stage.layer(index).parameters())
        }

    def _add_squares(self, op: Op, squares: float) -> None:
        """Of the last update of a step."""
        step = self._step_of(op)
        if op.index + 1 == self.schedule.updates * (step + 1) // self.steps:
            self._tallies[step].square_norm += squares

    def _update(self, op: Op, received: Tensors) -> None:
        if not (self.norm and self.norm.skips):
            self.weights[op.place].update(self._learning_rate(self._first_step + self._step_of(op)))
        self.gradients.release(op.place)

    def _step_of(self, update: Op) -> int:
        return update.index * self.steps // self.schedule.updates

    def _is_last(self, op: Op) -> bool:
        return op.stage + 1 == self.schedule.stages

    def _poke(self) -> None:
        self.mailbox.poke()
        self.gradients.poke()


class Evaluator:
    """Carries out a schedule of forwards only: the loss, without a graph."""

    def __init__(self, schedule: Schedule, stages: Mapping[Place, Stage], loss: Loss, mailbox: Mailbox):
        self.schedule, self.stages, self.loss, self.mailbox = schedule, stages, loss, mailbox
        self._handlers: dict[Kind, Handler] = {Kind.FORWARD: (mailbox.receive, self._forward)}

    @torch.no_grad()
    def run(self, feed: Feed, step: int, training: bool = False) -> Sums:
        """With `training` as the forwards of a step see it: with dropout."""
        self._batches, self._tally = Batches(feed, self.schedule, self.stages), Tally()
        for stage in self.stages.values():
            stage.train(training)
        self.mailbox.open()
        stopwatch = Stopwatch(time.perf_counter)
        interpret(self.schedule, self.mailbox.comm.rank, self._handlers, step, stopwatch, Whereabouts())
        del self._batches
        self.mailbox.flush()
        return self._tally.read()

    def _forward(self, op: Op, received: Tensors) -> None:
        batch, stage, staging = self._batches.of(op), self.stages[op.place], self.mailbox.staging
        entering = received if op.stage else staging.brought(batch.tensors[0])
        outputs = stage(entering, stage.indices, batch.step, batch.number)
        if op.stage + 1 < self.schedule.stages:
            self.mailbox.send(op, outputs)
        else:
            self._tally.add(*self.loss(*outputs, brought_targets(staging, batch.tensors[1])))


def then_loss(segment: Segment, loss: Loss, targets: Targets, tensors: Tensors) -> Tensors:
    """The last layers of a model: sum and count of the loss of what they put out."""
    return loss(*segment(tensors), targets)


def brought_targets(staging: Staging, targets: Targets) -> Targets:
    """On the device."""
    return staging.brought(targets) if isinstance(targets, tuple) else staging.brought((targets,))[0]


def _nothing(op: Op) -> Tensors:
    return ()


def _total(numbers: list[torch.Tensor]) -> float:
    return torch.stack(numbers).double().sum().item() if numbers else 0.0
