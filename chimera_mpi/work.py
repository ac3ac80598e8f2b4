"""The work of the model that a configuration names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .config import Config
from .errors import refusing
from .predict.work import Transformer, Work, bert_work, gpt_work, work_in

if TYPE_CHECKING:
    from .models import Model


def work_of(config: Config, device: str | None = None, fused: bool | None = None) -> Work:
    """What its layers do with a sample and hold meanwhile: GPT and BERT by formula, without torch; a user's model by
    passes of fake tensors, which neither compute nor allocate. Raises InputError if such a pass fails.

    `device` is "cpu" or "cuda", by default the one that the configuration names, or the CPU. `fused`: whether the
    attention of GPT and BERT is, by default as torch has it there (see `predict.work.Numbers`).
    """
    if config.model not in ("gpt", "bert"):
        return _of_user(config)
    shape: dict[str, Any] = config.model_dump(
        include={"layers", "hidden", "heads", "vocabulary", "positions", "sequence_length", "tied", "dropout"}
        | {"precision", "optimizer", "momentum"}
    )
    if device is None:
        device = "cuda" if config.device == "cuda" else "cpu"
    model = Transformer(**shape, device=device, fused=fused)
    return gpt_work(model) if config.model == "gpt" else bert_work(model)


def _of_user(config: Config) -> Work:
    """As it is on the CPU."""
    from .runtime.sizing import layers_of
    from .runtime.tensors import PRECISIONS, token_specs
    from .tasks import task_of

    model = task_of(config).model
    tokens = partial(token_specs, tokens=config.sequence_length)
    with refusing(f"model={config.model}: what its layers do cannot be found out beforehand"):
        layers = layers_of(model, tokens, tokens, config.micro_batch_size, PRECISIONS[config.precision])
    return work_in(layers, config.precision, config.optimizer, config.momentum, _tied_parameters(model))


def _tied_parameters(model: Model) -> int:
    """Those that the last layer shares with the first."""
    from .models import make_layer

    last = len(model.layers) - 1
    names = {name for group in model.tied if {0, last} <= {at for at, _ in group} for at, name in group if at == last}
    layer = make_layer(model, last, seed=0, device="meta")
    return sum(layer.get_parameter(name).numel() for name in names) if last else 0
