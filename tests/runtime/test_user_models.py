"""Models of the user's own, whose boundaries are odd, equal one process as well."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from case import Case
from test_laws import PAPER, buildable
from torch import nn

from chimera_mpi.models import as_model
from chimera_mpi.runtime.stage import Recompute

TOKENS, VOCABULARY, WIDTH = 3, 7, 4


@cache
def samples(sizes, step):
    """Micro-batches of features, ids and a mask; targets are wanted sums and their weights, some of them 0."""
    rng = torch.Generator().manual_seed(step)
    batches = []
    for size in sizes:
        features = torch.randn(size, TOKENS, WIDTH, generator=rng, dtype=torch.float64)
        ids = torch.randint(VOCABULARY, (size, TOKENS), generator=rng)
        mask = torch.rand(size, TOKENS, generator=rng) < 0.7
        wanted = torch.randn(size, TOKENS, generator=rng, dtype=torch.float64)
        batches.append(((features, ids, mask), (wanted, mask.double())))
    return batches


class Layer(nn.Module):
    """From (h, ids, mask, scale) to the like. `scale` is a float that has no gradient at first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, ids, mask, scale):
        return h + torch.tanh(self.linear(h)), ids, mask, scale


class Enter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.features = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, features, ids, mask):
        scale = mask.sum(-1, keepdim=True).to(features.dtype) / TOKENS
        return self.embedding(ids) + self.features(features), ids, mask, scale


class Masked(Layer):
    """Has a use for all that comes in."""

    def forward(self, h, ids, mask, scale):
        h = h + self.linear(h) * mask[..., None] * scale[..., None] + (ids % 2)[..., None]
        return h, ids.flip(-1), ~mask, scale


class Twice(Layer):
    """Uses its weights twice, one after the other."""

    def forward(self, h, ids, mask, scale):
        return self.linear(torch.tanh(self.linear(h))), ids, mask, scale


class Deaf(Layer):
    """Ignores the scale that comes in and gives another, which has a gradient."""

    def forward(self, h, ids, mask, scale):
        return h, ids, mask, self.linear(h).mean(-1)


class Whirl(Layer):
    """Hands on complex numbers, by marks on the memory of others; their gradients come back marked as well."""

    def forward(self, h, ids, mask, scale):
        z = torch.complex(self.linear(h), h)
        return z.conj(), ids, mask, z.conj().imag.mean(-1) + scale


class Flat(Deaf):
    def forward(self, z, ids, mask, scale):
        back = z.conj()
        return super().forward(back.imag + back.real**2, ids, mask, scale)


class Plain(nn.Module):
    """No weights; dropout draws by rule, and the mask goes on as it came."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, h, ids, mask, scale):
        return self.dropout(h).sin(), ids, mask, scale


class Swapped(Layer):
    """Gives out what is no block of memory, and a second gradient's way round the weights."""

    def forward(self, h, ids, mask, scale):
        return self.linear(h).transpose(0, 1).contiguous().transpose(0, 1), ids, mask, scale + h.mean(-1)


class Leave(Layer):
    def forward(self, h, ids, mask, scale):
        return self.linear(h).sum(-1), scale, ids


class Loss:
    """Counts weights, not tokens; does not look at the ids, nor at the scale."""

    def __call__(self, h, scale, ids, targets):
        wanted, weights = targets
        return (weights * (h - wanted) ** 2).sum(), weights.sum()


class LossWithScale(Loss):
    def __call__(self, h, scale, ids, targets):
        return super().__call__(h + scale, scale, ids, targets)


def odd():
    """With two layers a stage the second stage has no weights; the scale is not used by the loss."""
    return [Enter(), Masked(), Plain(), Plain(), Twice(), Masked(), Layer(), Leave()], Loss()


def two_streams():
    """A second float goes all the way, made anew half way, where the first is complex."""
    return [Enter(), Masked(), Swapped(), Whirl(), Flat(), Plain(), Swapped(), Leave()], LossWithScale()


def shared():
    """One module in three places, next to each other; one weight at both ends; one of two in the middle."""
    layers = [Enter(), Masked(), Layer(), Layer(), Twice(), Twice(), Layer(), Leave()]
    layers[5] = layers[4]
    layers[6].linear = layers[4].linear
    layers[7].linear.weight = layers[0].features.weight
    layers[3].linear.bias = layers[1].linear.bias
    return layers, Loss()


def partly_frozen():
    """The first layers have nothing to train, so no gradient's way reaches back to them; others train in part."""
    layers = [Enter(), Masked(), Layer(), Twice(), Swapped(), Masked(), Deaf(), Leave()]
    for module in (*layers[:2], layers[3].linear.weight, layers[5], layers[6].linear.bias):
        module.requires_grad_(False)
    return layers, LossWithScale()


def all_frozen_but_the_first():
    layers = [Enter(), Masked(), Twice(), Swapped(), Layer(), Deaf(), Plain(), Leave()]
    for module in layers[1:]:
        module.requires_grad_(False)
    layers[0].features.weight.requires_grad_(False)
    return layers, LossWithScale()


@cache
def built(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return as_model(build())


MODELS = (odd, two_streams, shared, partly_frozen, all_frozen_but_the_first)
SCHEDULES = [
    pytest.param(schedule, id=f"{schedule.scheme}-D{depth}", marks=pytest.mark.mpi(depth))
    for depth in (2, 4)
    for schedule in buildable(depth, 3)
    if depth == 4 or schedule.scheme in PAPER
]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_one_process(comm, schedule, build):
    for recompute in (Recompute(), Recompute("layer", 3 - schedule.depth // 2)):
        Case(comm, schedule, built(build), data=samples, recompute=recompute).run(steps=1)


def test_schemes_with_split_backwards_are_among_them():
    assert {bool(parameters.values[0].split) for parameters in SCHEDULES} == {False, True}
