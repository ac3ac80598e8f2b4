"""What all ranks do alike with the gradients of a step, by their norm over the whole model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from .waiting import Patience

SMALLEST = 2.0**-24


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): small gradients of fp16 are lifted out of what it rounds to
    zero. An overflow halves the scale; `growth_steps` steps without one double it."""

    value: float
    growth_steps: int = 2000
    steps: int = 0  # without an overflow

    def learn(self, overflowed: bool) -> None:
        self.steps = 0 if overflowed else self.steps + 1
        if overflowed:
            self.value /= 2
            if self.value < SMALLEST:
                raise FloatingPointError(
                    f"gradients are not finite even with a loss scale of {2 * self.value:.1e}: the loss or the weights "
                    "are inf or nan"
                )
        elif self.steps == self.growth_steps:
            self.value, self.steps = self.value * 2, 0


class GlobalNorm:
    """Clips gradients by `limit`, and where losses are scaled skips the step whose gradients are not finite."""

    def __init__(self, world: MPI.Comm, patience: Patience, limit: float | None, loss_scale: LossScale | None):
        self.world, self.patience, self.loss_scale = world, patience, loss_scale
        self.limit = math.inf if limit is None else limit
        self.skips = False

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def judge(self, squares: float) -> float:
        """What to multiply all gradients by; sets `skips`. `squares` is this rank's share; collective."""
        total = np.array([squares])
        self.patience.wait(self.world.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        if self.loss_scale:
            self.skips = not math.isfinite(total[0])
            self.loss_scale.learn(self.skips)
        return 1.0 if self.skips else min(1.0, self.limit / (math.sqrt(total[0]) + 1e-6))
