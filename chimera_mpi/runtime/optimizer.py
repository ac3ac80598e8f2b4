"""Optimizers of the stages, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recipe:
    """How weights are updated; `momentum` is SGD's, `betas` are AdamW's."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    momentum: float = 0.0

    def build(self, weights: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
        """The optimizer of these weights, or None where there are none.

        Matrices decay, vectors (biases, gains of norms) do not. The learning rate is set at each update.
        """
        weights = list(weights)
        return self.build_of([w for w in weights if decays(w)], [w for w in weights if not decays(w)])

    def build_of(
        self, decaying: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> torch.optim.Optimizer | None:
        """As `build`, of weights that have been told apart."""
        groups = [
            {"params": list(decaying), "weight_decay": self.weight_decay},
            {"params": list(others), "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return OPTIMIZERS[self.name](self, groups) if groups else None

    @property
    def by_element(self) -> bool:
        """Whether an element's update depends on that element alone, so that a tensor may be cut anywhere."""
        return self.name in ("adamw", "sgd")


def decays(weight: torch.Tensor) -> bool:
    return weight.dim() >= 2


class Lamb(torch.optim.Optimizer):
    """AdamW whose update of each tensor is as long as the tensor itself, times the learning rate (You et al. 2020)."""

    def __init__(self, params: Iterable, betas: tuple[float, float], eps: float = 1e-6):
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                direction = self._direction(weight, group)
                length, step_length = weight.norm(), direction.norm()
                trust = torch.where((length > 0) & (step_length > 0), length / step_length, 1.0)
                weight.sub_(direction * (group["lr"] * trust))

    def _direction(self, weight: torch.Tensor, group: dict) -> torch.Tensor:
        """Adam's step before the learning rate, and the decay."""
        state, (beta1, beta2), gradient = self.state[weight], group["betas"], weight.grad
        assert gradient is not None
        if not state:
            state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["square"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
        return mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight


def _adamw(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, fused=True)


def _sgd(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=recipe.momentum, fused=True)


def _lamb(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return Lamb(groups, recipe.betas)


def _adafactor(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.0)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd, "lamb": _lamb, "adafactor": _adafactor}


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 over `warmup_steps`, then half a cosine from `peak` to `minimum` at `steps`."""

    peak: float
    minimum: float
    warmup_steps: int
    steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of the update that ends `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1), 1.0)
        return self.minimum + (self.peak - self.minimum) * (1 + math.cos(math.pi * progress)) / 2
