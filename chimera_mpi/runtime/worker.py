"""One worker of a pipeline: it carries out the ops of its order, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..schedule import Kind, Op, Place, Schedule
from ..timeline import Span
from .gradients import Clip, Gradients
from .mailbox import Mailbox, Tensors
from .stage import COUNT, Stage
from .stash import Kept, Stash

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (outputs of the last layer, targets) -> sum, count
Handler = tuple[Callable[[Op], Tensors], Callable[[Op, Tensors], None]]


class MicroBatch(NamedTuple):
    """`number` counts the micro-batches of a step over all pipeline groups."""

    inputs: Tensors
    targets: torch.Tensor
    number: int


class Feed(NamedTuple):
    """The micro-batches of one step of one pipeline group, by their index in the group."""

    step: int
    micro_batch: Callable[[int], MicroBatch]


@dataclass
class Sums:
    """What a worker adds up over a step, for all workers to add up: the losses and target tokens of its last
    stages, and its share of the squared gradient norm."""

    loss: float = 0.0
    targets: float = 0.0
    square_norm: float = 0.0


class OpFailed(RuntimeError):
    """An op raised; the cause tells why, this tells where."""


def interpret(
    schedule: Schedule, worker: int, handlers: Mapping[Kind, Handler], step: int, clock: Callable[[], float]
) -> list[Span]:
    """Carry out a worker's order. A handler first waits for what its op needs, then acts; spans hold the acting."""
    spans = []
    for op in schedule.orders[worker]:
        wait, act = handlers[op.kind]
        try:
            received = wait(op)
            start = clock()
            act(op, received)
            spans.append(Span(worker, op, start, clock()))
        except Exception as error:
            raise OpFailed(f"step {step}, worker {worker}, stage {op.stage} of pipeline {op.pipe}, op {op}") from error
    return spans


class Worker:
    """Trains its copies of stages as the schedule says."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[Place, Stage],
        loss: Loss,
        mailbox: Mailbox,
        gradients: Gradients,
        optimizers: Mapping[Place, torch.optim.Optimizer | None],
        clip: Clip | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.schedule, self.stages, self.loss = schedule, stages, loss
        self.mailbox, self.gradients, self.optimizers, self.clip = mailbox, gradients, optimizers, clip
        self.clock, self.worker = clock, mailbox.comm.rank
        self.stash, self.sums = Stash(), Sums()
        self._handlers: dict[Kind, Handler] = {
            Kind.FORWARD: (self.mailbox.receive, self._forward),
            Kind.BACKWARD: (self.mailbox.receive, self._backward),
            Kind.REDUCE: (_nothing, self._reduce),
            Kind.UPDATE: (self._await_gradients, self._update),
        }

    def step(self, feed: Feed, learning_rate: float) -> list[Span]:
        """Do one step; what it adds up is in `sums` afterwards. Raises OpFailed."""
        self.feed, self.sums = feed, Sums()
        for optimizer in filter(None, self.optimizers.values()):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        for stage in self.stages.values():
            stage.train()
        self.mailbox.open()
        spans = interpret(self.schedule, self.worker, self._handlers, feed.step, self.clock)
        self.mailbox.flush()
        self.stash.flush()
        return spans

    def _forward(self, op: Op, received: Tensors) -> None:
        batch = self.feed.micro_batch(op.index)
        inputs = require_gradients(received) if op.stage else batch.inputs
        outputs = self.stages[op.place](inputs, self.feed.step, batch.number)
        counted: Tensors = ()
        if op.stage + 1 < self.schedule.stages:
            self.mailbox.send(op, outputs)
        else:
            loss, targets = self.loss(*outputs, batch.targets)
            outputs, counted = (loss,), (targets,)
            self.sums.loss += loss.item()
            self.sums.targets += targets.item()
        self.stash.put(op, Kept(inputs, outputs, counted))
        self._poke()

    def _backward(self, op: Op, received: Tensors) -> None:
        kept = self.stash.pop(op)
        *gradients, targets = received or (torch.ones_like(kept.outputs[0]), *kept.targets)
        backpropagate(kept.outputs, gradients)
        self.gradients.count(op.place, targets)
        if op.stage:
            self.mailbox.send(op, (*input_gradients(kept.inputs), targets.to(COUNT.dtype)))
        self._poke()

    def _reduce(self, op: Op, received: Tensors) -> None:
        self.gradients.start(op.place)

    def _await_gradients(self, op: Op) -> Tensors:
        if not self.gradients.settled(op.place):
            places = self.stages if self.clip else [op.place]
            squares = math.fsum(self.gradients.settle(place) for place in places)
            self.sums.square_norm += squares
            if self.clip:
                self.gradients.scale(self.clip.factor(squares))
        return ()

    def _update(self, op: Op, received: Tensors) -> None:
        if optimizer := self.optimizers[op.place]:
            optimizer.step()
        self.gradients.release(op.place)

    def _poke(self) -> None:
        self.mailbox.poke()
        self.gradients.poke()


class Evaluator:
    """Carries out a schedule of forwards only: the loss, without a graph."""

    def __init__(self, schedule: Schedule, stages: Mapping[Place, Stage], loss: Loss, mailbox: Mailbox):
        self.schedule, self.stages, self.loss, self.mailbox = schedule, stages, loss, mailbox
        self._handlers: dict[Kind, Handler] = {Kind.FORWARD: (mailbox.receive, self._forward)}

    @torch.no_grad()
    def run(self, feed: Feed) -> Sums:
        self.feed, self.sums = feed, Sums()
        for stage in self.stages.values():
            stage.eval()
        self.mailbox.open()
        interpret(self.schedule, self.mailbox.comm.rank, self._handlers, feed.step, time.perf_counter)
        self.mailbox.flush()
        return self.sums

    def _forward(self, op: Op, received: Tensors) -> None:
        batch = self.feed.micro_batch(op.index)
        outputs = self.stages[op.place](received if op.stage else batch.inputs, self.feed.step, batch.number)
        if op.stage + 1 < self.schedule.stages:
            self.mailbox.send(op, outputs)
        else:
            loss, targets = self.loss(*outputs, batch.targets)
            self.sums.loss += loss.item()
            self.sums.targets += targets.item()


def require_gradients(tensors: Tensors) -> Tensors:
    return tuple(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors)


def backpropagate(outputs: Tensors, gradients: Sequence[torch.Tensor]) -> None:
    """Run autograd back from a stage's outputs; there is a gradient for each that is a floating one."""
    floating = [tensor for tensor in outputs if tensor.is_floating_point()]
    pairs = [(t, gradient) for t, gradient in zip(floating, gradients, strict=True) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])


def input_gradients(inputs: Tensors) -> Tensors:
    """The gradient of each floating input, zeros where the loss does not depend on it."""
    floating = (tensor for tensor in inputs if tensor.is_floating_point())
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in floating)


def _nothing(op: Op) -> Tensors:
    return ()
