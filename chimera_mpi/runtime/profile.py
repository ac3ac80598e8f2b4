"""How long the layers of a model take here."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from ..models import Model, make_layer
from .staging import Direct, Staging, Tensors
from .tape import Segment, Tape, floating, start_graph
from .trace import segment_of
from .worker import Targets, brought_targets, then_loss

REPEATS = 3


def layer_seconds(
    model: Model,
    inputs: Tensors,
    targets: Targets,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.perf_counter,
    staging: Staging = Direct(),
) -> list[float]:
    """The seconds that each layer's forward and backward take on one micro-batch; the loss counts to the last.

    Layers that one factory makes are measured once, as is each by the median of a few passes after the first.
    """
    seconds: list[float] = []
    last = len(model.layers) - 1
    entering, targets = staging.brought(inputs), brought_targets(staging, targets)
    clock = partial(_once_computed, staging, clock)
    for index, factory in enumerate(model.layers):
        alike = model.layers.index(factory)
        segment = segment_of(make_layer(model, index, 0, dtype, staging.device))
        if 0 < alike < index < last:
            seconds.append(seconds[alike])
        else:
            whole = partial(then_loss, segment, model.loss, targets) if index == last else segment
            _time(whole, entering, clock)
            seconds.append(median(_time(whole, entering, clock) for _ in range(REPEATS)))
        with torch.no_grad():
            entering = segment(entering)
    return seconds


def _once_computed(staging: Staging, clock: Callable[[], float]) -> float:
    staging.computed().synchronize()
    return clock()


def _time(segment: Segment, entering: Tensors, clock: Callable[[], float]) -> float:
    tape = Tape([segment], recompute=False)
    start = clock()
    leaving = tape.forward(start_graph(entering))
    tape.backward(tuple(torch.ones_like(tensor) for tensor in floating(leaving)))
    return clock() - start
