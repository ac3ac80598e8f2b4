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

    @property
    def exhausted(self) -> bool:
        """Whether it has fallen so low that not the scale makes gradients overflow: the loss or the weights are."""
        return self.value < SMALLEST

    def learn(self, overflowed: bool) -> None:
        self.steps = 0 if overflowed else self.steps + 1
        if overflowed:
            self.value = max(self.value, SMALLEST) / 2
        elif self.steps == self.growth_steps:
            self.value, self.steps = self.value * 2, 0


class GlobalNorm:
    """Clips gradients by `limit`, and skips an update by gradients that are not finite, or of a loss that is not,
    where losses are scaled or it `guards` the weights."""

    def __init__(
        self,
        world: MPI.Comm,
        patience: Patience,
        limit: float | None,
        loss_scale: LossScale | None,
        guards: bool = False,
    ):
        self.world, self.patience, self.loss_scale, self.guards = world, patience, loss_scale, guards
        self.limit = math.inf if limit is None else limit
        self.skips = False
        self.broke = False  # it skips, and no overflow explains that
        self.squares = self.loss = math.nan  # over all ranks, as they were judged last

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def judge(self, squares: float, loss: float = 0.0) -> float:
        """What to multiply all gradients by; sets `skips`, and `broke`. `squares` of gradients and `loss` are this
        rank's shares; collective. On whichever rank it returns all have called it, so all sums of all ranks are there.
        Raises FloatingPointError where a falling loss scale is no way out and it does not guard."""
        total = np.array([squares, loss])
        self.patience.wait(self.world.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return self.heed(*total.tolist())

    def heed(self, squares: float, loss: float) -> float:
        """As `judge`, of the sums over all ranks: also those that another rank has, and this one not any more."""
        self.squares, self.loss = squares, loss
        overflowed = not (math.isfinite(squares) and math.isfinite(loss))
        self.skips = overflowed and (self.guards or self.loss_scale is not None)
        if self.loss_scale:
            self.loss_scale.learn(overflowed)
        self.broke = self.skips and (self.loss_scale is None or self.loss_scale.exhausted)
        if self.broke and not self.guards:
            raise FloatingPointError(
                f"gradients are not finite even with a loss scale of {self.scale:.1e}: the loss or the weights "
                "are inf or nan"
            )
        return 1.0 if self.skips else min(1.0, self.limit / (math.sqrt(squares) + 1e-6))
