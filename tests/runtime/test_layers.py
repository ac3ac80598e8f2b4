"""Layers that no pipeline trains right are refused in a line."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from chimera_mpi.config import checked, schedule_of
from chimera_mpi.errors import InputError
from chimera_mpi.models import as_model
from chimera_mpi.runtime.tensors import Spec
from chimera_mpi.tasks import Task
from chimera_mpi.train import job_of


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


def plan(*layers, width=1, entering=torch.float32, **keys):
    """A job of one stage."""
    config = checked({"scheme": "1f1b", "depth": 1, "micro_batches": 1, **keys})
    task = Task(as_model(list(layers)))
    job_of(config, width, schedule_of(config), task, (3,) * width, (Spec((3, 4), entering),))


@pytest.mark.parametrize(
    ("layer", "name"), [(Rotation(persistent=True), "angles"), (Phase(), "turned")], ids=["buffer", "parameter"]
)
def test_complex_numbers_that_are_trained_or_saved_are_refused(layer, name):
    plan(Rotation())
    with pytest.raises(InputError, match=f"{name} of layer 1 is complex64.*persistent=False"):
        plan(Rotation(), layer)


def test_a_model_that_was_planned_with_is_let_go_of():
    layer = nn.Linear(4, 4)
    held = weakref.ref(layer)
    plan(layer)
    del layer
    gc.collect()
    assert held() is None


class Doubled(nn.Module):
    """Writes to a part of its input."""

    def forward(self, x):
        x[..., 1:].mul_(2)
        return x


class Careful(nn.Module):
    """Writes to what it has made itself, and to a cache the first time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", None, persistent=False)

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(4, device=x.device)
        return self.linear(x).relu_().add_(self.positions)


@pytest.mark.parametrize(
    "layer", [nn.ReLU(inplace=True), nn.Dropout(0.1, inplace=True), Doubled()], ids=["relu", "dropout", "a part"]
)
@pytest.mark.parametrize("keys", [{}, {"precision": "bf16", "entering": torch.bfloat16}], ids=["fp32", "bf16"])
def test_a_layer_that_writes_to_its_input_is_refused(layer, keys):
    careful, block = Careful(), nn.Sequential(nn.Linear(4, 4), layer)
    before = torch.get_rng_state()
    plan(careful, block, width=2, recompute="stage", **keys)
    with pytest.raises(InputError, match=f"layer 1, {type(layer).__name__}, writes to its inputs.*inplace=False"):
        plan(careful, layer, careful, **keys)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute": "layer"},
            "num_batches_tracked in each forward, and recomputation .* GroupNorm .* recompute=none",
        ),
        ({"width": 2}, "num_batches_tracked in each forward, and its 2 replicas .* GroupNorm .* as many ranks"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_layer_that_counts_its_forwards_is_refused_where_they_are_not_one_a_micro_batch(options, message):
    plan(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plan(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), **options)
    with pytest.raises(InputError, match=f"layer 1, BatchNorm1d, writes its buffer {message}"):
        plan(nn.Linear(4, 4), nn.BatchNorm1d(4), **options)
