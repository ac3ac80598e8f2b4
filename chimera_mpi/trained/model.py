"""The model of a checkpoint, and how its tokens are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import Checkpoint, choose_newest, found_in, open_checkpoint
from ..data import BYTES, TOKENIZER, Tokenizer, from_facts
from ..errors import InputError, refusing
from ..models import BERT, GPT, SHAPE, bert, gpt, make_layer


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a GPT or a BERT; `tokenizer` is None where nobody knows it."""

    checkpoint: Checkpoint
    shape: GPT | BERT
    tokenizer: Tokenizer | None

    def weights(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Of each layer. Raises InputError."""
        for index in range(len(self.checkpoint.files)):
            yield index, self.checkpoint.weights(index)

    def layers(self) -> list[nn.Module]:
        """Ready to compute, on the CPU, in the precision that they were trained in. Raises InputError."""
        model = bert(self.shape) if isinstance(self.shape, BERT) else gpt(self.shape)
        layers = []
        for index, weights in self.weights():
            layer = make_layer(model, index, seed=0, device="meta")
            with refusing(f"layer {index} of {self.checkpoint.path} does not fit"):
                layer.load_state_dict(weights, assign=True)
            layers.append(layer.eval().requires_grad_(False))
        return layers


def open_trained(path: Path) -> Trained:
    """A checkpoint, or the newest in a folder. Raises InputError."""
    with refusing(f"{path} cannot be read"):
        checkpoint = choose_newest(found_in(path), open_checkpoint).checkpoint or open_checkpoint(path)
    config: dict[str, Any] = checkpoint.facts["config"]
    model = config.get("model", "a module of one's own")  # which a Trainer knows no name of
    if model not in ("gpt", "bert"):
        raise InputError(f"{checkpoint.path} is of model={model}: give one of a gpt or a bert")
    kind = BERT if model == "bert" else GPT
    shape = kind(**{key: config[key] for key in SHAPE})
    if len(checkpoint.files) != shape.layers + 2:
        raise InputError(f"{checkpoint.path} has {len(checkpoint.files)} layers, its model {shape.layers + 2}")
    return Trained(checkpoint, shape, _tokenizer_of(checkpoint))


def _tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """Checkpoints that do not speak of it are from before tokens were anything but bytes."""
    facts = checkpoint.facts.get("tokenizer", BYTES.facts)
    if facts is None:
        return None
    content = checkpoint.attachment(TOKENIZER)
    with refusing(f"{checkpoint.path} is damaged"):
        return from_facts(facts, None if content is None else content.decode())
