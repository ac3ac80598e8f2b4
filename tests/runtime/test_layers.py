"""Layers that no pipeline trains right are refused in a line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chimera_mpi.errors import InputError
from chimera_mpi.models import as_model
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.pipeline import check_job
from chimera_mpi.schedule import build


class Rotation(nn.Module):
    """(x [..., 4]) -> the like"""

    def __init__(self, persistent=False):
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(2), torch.arange(2.0)), persistent)

    def forward(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * self.angles).flatten(-2)


class Phase(Rotation):
    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(self.angles.clone())


def check(*layers):
    model = as_model(list(layers))
    check_job(build("1f1b", 1, 1), model, [range(len(layers))], Recipe(), sharded=False, fp16=False)


@pytest.mark.parametrize(
    ("layer", "name"), [(Rotation(persistent=True), "angles"), (Phase(), "turned")], ids=["buffer", "parameter"]
)
def test_complex_numbers_that_are_trained_or_saved_are_refused(layer, name):
    check(Rotation())
    with pytest.raises(InputError, match=f"{name} of layer 1 is complex64.*persistent=False"):
        check(Rotation(), layer)
