"""Tensors, and what they look like."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Spec(NamedTuple):
    """What a tensor of a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def token_specs(samples: int, tokens: int, tensors: int = 1) -> tuple[Spec, ...]:
    """Of token ids, and as many more of the like."""
    return (Spec((samples, tokens), torch.int64),) * tensors
