"""Optimizers that look at whole tensors equal one process too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from case import Case, tiny

from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.schedule import build


def without_key_biases(model):
    """Attention does not depend on them: their gradients are rounding errors, which Adafactor would make long."""

    def frozen(factory):
        layer = factory()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.endswith("qkv.bias"))
        return layer

    return replace(model, layers=tuple(partial(frozen, factory) for factory in model.layers))


@pytest.mark.mpi(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scheme", ["1f1b", "chimera"])
@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_equals_one_process(comm, optimizer, scheme, tied):
    model = without_key_biases(tiny(tied=tied))
    Case(comm, build(scheme, 2, 3), model, recipe=Recipe(optimizer), clip=0.1).run(steps=3, rtol=1e-11)
