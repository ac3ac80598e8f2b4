"""One rank's part in training a model under a schedule, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..models import Model, make_layer
from ..predict.partition import cut_uniformly
from ..schedule import Schedule, forward_only
from ..timeline import Span
from .gradients import Clip, Gradients, ties_across
from .grid import Grid, holders
from .mailbox import Delivery, Mailbox, Spec
from .optimizer import Recipe
from .stage import Boundaries, Recompute, Stage, digest, trace
from .waiting import Patience
from .weights import weights_of
from .worker import Evaluator, Feed, Sums, Worker


@dataclass(frozen=True)
class Settings:
    """What a pipeline is built with, besides schedule and model. `clip` bounds the global gradient norm."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    recipe: Recipe = Recipe()
    recompute: Recompute = Recompute()
    clip: float | None = None
    delivery: Delivery = Delivery()
    patience: Patience | None = None
    sharded: bool = False  # each replica of a stage has a share of the optimizer's state
    cuts: tuple[range, ...] | None = None  # the layers of each stage; uniform by default


class Pipeline:
    """A rank's stages, mailbox, gradients and optimizers. All ranks of the grid must build it alike."""

    def __init__(
        self,
        grid: Grid,
        schedule: Schedule,
        model: Model,
        inputs: Sequence[Sequence[Spec]],
        settings: Settings = Settings(),
        *,
        steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`inputs[n]` are the tensors that enter stage 0 with micro-batch n of this rank's pipeline group;
        the schedule covers `steps` steps."""
        self.schedule, self.model = schedule, model
        self.grid, self.patience = grid, settings.patience or grid.node.patience
        self.cuts = list(settings.cuts or cut_uniformly(len(model.layers), schedule.stages))
        self.traces = [trace(model, tuple(specs), settings.dtype) for specs in inputs]
        self.stages = {
            place: Stage(model, self.cuts[place[1]], settings.seed, settings.dtype)
            for place in schedule.places(self.grid.worker)
        }
        _check_ties(model)
        ties = ties_across(model.tied, self.cuts)
        if ties and schedule.updates > 1:
            raise InputError(
                f"{schedule.scheme} holds its stages at several versions, tied weights at one: set tied=false"
            )
        if settings.sharded:
            _check_sharding(schedule, settings.recipe)
        gradients = Gradients(self.grid, schedule, self.stages, ties, self.patience, settings.sharded)
        self.worker = Worker(
            schedule,
            self.stages,
            model.loss,
            self._mailbox(schedule, settings),
            gradients,
            {
                place: weights_of(stage, settings.recipe, gradients, schedule, place, self.patience)
                for place, stage in self.stages.items()
            },
            recompute=settings.recompute,
            clip=Clip(self.grid.world, settings.clip, self.patience) if settings.clip else None,
            steps=steps,
            clock=clock,
        )
        forwards = forward_only(schedule)
        self.evaluator = Evaluator(forwards, self.stages, model.loss, self._mailbox(forwards, settings))

    def run(self, feed: Feed, first_step: int, learning_rate: Callable[[int], float]) -> tuple[list[Span], list[Sums]]:
        """Train for the steps of the schedule. Returns this worker's spans, and its part of each step's sums."""
        return self.worker.run(feed, first_step, learning_rate)

    def evaluate(self, feed: Feed, step: int) -> Sums:
        """Only the loss of the schedule's micro-batches: this worker's part of it."""
        return self.evaluator.run(feed, step)

    def check_replicas(self) -> None:
        """Compare the copies of each stage to the bit. Collective. Raises RuntimeError where they differ."""
        differing = []
        for stage in sorted({stage for _, stage in self.stages}, reverse=True):
            here = {digest(module) for place, module in self.stages.items() if place[1] == stage}
            everywhere = self.grid.replicas(holders(self.schedule, [stage])).allgather(here)
            if len(set().union(*everywhere)) > 1:
                differing.append(str(stage))
        if differing:
            raise RuntimeError(f"the replicas of stage {', '.join(differing)} differ")

    def _mailbox(self, schedule: Schedule, settings: Settings) -> Mailbox:
        boundaries = Boundaries(schedule, self.cuts, self.traces)
        return Mailbox(self.grid.pipeline, schedule, boundaries, self.patience, settings.delivery)


def _check_ties(model: Model) -> None:
    """Raises InputError if a tied parameter is trained in one layer and frozen in another."""
    for group in model.tied:
        layers = [(make_layer(model, index, seed=0, device="meta"), name) for index, name in group]
        if len({layer.get_parameter(name).requires_grad for layer, name in layers}) > 1:
            (index, name), *others = group
            raise InputError(
                f"{name} of layer {index} is tied to {', '.join(f'{n} of layer {i}' for i, n in others)}, "
                "but not all are frozen: freeze all or none of them"
            )


def _check_sharding(schedule: Schedule, recipe: Recipe) -> None:
    """Raises InputError if the optimizer cannot be shared out."""
    remedy = "set optimizer_sharding=none"
    if not recipe.by_element:
        raise InputError(
            f"{recipe.name} looks at whole tensors, shares are cut anywhere: take adamw or sgd, or {remedy}"
        )
    if schedule.updates > 1:
        raise InputError(f"{schedule.scheme} holds its weights in several versions, shares have one: {remedy}")
    for worker in range(schedule.depth):
        stages = [stage for _, stage in schedule.places(worker)]
        if len(stages) > len(set(stages)):
            raise InputError(f"worker {worker} of {schedule.scheme} holds a stage twice, which has one share: {remedy}")
