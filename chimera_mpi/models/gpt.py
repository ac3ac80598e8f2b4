"""GPT-2 (Radford et al. 2019) as a list of layers: an embedding, blocks, a head.

Every weight matrix starts from N(0, 0.02), those that write into the residual stream from 0.02 / sqrt(2 * layers),
biases from zero, as the GPT and GPT-2 papers say. The positions start from 0.02 as well, as in Hugging Face's GPT-2;
OpenAI's own code has 0.01 there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Model, cross_entropy
from .parts import INITIAL_STD, check_length, check_shape, embedding, linear

NORM_EPS = 1e-5


@dataclass(frozen=True)
class GPT:
    """The shape of a GPT; the defaults are GPT-2 small (124,439,808 parameters). Raises `InputError`."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    tied: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_shape(self, "GPT", ("layers", "hidden", "heads", "vocabulary", "positions"))

    @property
    def residual_std(self) -> float:
        """Each block adds to the residual stream twice; the sum of all keeps its size."""
        return INITIAL_STD / sqrt(2 * self.layers)


def gpt(config: GPT) -> Model:
    """Layer 0 takes token ids, int64 [batch, tokens]; the last one gives logits [batch, tokens, vocabulary]."""
    head = config.layers + 1
    return Model(
        layers=(partial(Embedding, config), *[partial(Block, config)] * config.layers, partial(Head, config)),
        loss=cross_entropy,
        tied=(((0, "tokens.weight"), (head, "output.weight")),) if config.tied else (),
    )


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.tokens = embedding(config.vocabulary, config.hidden)
        self.positions = embedding(config.positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        check_length(tokens, self.positions.num_embeddings)
        place = torch.arange(tokens, device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(place))  # [batch, tokens, hidden]


class Block(nn.Module):
    """Tokens look back at each other, then each is transformed by itself; both only add to what comes in."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # [batch, tokens, hidden]


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = linear(config.hidden, 3 * config.hidden)
        self.output = linear(config.hidden, config.hidden, config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout.p if self.training else 0.0
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))  # [batch, tokens, 3, heads, hidden / heads]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, hidden / heads]
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.dropout(self.output(seen.transpose(1, 2).flatten(2)))  # [batch, tokens, hidden]


class MLP(nn.Module):
    """Four times wider, GELU in its tanh form, and back."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.input = linear(config.hidden, 4 * config.hidden)
        self.output = linear(4 * config.hidden, config.hidden, config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.input(x), approximate="tanh")  # [batch, tokens, 4 * hidden]
        return self.dropout(self.output(wide))  # [batch, tokens, hidden]


class Head(nn.Module):
    """The last LayerNorm, and a logit for each token of the vocabulary."""

    def __init__(self, config: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden, NORM_EPS)
        self.output = linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))  # [batch, tokens, vocabulary]
