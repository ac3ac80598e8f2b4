"""Models as lists of layers. torch only; knows nothing of pipelines."""

from .gpt import GPT, gpt
from .layers import IGNORED, LayerFactory, Model, cross_entropy, keyed_seed, make_layer, parameter_count

__all__ = [
    "GPT",
    "IGNORED",
    "LayerFactory",
    "Model",
    "cross_entropy",
    "gpt",
    "keyed_seed",
    "make_layer",
    "parameter_count",
]
