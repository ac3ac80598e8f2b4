"""What GPT and BERT share: checks of their shape, and weights that start from N(0, 0.02), biases from zero."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InputError

INITIAL_STD = 0.02
SHAPE = ("layers", "hidden", "heads", "vocabulary", "positions", "tied", "dropout")  # what one chooses of either


def check_shape(config: Any, kind: str, sizes: tuple[str, ...]) -> None:
    """Raises `InputError` unless `sizes` are at least 1, `hidden` divides into `heads` and `dropout` is in [0, 1)."""
    for name in sizes:
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)} is below 1: a {kind} needs at least {name}=1")
    if config.hidden % config.heads:
        below = config.hidden // config.heads * config.heads
        remedy = " or ".join(f"hidden={size}" for size in (below, below + config.heads) if size)
        raise InputError(f"hidden={config.hidden} does not divide into heads={config.heads}: try {remedy}")
    if not 0 <= config.dropout < 1:
        raise InputError(f"dropout={config.dropout} is not in [0, 1): dropout=0 turns it off")


def check_length(tokens: int, positions: int) -> None:
    """Raises `InputError` if a sample is longer than the model."""
    if tokens > positions:
        raise InputError(f"samples of {tokens} tokens, but the model has positions={positions}: raise positions")


def linear(inputs: int, outputs: int, std: float = INITIAL_STD, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def embedding(rows: int, hidden: int) -> nn.Embedding:
    layer = nn.Embedding(rows, hidden)
    nn.init.normal_(layer.weight, std=INITIAL_STD)
    return layer
