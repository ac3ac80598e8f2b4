"""Where a step first went wrong: the layer in which a number stopped being finite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .mailbox import Tensors
from .pipeline import Pipeline
from .stage import handed_on
from .tensors import has_gradient
from .worker import Feed


class Finding(NamedTuple):
    """In the order in which a step comes by them: weights and outputs from the first layer to the last, the loss,
    gradients from the last layer to the first."""

    order: tuple[int, int]
    what: str
    rank: int
    stage: int

    def __str__(self) -> str:
        return f"{self.what}, stage {self.stage} on rank {self.rank}"


def first_broken(pipeline: Pipeline, feed: Feed, step: int) -> Finding | None:
    """Where the step that was just skipped, of these micro-batches, first had a number that is not finite; None where
    a repetition finds all well. Does the step's forwards once more. Collective."""
    mine = [*_weights(pipeline), *_outputs(pipeline, feed, step), *_gradients(pipeline)]
    everyone = pipeline.grid.world.allgather(min(mine, default=None))
    return min((finding for finding in everyone if finding is not None), default=None)


def _weights(pipeline: Pipeline) -> list[Finding]:
    rank = pipeline.grid.world.rank
    return [
        Finding((0, index), f"in the weights of layer {index}", rank, place[1])
        for place, stage in pipeline.stages.items()
        for index in stage.indices
        if not _finite(list(stage.layer(index).parameters()))
    ]


def _outputs(pipeline: Pipeline, feed: Feed, step: int) -> list[Finding]:
    """What layers, and at last the loss, make of the micro-batches."""
    rank, found = pipeline.grid.world.rank, []
    at_hand = -1

    def enter(stage: nn.Module, entering: tuple[Any, ...]) -> None:
        nonlocal at_hand
        *_, at_hand = entering

    def look(stage: int, index: int, layer: nn.Module, entered: Any, left: Any) -> None:
        if not _finite(handed_on(left)):
            what = f"in what layer {index} makes of micro-batch {at_hand}"
            found.append(Finding((0, index), what, rank, stage))

    hooks = [
        stage.layer(index).register_forward_hook(partial(look, place[1], index))
        for place, stage in pipeline.stages.items()
        for index in stage.indices
    ]
    hooks += [stage.register_forward_pre_hook(enter) for stage in pipeline.stages.values()]
    try:
        sums = pipeline.evaluate(feed, step, training=True)
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.isfinite(torch.tensor(sums.loss)):
        found.append(Finding((1, 0), "in the loss", rank, pipeline.schedule.stages - 1))
    return found


def _gradients(pipeline: Pipeline) -> list[Finding]:
    rank = pipeline.grid.world.rank
    return [
        Finding((2, -index), f"in the gradients of layer {index}", rank, place[1])
        for place, stage in pipeline.stages.items()
        for index in pipeline.worker.broken.intersection(stage.indices)
    ]


def _finite(tensors: Sequence[torch.Tensor] | Tensors) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if has_gradient(tensor.dtype))
