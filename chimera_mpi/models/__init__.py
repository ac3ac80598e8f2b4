"""Models as lists of layers. torch only; knows nothing of pipelines."""

from .bert import BERT, bert, pretraining_loss
from .gpt import GPT, gpt
from .huggingface import from_huggingface, from_huggingface_config, to_huggingface, to_huggingface_config
from .layers import (
    IGNORED,
    LayerFactory,
    Loss,
    Model,
    cross_entropy,
    in_precision,
    keyed_seed,
    make_layer,
    parameter_count,
)
from .parts import SHAPE
from .user import as_model, named_layers, user_model

__all__ = [
    "BERT",
    "GPT",
    "IGNORED",
    "SHAPE",
    "LayerFactory",
    "Loss",
    "Model",
    "as_model",
    "bert",
    "cross_entropy",
    "from_huggingface",
    "from_huggingface_config",
    "gpt",
    "in_precision",
    "keyed_seed",
    "make_layer",
    "named_layers",
    "parameter_count",
    "pretraining_loss",
    "to_huggingface",
    "to_huggingface_config",
    "user_model",
]
