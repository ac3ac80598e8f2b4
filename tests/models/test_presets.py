"""The presets are models of the sizes that they claim."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import chimera_mpi
from chimera_mpi.data import VOCABULARY, special_tokens
from chimera_mpi.models import BERT, GPT, bert, gpt, parameter_count

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = {
    path.stem: tomllib.loads(path.read_text())
    for path in sorted((Path(chimera_mpi.__file__).parent / "presets").glob("*.toml"))
}
KINDS = {"gpt": (GPT, gpt, VOCABULARY), "bert": (BERT, bert, special_tokens().pad + 1)}


def model_of(preset):
    """The shape, the model, and the size of the smallest vocabulary that holds the bytes."""
    shape, build, vocabulary = KINDS[preset["model"]]
    config = shape(**{field.name: preset[field.name] for field in fields(shape) if field.name in preset})
    return config, build(config), vocabulary


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-paper", 1_389_327_360),
        ("gpt2-paper-32", 759_649_280),
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
        ("bert-48", 669_790_012),
    ],
)
def test_sizes_as_published(name, parameters):
    _, model, _ = model_of(PRESETS[name])
    assert parameter_count(model) == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_model_that_holds_its_samples(name):
    preset = PRESETS[name]
    config, _, vocabulary = model_of(preset)
    assert preset["sequence_length"] <= config.positions
    assert config.vocabulary >= vocabulary
    assert 0 < preset["minimum_learning_rate"] < preset["learning_rate"]
    assert preset["warmup_steps"] < preset["steps"]


@pytest.mark.parametrize("name", PRESETS)
def test_all_presets_have_the_same_keys(name):
    assert PRESETS[name].keys() == PRESETS["gpt-tiny"].keys()


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_the_tiny_ones_are_as_small_as_their_comments_say(name):
    text = (Path(chimera_mpi.__file__).parent / "presets" / f"{name}.toml").read_text()
    millions = float(re.search(r"([\d.]+) million", text).group(1))
    _, model, _ = model_of(PRESETS[name])
    assert parameter_count(model) == pytest.approx(millions * 1e6, rel=0.01)
