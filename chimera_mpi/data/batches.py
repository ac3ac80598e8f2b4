"""Which samples each micro-batch has: a rule, so that any rank can tell without asking another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .corpus import Corpus


@dataclass(frozen=True)
class Batches:
    """Which samples each micro-batch of each step has: a rule, so that any rank can tell without asking another.

    `sizes[i]` is the number of samples of micro-batch i, which counts over all pipelines and replicas of the step.
    Samples come in an order shuffled by (seed, epoch), every one once an epoch, and a micro-batch may span two
    epochs. With `seed=None`, for evaluation, every epoch and every run has the same order; it is not the order of the
    corpus, of which the first samples would be those of a few files.
    """

    corpus: Corpus
    sizes: tuple[int, ...]
    seed: int | None = 0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"micro-batches of {list(self.sizes)} samples: each needs at least 1")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"seed={self.seed} is below 0: try seed=0")

    @property
    def mini_batch(self) -> int:
        """Samples of a step."""
        return sum(self.sizes)

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.corpus.vocabulary

    def micro_batch(self, step: int, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, each int64 [sizes[index], sequence_length]."""
        return self.corpus.sample(self.sample_ids(step, index))

    def places(self, step: int, index: int) -> NDArray[np.int64]:
        """int64 [sizes[index]]: how many samples of the run come before each one of a micro-batch."""
        start = step * self.mini_batch + sum(self.sizes[:index])
        return np.arange(start, start + self.sizes[index])

    def sample_ids(self, step: int, index: int) -> NDArray[np.int64]:
        """int64 [sizes[index]]"""
        positions = self.places(step, index)
        epochs, places = np.divmod(positions, self.corpus.samples)
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = (0, 0) if self.seed is None else (self.seed, int(epoch))
            ids[here] = _shuffled(key, self.corpus.samples)[places[here]]
        return ids


def even_sizes(mini_batch: int, parts: int) -> tuple[int, ...]:
    """`mini_batch` samples in `parts` micro-batches that differ by one at most, the larger first."""
    if parts < 1:
        raise InputError(f"micro_batches={parts} is below 1: try micro_batches=1")
    if mini_batch < parts:
        raise InputError(
            f"a mini-batch of {mini_batch} samples does not fill {parts} micro-batches: "
            f"give at least {parts} samples, or at most {mini_batch} micro-batches"
        )
    each, over = divmod(mini_batch, parts)
    return (each + 1,) * over + (each,) * (parts - over)


@lru_cache(maxsize=3)  # the two epochs of training that a step may span, and the evaluation
def _shuffled(key: tuple[int, int], samples: int) -> NDArray[np.int64]:
    order = np.random.default_rng(key).permutation(samples)
    order.flags.writeable = False
    return order
