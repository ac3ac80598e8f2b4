"""Masked sentence pairs, the samples that BERT learns from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .batches import Batches
from .corpus import Corpus, too_short

IGNORED = -100  # the target of a token that is not masked; `models` has the same
AROUND_PAIR = 3  # tokens of a sample that are not of the corpus: [CLS] first [SEP] second [SEP]
MASKED_FRACTION = 0.15


class Masked(NamedTuple):
    """What BERT takes: token ids and segments (0 or 1), int64 [batch, tokens]; and, where samples are padded, a mask,
    bool [batch, tokens], False where they are."""

    ids: NDArray[np.int64]
    segments: NDArray[np.int64]
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class MaskedBatches:
    """Samples for BERT (Devlin et al. 2019, Section 3.1): pairs of segments, some tokens masked, all by rule.

    A sample is [CLS] first [SEP] second [SEP], sequence_length tokens in all; the two are a window of the corpus cut
    in its middle half. In one sample of two, by the toss of a coin, the second is taken from another window.
    `masked` tokens of every sample are to be found, the same number in each, so that a loss that is a mean over them
    and one that is a mean over samples have one count (`models.pretraining_loss`). Of these, 80 % are shown as
    [MASK], 10 % as any token, 10 % as they are.
    The share `short` of the samples is shorter, by any length, and padded; there is a mask only if `short` is not 0.

    Windows, sizes and seed are those of `Batches`, except that a window has as many tokens as a pair has room for.
    Everything random follows from (seed, number of the sample in the run): it differs from epoch to epoch, and depends
    neither on the rank nor on how a step is cut into micro-batches. With `seed=None`, every evaluation is the same.
    """

    corpus: Corpus
    sizes: tuple[int, ...]
    seed: int | None = 0
    short: float = 0.0

    def __post_init__(self) -> None:
        length = self.corpus.sequence_length
        if length < AROUND_PAIR + 2:
            raise InputError(f"sequence_length={length} has no room for a pair: try sequence_length=64")
        if not 0 <= self.short <= 1:
            raise InputError(f"short={self.short} is not in [0, 1]: short=0 pads nothing")
        if self.windows.corpus.samples < 2:
            raise too_short(self.corpus, f"pairs of sequence_length={length} need {2 * self.room + 1}")

    @property
    def room(self) -> int:
        """Tokens of the corpus in a sample."""
        return self.corpus.sequence_length - AROUND_PAIR

    @property
    def masked(self) -> int:
        """Tokens to be found in every sample."""
        return max(1, round(MASKED_FRACTION * self.corpus.sequence_length))

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.corpus.vocabulary_with_specials

    @cached_property
    def windows(self) -> Batches:
        """Which windows of the corpus each micro-batch has."""
        return Batches(replace(self.corpus, sequence_length=self.room), self.sizes, self.seed)

    def micro_batch(
        self, step: int, index: int
    ) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Inputs: ids, segments and, if `short`, the mask: see `Masked`. Targets: int64 [batch, tokens], `IGNORED`
        where no token is to be found; and int64 [batch], 0 where the second segment follows the first, 1 where not."""
        draws = _draws(self.seed, self.windows.places(step, index), 4 + 3 * self.corpus.sequence_length)
        (of_pair, of_tokens) = draws[:, :4], draws[:, 4:].reshape(len(draws), 3, -1)
        whole, follows = self._pairs(self.windows.sample_ids(step, index), of_pair)
        ids, words = self._mask(whole.ids, of_tokens)
        shown = () if whole.mask is None else (whole.mask,)
        return (ids, whole.segments, *shown), (words, follows)

    def _pairs(self, windows: NDArray[np.int64], draws: NDArray[np.float64]) -> tuple[Masked, NDArray[np.int64]]:
        """The samples before any token is masked. `draws`: [batch, 4]"""
        strange = draws[:, 0] < 0.5
        samples = self.windows.corpus.samples
        others = (windows + 1 + _below(samples - 1, draws[:, 1])) % samples
        firsts, _ = self.windows.corpus.sample(windows)
        seconds, _ = self.windows.corpus.sample(np.where(strange, others, windows))
        lengths = self._lengths(draws[:, 2])
        cuts = lengths // 4 + _below(lengths - 2 * (lengths // 4) - 1, draws[:, 3]) + 1
        return self._joined(firsts, seconds, cuts[:, None], lengths[:, None]), strange.astype(np.int64)

    def _lengths(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Tokens of the corpus in each sample; half of a short one at least stays to find the others by."""
        shortest = max(2, 2 * self.masked)
        is_short = draws < self.short
        within = draws / self.short if self.short else draws  # what is left of a draw below `short` is as good as new
        return np.where(is_short, shortest + _below(max(1, self.room - shortest), within), self.room)

    def _joined(
        self,
        firsts: NDArray[np.int64],
        seconds: NDArray[np.int64],
        cuts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Masked:
        """[CLS] firsts[:cut] [SEP] seconds[cut:length] [SEP] [PAD] ... of each row."""
        special = self.corpus.specials
        place = np.arange(self.corpus.sequence_length)
        in_second = (place > cuts + 1) & (place < lengths + AROUND_PAIR)
        ids = np.where(in_second, np.pad(seconds, ((0, 0), (2, 1))), np.pad(firsts, ((0, 0), (1, 2))))
        ids[:, 0] = special.cls
        ids[(place == cuts + 1) | (place == lengths + 2)] = special.sep
        ids[place > lengths + 2] = special.pad
        return Masked(ids, in_second.astype(np.int64), place <= lengths + 2 if self.short else None)

    def _mask(self, ids: NDArray[np.int64], draws: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What is shown, and what is to be found. `draws`: [batch, 3, tokens]"""
        words, specials = self.corpus.vocabulary, self.corpus.specials
        # Special tokens come last, and there are others enough.
        order = np.where(np.isin(ids, specials), 2.0, draws[:, 0])
        chosen = np.zeros(ids.shape, dtype=bool)
        np.put_along_axis(chosen, np.argsort(order, axis=1, kind="stable")[:, : self.masked], True, axis=1)
        fate = draws[:, 1]
        shown = np.where(chosen & (fate < 0.8), specials.mask, ids)
        shown = np.where(chosen & (fate >= 0.8) & (fate < 0.9), _below(words, draws[:, 2]), shown)
        return shown, np.where(chosen, ids, IGNORED)


def _draws(seed: int | None, places: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """[len(places), count] numbers in [0, 1), a row for each sample that follows from (seed, place) alone."""
    key = (0, 0) if seed is None else (1, seed)
    return np.stack([np.random.default_rng((*key, int(place))).random(count) for place in places])


def _below(limit: Any, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers from 0 to below `limit`, all as likely."""
    return (draws * limit).astype(np.int64)
