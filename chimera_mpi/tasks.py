"""What is trained on what: a model, and the samples that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config
from .data import Batches, Corpus, MaskedBatches
from .errors import InputError
from .models import BERT, GPT, SHAPE, Model, bert, gpt, user_model


@dataclass(frozen=True)
class Task:
    """`inputs` is the number of int64 [batch, tokens] tensors that enter layer 0 with each micro-batch;
    `special_tokens` are those that the samples have beyond the corpus's vocabulary."""

    model: Model
    batches: Callable[[Corpus, tuple[int, ...], int | None], Any] = Batches
    inputs: int = 1
    special_tokens: int = 0
    vocabulary: int | None = None  # of the model, where it is known


def task_of(config: Config) -> Task:
    """Raises InputError if the model cannot be built, or not for samples of that length."""
    if config.model not in ("gpt", "bert"):
        return Task(user_model(config.model, config.seed))
    if config.sequence_length > config.positions:
        raise InputError(
            f"sequence_length={config.sequence_length} is more than positions={config.positions}: "
            f"set positions={config.sequence_length}"
        )
    shape = {key: getattr(config, key) for key in SHAPE}
    if config.model == "gpt":
        return Task(gpt(GPT(**shape)), vocabulary=config.vocabulary)
    return Task(bert(BERT(**shape)), MaskedBatches, inputs=2, special_tokens=4, vocabulary=config.vocabulary)


def random_corpus(config: Config, task: Task) -> Corpus:
    """Tokens by chance, for what needs samples but learns nothing from them."""
    vocabulary = max(config.vocabulary - task.special_tokens, 2)
    tokens = np.random.default_rng(config.seed).integers(vocabulary, size=1000 * config.sequence_length)
    return Corpus(Path("random"), "train", config.sequence_length, vocabulary, tokens, 0.0, "")


def check_vocabulary(task: Task, corpus: Corpus) -> None:
    """Raises InputError if the samples have tokens that the model does not know."""
    needed = corpus.vocabulary_with_specials if task.special_tokens else corpus.vocabulary
    if task.vocabulary is not None and task.vocabulary < needed:
        raise InputError(
            f"vocabulary={task.vocabulary} is less than the {needed} tokens of samples of {corpus.path}: "
            f"set vocabulary={needed}"
        )
