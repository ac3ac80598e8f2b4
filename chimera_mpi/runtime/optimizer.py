"""Optimizers of the stages, and the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """How weights are updated; `momentum` is SGD's, `betas` are AdamW's."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    momentum: float = 0.0

    def build(self, stage: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer of a stage's trainable parameters, or None where there are none.

        Matrices decay, vectors (biases, gains of norms) do not. The learning rate is set at each update.
        """
        trainable = [p for p in stage.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return OPTIMIZERS[self.name](self, groups) if groups else None


def _adamw(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, fused=True)


def _sgd(recipe: Recipe, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=recipe.momentum, fused=True)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


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
