"""The work of the model that a configuration names."""

from __future__ import annotations

from typing import Any

from .config import Config
from .errors import InputError
from .predict.work import Work, bert_work, gpt_work


def work_of(config: Config, fused: bool | None = None) -> Work:
    """What its layers do with a sample and hold meanwhile: GPT and BERT by formula, without torch; a user's model by a
    pass that neither computes nor allocates. Raises InputError.

    On a GPU if the configuration names one, else on the CPU; `fused` attention or not, by default as torch has it there
    (see `predict.work.Numbers`).
    """
    device = "cuda" if config.device == "cuda" else "cpu"
    if config.model not in ("gpt", "bert"):
        raise InputError(f"model={config.model}: not yet")
    shape: dict[str, Any] = config.model_dump(
        include={"layers", "hidden", "heads", "vocabulary", "positions", "sequence_length", "tied", "dropout"}
        | {"precision", "optimizer", "momentum"}
    )
    of_kind = gpt_work if config.model == "gpt" else bert_work
    return of_kind(**shape, device=device, fused=fused)
