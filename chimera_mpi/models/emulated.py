"""A model that sleeps where others compute: a rehearsal of a schedule needs no GPU, and many ranks share a core.

Its outputs are as large as asked for but carry one number a sample, which each layer multiplies by its weight. So
gradients are real, and depend on every message having come to the right place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..timer import sharpen_timer
from .layers import Model

NUMBER_BYTES = 4  # a number of an output, in single precision


@dataclass(frozen=True)
class Durations:
    """Seconds that a layer spends on one micro-batch. Its whole backward takes `input_s + weight_s`."""

    forward_s: float
    input_s: float
    weight_s: float


class Sleeper:
    """Sleeps to the microsecond where the system can, and adds up by how much it woke too late.

    It never spins, which would take the core from another rank. What precedes a sleep is part of it.
    """

    def __init__(self) -> None:
        sharpen_timer()
        self.overshoot_s = 0.0

    def until(self, deadline_s: float) -> None:
        """Return at `deadline_s` of `time.perf_counter`, or at once if that has passed."""
        if (left_s := deadline_s - time.perf_counter()) <= 0:
            return
        while left_s > 0:
            time.sleep(left_s)
            left_s = deadline_s - time.perf_counter()
        self.overshoot_s -= left_s


class Emulated(nn.Module):
    """From [samples, any] to [samples, `numbers`]: the first number of each sample times the weight, then zeros.

    `idle_numbers` is the size of a further parameter that nothing uses: it makes the all-reduce as large as that of a
    real layer.
    """

    def __init__(self, durations: Durations, numbers: int, idle_numbers: int, sleeper: Sleeper):
        super().__init__()
        self.durations, self.numbers, self.sleeper = durations, numbers, sleeper
        self.weight = nn.Parameter(torch.rand(1) + 0.5)
        self.idle = nn.Parameter(torch.zeros(idle_numbers)) if idle_numbers else None

    def forward(self, x: Tensor) -> Tensor:
        start_s = time.perf_counter()
        number = _Input.apply(x, self.durations.input_s, self.sleeper)
        # The product is a node of its own, since it is where the ways to the input and to the weight part.
        product = number * _Weight.apply(self.weight, self.durations.weight_s, self.sleeper)
        output = F.pad(product, (0, self.numbers - 1))
        if not x.is_meta:
            self.sleeper.until(start_s + self.durations.forward_s)
        return output


class _Input(torch.autograd.Function):
    """The first number of each sample; on the way back, the time that the gradient of the input takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, sleeper: Sleeper) -> Tensor:
        ctx.shape, ctx.seconds, ctx.sleeper = x.shape, seconds, sleeper
        return x[:, :1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start_s = time.perf_counter()
        whole = F.pad(gradient, (0, ctx.shape[1] - 1))
        ctx.sleeper.until(start_s + ctx.seconds)
        return whole, None, None


class _Weight(torch.autograd.Function):
    """The weight; on the way back, the time that its gradient takes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, sleeper: Sleeper) -> Tensor:
        ctx.seconds, ctx.sleeper = seconds, sleeper
        return weight.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleeper.until(time.perf_counter() + ctx.seconds)
        return gradient, None, None


def squared_error(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of [samples, 1] to [samples, 1]: the sum, and the count of samples."""
    return (output - targets).square().sum(), output.new_tensor(float(len(output)))


def emulated(
    layers: int, durations: Durations, message_bytes: int, sleeper: Sleeper, gradient_bytes: int = NUMBER_BYTES
) -> Model:
    """`layers` equal layers whose outputs, of one sample, are of `message_bytes`; the last one's is a single number.

    Sizes are those in single precision, rounded up to whole numbers. `gradient_bytes` are a layer's parameters.
    """
    numbers, parameters = (-(-max(size, NUMBER_BYTES) // NUMBER_BYTES) for size in (message_bytes, gradient_bytes))
    inner = partial(Emulated, durations, numbers, parameters - 1, sleeper)
    last = partial(Emulated, durations, 1, parameters - 1, sleeper)
    return Model((*(inner for _ in range(layers - 1)), last), squared_error)
