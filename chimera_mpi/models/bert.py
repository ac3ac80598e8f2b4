"""BERT (Devlin et al. 2019) as a list of layers: an embedding, post-LN encoder blocks, the heads of pre-training.

Every weight matrix starts from N(0, 0.02), biases from zero; GELU is the exact one, of the error function.
The paper cuts the tails of N(0, 0.02) at two standard deviations; this does not, as Hugging Face's BERT does not.

Between layers travel the hidden states [batch, tokens, hidden] and, if the samples are padded, the attention mask,
bool [batch, tokens], True where there is a token. Without a mask nothing but the hidden states travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import IGNORED, Model
from .parts import check_length, check_shape, embedding, linear

NORM_EPS = 1e-12


@dataclass(frozen=True)
class BERT:
    """The shape of a BERT; the defaults are BERT-base (110,106,428 parameters). Raises `InputError`.

    `tied` makes the decoder's matrix that of the token embedding; the decoder has a bias of its own in either case.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 30522
    positions: int = 512
    tied: bool = True
    dropout: float = 0.1
    segments: int = 2

    def __post_init__(self) -> None:
        check_shape(self, "BERT", ("layers", "hidden", "heads", "vocabulary", "positions", "segments"))


def bert(config: BERT) -> Model:
    """Layer 0 takes token ids and segments, int64 [batch, tokens], and optionally a mask, bool [batch, tokens].

    The last one gives logits [batch, tokens, vocabulary] of the masked tokens and [batch, 2] of the next sentence.
    Targets are those of `pretraining_loss`.
    """
    head = config.layers + 1
    return Model(
        layers=(partial(Embedding, config), *[partial(Block, config)] * config.layers, partial(Head, config)),
        loss=pretraining_loss,
        tied=(((0, "tokens.weight"), (head, "decoder.weight")),) if config.tied else (),
    )


def pretraining_loss(
    token_logits: Tensor, next_logits: Tensor, targets: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Sum over samples, in nats, of the mean loss of a sample's masked tokens plus that of its next sentence; the
    number of samples.

    `targets`: token ids, int64 [batch, tokens], `IGNORED` where nothing is masked; and int64 [batch], 0 where the
    second segment follows the first, 1 where it does not, `IGNORED` where nobody asks.

    BERT's own loss is a mean over all masked tokens of the mini-batch plus a mean over its samples: two counts. With
    the same number of masked tokens in every sample, as `data.MaskedBatches` has it, both are one sum over samples
    divided by one count, to the digit. With other data each sample weighs the same, however many of its tokens are
    masked, so that the loss does not depend on how the mini-batch is cut.
    """
    words, follows = targets
    masked = words != IGNORED
    weights = 1 / masked.sum(1, keepdim=True).clamp(min=1).to(_at_least_float32(token_logits.dtype))
    # Only masked rows, a seventh of all, are worth a softmax over the vocabulary.
    losses = F.cross_entropy(_exact(token_logits[masked]), words[masked], reduction="none")
    of_words = (losses * weights.expand(words.shape)[masked]).sum()
    of_follows = F.cross_entropy(_exact(next_logits), follows, ignore_index=IGNORED, reduction="sum")
    return of_words + of_follows, torch.full_like(of_words, len(words))


class Embedding(nn.Module):
    """Tokens, their positions and their segments as vectors of one size."""

    def __init__(self, config: BERT) -> None:
        super().__init__()
        self.tokens = embedding(config.vocabulary, config.hidden)
        self.positions = embedding(config.positions, config.hidden)
        self.segments = embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        tokens = ids.shape[1]
        check_length(tokens, self.positions.num_embeddings)
        place = torch.arange(tokens, device=ids.device)
        x = self.tokens(ids) + self.positions(place) + self.segments(segments)
        return _with_mask(self.dropout(self.norm(x)), mask)  # [batch, tokens, hidden]


class Block(nn.Module):
    """Tokens look at each other, then each is transformed by itself; a LayerNorm follows each of the two sums."""

    def __init__(self, config: BERT) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.attention_norm(x + self.attention(x, mask))
        return _with_mask(self.mlp_norm(x + self.mlp(x)), mask)  # [batch, tokens, hidden]


class Attention(nn.Module):
    """Self-attention with several heads, to all tokens that `mask` shows."""

    def __init__(self, config: BERT) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = linear(config.hidden, 3 * config.hidden)
        self.output = linear(config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout.p if self.training else 0.0
        shown = None if mask is None else mask[:, None, None, :]  # [batch, heads, from, to]
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))  # [batch, tokens, 3, heads, hidden / heads]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, hidden / heads]
        seen = F.scaled_dot_product_attention(query, key, value, shown, dropout)
        return self.dropout(self.output(seen.transpose(1, 2).flatten(2)))  # [batch, tokens, hidden]


class MLP(nn.Module):
    """Four times wider, GELU, and back."""

    def __init__(self, config: BERT) -> None:
        super().__init__()
        self.input = linear(config.hidden, 4 * config.hidden)
        self.output = linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.output(F.gelu(self.input(x))))  # [batch, tokens, hidden]


class Head(nn.Module):
    """A logit for each token of the vocabulary at each place; two for whether the second segment follows."""

    def __init__(self, config: BERT) -> None:
        super().__init__()
        self.transform = linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.decoder = linear(config.hidden, config.vocabulary)
        self.pooler = linear(config.hidden, config.hidden)
        self.follows = linear(config.hidden, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        words = self.decoder(self.norm(F.gelu(self.transform(x))))  # [batch, tokens, vocabulary]
        return words, self.follows(torch.tanh(self.pooler(x[:, 0])))  # [batch, 2]


def _with_mask(x: Tensor, mask: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return x if mask is None else (x, mask)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(_at_least_float32(logits.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
