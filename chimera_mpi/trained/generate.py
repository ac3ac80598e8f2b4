"""Continue a text: one token after the other, each drawn from what the model makes of those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models import BERT
from .model import Trained


class Sampling(NamedTuple):
    """How a token is drawn: of the `top_k` likeliest, by probabilities at a `temperature`; at 0 the likeliest. Raises
    InputError where it is `checked`."""

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def checked(self) -> Sampling:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature={self.temperature} is below 0 or no number: 0 takes the likeliest, try 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k} is below 1: try 40")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed} is not in [0, 2^63): try seed=0")
        return self


def continued(trained: Trained, before: Sequence[int], tokens: int, sampling: Sampling) -> Iterator[int]:
    """At most `tokens` tokens that follow `before`, up to the end of a document.

    The model sees as many of the last tokens as it has positions, which begin anew with every token from there on.
    Raises InputError.
    """
    if isinstance(trained.shape, BERT):
        raise InputError(f"{trained.checkpoint.path} is a bert, which fills in words and continues no text: give a gpt")
    known, end = _vocabulary(trained)
    wrong = next((number for number in before if not 0 <= number < known), None)
    if wrong is not None:
        raise InputError(f"the text has token {wrong}, the model knows {known}: was it trained on other tokens?")
    return _drawn(trained.layers(), list(before), trained.shape.positions, tokens, sampling.checked(), known, end)


def _vocabulary(trained: Trained) -> tuple[int, int | None]:
    """How many tokens there are that mean something, and which one ends a document."""
    if trained.tokenizer is None:
        return trained.shape.vocabulary, None
    if trained.tokenizer.vocabulary > trained.shape.vocabulary:
        raise InputError(
            f"the tokenizer has {trained.tokenizer.vocabulary} tokens, the model of {trained.checkpoint.path} "
            f"{trained.shape.vocabulary}: give the tokenizer that it was trained with"
        )
    return trained.tokenizer.vocabulary, trained.tokenizer.end_of_document


@torch.inference_mode()
def _drawn(
    layers: list[nn.Module],
    ids: list[int],
    positions: int,
    tokens: int,
    sampling: Sampling,
    known: int,
    end: int | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(tokens):
        logits = _logits(layers, ids[-positions:])[:known]
        if not logits.isfinite().all():
            raise InputError("the weights of the checkpoint give logits of nan or inf: give another one")
        number = _choice(logits, sampling, generator)
        if number == end:
            return
        yield number
        ids.append(number)


def _logits(layers: list[nn.Module], ids: Sequence[int]) -> Tensor:
    """Of the token after `ids`: [vocabulary]"""
    x = torch.tensor([ids])
    for layer in layers[:-1]:
        x = layer(x)
    return layers[-1](x[:, -1:])[0, 0]  # the last layer looks at each place by itself


def _choice(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if not sampling.temperature:
        return int(logits.argmax())
    likeliest = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    behind = (likeliest.values - likeliest.values[0]).double()
    shares = (behind / sampling.temperature).softmax(0)
    return int(likeliest.indices[torch.multinomial(shares, 1, generator=generator)])
