"""A little compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ..staging import Staging
from .ensemble import Ensemble

SMALLEST = 16  # rows of a matrix


class Product:
    """One product of matrices, by default some milliseconds long on a core."""

    SIZE = 384

    def __init__(self, staging: Staging, size: int = SIZE):
        self.staging = staging
        self.matrix = torch.ones(size, size, device=staging.device) / size

    def __call__(self) -> None:
        self.matrix @ self.matrix

    def until(self, deadline_s: float) -> None:
        """Keep this rank busy as an op does: where a device computes, the host goes on at once."""
        self()
        while self.staging.device.type == "cpu" and time.perf_counter() < deadline_s:
            self()


def product_below(ensemble: Ensemble, most_s: float, staging: Staging) -> tuple[Product, float]:
    """A product of matrices that takes no longer, if a small one does not, and its seconds. Collective."""
    size = Product.SIZE
    while True:
        product = Product(staging, size)
        (product_s,) = ensemble.read(partial(_timed_alone, product)).values
        if product_s <= most_s or size <= SMALLEST:
            return product, product_s
        size = max(min(size * 2 // 3, int(size * (most_s / product_s) ** (1 / 3))), SMALLEST)


def _timed_alone(product: Product) -> list[float]:
    return [computing(product, 1)]


def computing(product: Product, count: int, poke: Callable[[], object] = lambda: None) -> float:
    start = time.perf_counter()
    for _ in range(count):
        product()
        poke()
    product.staging.computed().synchronize()
    return time.perf_counter() - start
