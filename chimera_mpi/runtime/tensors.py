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


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can have gradients, which are of the same type."""
    return dtype.is_floating_point or dtype.is_complex


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """With its values in its memory, as MPI reads it: torch marks some as conjugates or negatives of what is there."""
    return tensor.resolve_conj().resolve_neg()


def token_specs(samples: int, tokens: int, tensors: int = 1) -> tuple[Spec, ...]:
    """Of token ids, and as many more of the like."""
    return (Spec((samples, tokens), torch.int64),) * tensors
