"""One rank's part in training a model under a schedule, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ..models import Model
from ..schedule import Schedule, forward_only
from ..timeline import Span
from .gradients import Clip, Gradients, ties_across
from .grid import Grid
from .mailbox import Delivery, Mailbox, Spec
from .optimizer import Recipe
from .stage import Boundaries, Stage, cut_uniformly, trace
from .waiting import Patience
from .worker import Evaluator, Feed, Sums, Worker


@dataclass(frozen=True)
class Settings:
    """What a pipeline is built with, besides schedule and model. `clip` bounds the global gradient norm."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    recipe: Recipe = Recipe()
    clip: float | None = None
    delivery: Delivery = Delivery()
    patience: Patience | None = None


class Pipeline:
    """A rank's stages, mailbox, gradients and optimizers. All ranks of the grid must build it alike."""

    def __init__(
        self,
        grid: Grid,
        schedule: Schedule,
        model: Model,
        inputs: Sequence[Sequence[Spec]],
        settings: Settings = Settings(),
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`inputs[n]` are the tensors that enter stage 0 with micro-batch n of this rank's pipeline group."""
        self.schedule, self.model = schedule, model
        self.grid, self.patience = grid, settings.patience or grid.node.patience
        self.cuts = cut_uniformly(len(model.layers), schedule.stages)
        traced = cache(lambda specs: trace(model, specs, settings.dtype))
        self.traces = [traced(tuple(specs)) for specs in inputs]
        self.stages = {
            place: Stage(model, self.cuts[place[1]], settings.seed, settings.dtype)
            for place in schedule.places(self.grid.worker)
        }
        gradients = Gradients(self.grid, schedule, self.stages, ties_across(model.tied, self.cuts), self.patience)
        self.worker = Worker(
            schedule,
            self.stages,
            model.loss,
            self._mailbox(schedule, settings),
            gradients,
            {place: settings.recipe.build(stage) for place, stage in self.stages.items()},
            Clip(self.grid.world, settings.clip, self.patience) if settings.clip else None,
            clock,
        )
        forwards = forward_only(schedule)
        self.evaluator = Evaluator(forwards, self.stages, model.loss, self._mailbox(forwards, settings))

    def step(self, feed: Feed, learning_rate: float) -> tuple[list[Span], Sums]:
        """Train on a mini-batch. Returns this worker's spans, and its part of what all workers add up."""
        return self.worker.step(feed, learning_rate), self.worker.sums

    def evaluate(self, feed: Feed) -> Sums:
        """Only the loss of a mini-batch: this worker's part of it."""
        return self.evaluator.run(feed)

    def _mailbox(self, schedule: Schedule, settings: Settings) -> Mailbox:
        boundaries = Boundaries(schedule, self.cuts, self.traces)
        return Mailbox(self.grid.pipeline, schedule, boundaries, self.patience, settings.delivery)
