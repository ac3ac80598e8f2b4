"""The presets are models of the sizes that they claim."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import chimera_mpi
from chimera_mpi.data import VOCABULARY
from chimera_mpi.models import GPT, gpt, parameter_count

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = {
    path.stem: tomllib.loads(path.read_text())
    for path in sorted((Path(chimera_mpi.__file__).parent / "presets").glob("*.toml"))
}
GPTS = {name: preset for name, preset in PRESETS.items() if preset["model"] == "gpt"}


def config_of(preset) -> GPT:
    return GPT(**{field.name: preset[field.name] for field in fields(GPT)})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-small", 124_439_808), ("gpt2-paper", 1_389_327_360), ("gpt2-paper-32", 759_649_280)],
)
def test_sizes_as_published(name, parameters):
    assert parameter_count(gpt(config_of(PRESETS[name]))) == parameters


@pytest.mark.parametrize("name", GPTS)
def test_each_preset_is_a_model_that_holds_its_samples(name):
    preset = GPTS[name]
    config = config_of(preset)
    assert preset["sequence_length"] <= config.positions
    assert config.vocabulary >= VOCABULARY
    assert 0 < preset["minimum_learning_rate"] < preset["learning_rate"]
    assert preset["warmup_steps"] < preset["steps"]


@pytest.mark.parametrize("name", GPTS)
def test_all_presets_have_the_same_keys(name):
    assert GPTS[name].keys() == PRESETS["gpt-tiny"].keys()


def test_the_tiny_one_is_as_small_as_its_comment_says():
    text = (Path(chimera_mpi.__file__).parent / "presets" / "gpt-tiny.toml").read_text()
    millions = float(re.search(r"([\d.]+) million", text).group(1))
    assert parameter_count(gpt(config_of(PRESETS["gpt-tiny"]))) == pytest.approx(millions * 1e6, rel=0.01)
