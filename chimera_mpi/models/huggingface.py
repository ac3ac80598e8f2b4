"""Weights and shapes of GPT and BERT under Hugging Face's names, and back. Needs nothing of `transformers`.

One table for each model says which of our parameters is which of theirs: a row is a layer, our name, their names,
and whether they store the matrix as [inputs, outputs]. Several names are parts of ours, stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, shown
from .bert import BERT, bert
from .bert import NORM_EPS as BERT_EPS
from .gpt import GPT, gpt
from .gpt import NORM_EPS as GPT_EPS
from .layers import make_layer

Weights = dict[int, dict[str, Tensor]]
"""By layer index and name, as the layers' `state_dict`s have them."""


class Row(NamedTuple):
    """One of our parameters, and those of Hugging Face that it is made of."""

    layer: int
    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


def to_huggingface(config: GPT | BERT, weights: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All entries of the `state_dict` of GPT2LMHeadModel or BertForPreTraining, each in memory of its own.

    Raises `InputError` if `weights` lacks a parameter.
    """
    result: dict[str, Tensor] = {}
    for row in rows(config):
        if row.ours not in weights.get(row.layer, {}):
            raise InputError(f"layer {row.layer} has no weights '{row.ours}': give all {config.layers + 2} layers")
        parts = weights[row.layer][row.ours].chunk(len(row.theirs))
        for name, part in zip(row.theirs, parts, strict=True):
            result[name] = _turned(part, row).detach().clone(memory_format=torch.contiguous_format)
    if isinstance(config, BERT):  # its module has the decoder's bias twice
        result["cls.predictions.bias"] = result["cls.predictions.decoder.bias"].clone()
    return result


def from_huggingface(config: GPT | BERT, weights: Mapping[str, Tensor]) -> Weights:
    """Our weights from those of a GPT-2 or BERT, whole or as it is published (without prefix, or tied weights once).

    Raises `InputError` if something is missing, left over or of another shape.
    """
    left = _normalised(config, weights)
    result: Weights = {}
    for row in rows(config):
        parts = [_turned(_take(left, name, config), row) for name in row.theirs]
        result.setdefault(row.layer, {})[row.ours] = torch.cat(parts).contiguous()
    unknown = left.keys() - {name for row in rows(config) for name in row.theirs}
    if unknown:
        raise InputError(f"no place in a {_kind(config)} for {len(unknown)} weights, such as '{min(unknown)}'")
    _check_shapes(config, result)
    return result


def to_huggingface_config(config: GPT | BERT) -> dict[str, Any]:
    """What belongs into the `config.json` beside the weights."""
    keys, architecture = (
        (BERT_KEYS, "BertForPreTraining") if isinstance(config, BERT) else (GPT_KEYS, "GPT2LMHeadModel")
    )
    ours = {theirs: getattr(config, name) for name, theirs in keys.items()}
    return {"architectures": [architecture], "tie_word_embeddings": config.tied, **ours, **_fixed(config)}


def from_huggingface_config(settings: Mapping[str, Any]) -> GPT | BERT:
    """The shape that a `config.json` tells of. Raises `InputError` if it is of a model that is not built here."""
    kinds = {"gpt2": (GPT, GPT_KEYS), "bert": (BERT, BERT_KEYS)}
    if settings.get("model_type") not in kinds:
        raise InputError(f"model_type={settings.get('model_type')} is not built here: give a gpt2 or a bert")
    kind, keys = kinds[settings["model_type"]]
    missing = [theirs for theirs in keys.values() if theirs not in settings]
    if missing:
        raise InputError(f"the configuration of a {settings['model_type']} lacks {', '.join(missing)}")
    for ours, theirs in keys.items():
        if not isinstance(settings[theirs], int | float if ours == "dropout" else int):
            raise InputError(f"{theirs}={settings[theirs]!r} is no {'number' if ours == 'dropout' else 'whole number'}")
    tied = settings.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise InputError(f"tie_word_embeddings={shown(tied)} is neither true nor false")
    config = kind(tied=tied, **{o: settings[t] for o, t in keys.items()})
    for key, value in {**_fixed(config), **_left_alone(config)}.items():
        found = settings.get(key)
        if found not in (None, value) and SAME_FUNCTION.get(str(found)) != value:
            raise InputError(f"{key}={found}, and a {_kind(config)} of this shape has {key}={value} here")
    return config


# ---- the tables --------------------------------------------------------------------------------------------------

GPT_KEYS = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "positions": "n_positions",
    "dropout": "resid_pdrop",
}
BERT_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "segments": "type_vocab_size",
}


def rows(config: GPT | BERT) -> Iterator[Row]:
    """Each of our parameters once."""
    return _bert_rows(config) if isinstance(config, BERT) else _gpt_rows(config)


def _gpt_rows(config: GPT) -> Iterator[Row]:
    yield Row(0, "tokens.weight", ("transformer.wte.weight",))
    yield Row(0, "positions.weight", ("transformer.wpe.weight",))
    for layer in range(config.layers):
        block = f"transformer.h.{layer}"
        yield from _both(layer + 1, "attention_norm", f"{block}.ln_1")
        yield from _both(layer + 1, "attention.qkv", f"{block}.attn.c_attn", transposed=True)
        yield from _both(layer + 1, "attention.output", f"{block}.attn.c_proj", transposed=True)
        yield from _both(layer + 1, "mlp_norm", f"{block}.ln_2")
        yield from _both(layer + 1, "mlp.input", f"{block}.mlp.c_fc", transposed=True)
        yield from _both(layer + 1, "mlp.output", f"{block}.mlp.c_proj", transposed=True)
    head = config.layers + 1
    yield from _both(head, "norm", "transformer.ln_f")
    yield Row(head, "output.weight", ("lm_head.weight",))


def _bert_rows(config: BERT) -> Iterator[Row]:
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("segments", "token_type")):
        yield Row(0, f"{ours}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",))
    yield from _both(0, "norm", "bert.embeddings.LayerNorm")
    for layer in range(config.layers):
        block = f"bert.encoder.layer.{layer}"
        attention = f"{block}.attention.self"
        yield from _both(layer + 1, "attention.qkv", f"{attention}.query", f"{attention}.key", f"{attention}.value")
        yield from _both(layer + 1, "attention.output", f"{block}.attention.output.dense")
        yield from _both(layer + 1, "attention_norm", f"{block}.attention.output.LayerNorm")
        yield from _both(layer + 1, "mlp.input", f"{block}.intermediate.dense")
        yield from _both(layer + 1, "mlp.output", f"{block}.output.dense")
        yield from _both(layer + 1, "mlp_norm", f"{block}.output.LayerNorm")
    head = config.layers + 1
    yield from _both(head, "transform", "cls.predictions.transform.dense")
    yield from _both(head, "norm", "cls.predictions.transform.LayerNorm")
    yield from _both(head, "decoder", "cls.predictions.decoder")
    yield from _both(head, "pooler", "bert.pooler.dense")
    yield from _both(head, "follows", "cls.seq_relationship")


def _fixed(config: GPT | BERT) -> dict[str, Any]:
    """What Hugging Face lets one choose and this package does not."""
    if isinstance(config, BERT):
        return {
            "model_type": "bert",
            "hidden_act": "gelu",
            "layer_norm_eps": BERT_EPS,
            "intermediate_size": 4 * config.hidden,
            "attention_probs_dropout_prob": config.dropout,
        }
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": GPT_EPS,
        "n_inner": 4 * config.hidden,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _left_alone(config: GPT | BERT) -> dict[str, Any]:
    """What else one may choose there, and hardly anyone does."""
    if isinstance(config, BERT):
        return {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    return {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


SAME_FUNCTION = {"gelu_pytorch_tanh": "gelu_new"}


def _both(layer: int, ours: str, *theirs: str, transposed: bool = False) -> Iterator[Row]:
    yield Row(layer, f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transposed)
    yield Row(layer, f"{ours}.bias", tuple(f"{name}.bias" for name in theirs))


def _turned(part: Tensor, row: Row) -> Tensor:
    return part.T if row.transposed else part


# ---- what is published -------------------------------------------------------------------------------------------

# GPT-2's causal masks and BERT's position numbers are constants that old files carry along.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".position_ids")


def _normalised(config: GPT | BERT, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Today's names, and each weight under every name that it has."""
    named = {_modern(config, name): weight for name, weight in weights.items() if not name.endswith(CONSTANTS)}
    if isinstance(config, GPT):
        owner, copy = "transformer.wte.weight", "lm_head.weight"
    else:
        owner, copy = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
        bias = named.pop("cls.predictions.bias", None)
        if bias is not None:
            named.setdefault("cls.predictions.decoder.bias", bias)
    if config.tied and owner in named:
        named[copy] = named[owner]
    return named


def _modern(config: GPT | BERT, name: str) -> str:
    """OpenAI's GPT-2 is published without its prefix; Google's BERT with the LayerNorm names of its TensorFlow."""
    if isinstance(config, GPT):
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _take(weights: dict[str, Tensor], name: str, config: GPT | BERT) -> Tensor:
    if name not in weights:
        raise InputError(f"no weights '{name}', which a {_kind(config)} of {config.layers} layers has")
    if not weights[name].is_floating_point():
        raise InputError(f"'{name}' is {weights[name].dtype}: give the weights as they were before they were quantized")
    return weights[name]


def _check_shapes(config: GPT | BERT, weights: Weights) -> None:
    model = bert(config) if isinstance(config, BERT) else gpt(config)
    for layer, named in weights.items():
        for name, wanted in make_layer(model, layer, seed=0, device="meta").named_parameters():
            if named[name].shape != wanted.shape:
                raise InputError(
                    f"'{name}' of layer {layer} is {list(named[name].shape)}, and the configuration asks for "
                    f"{list(wanted.shape)}: give the configuration that belongs to these weights"
                )


def _kind(config: GPT | BERT) -> str:
    return type(config).__name__
