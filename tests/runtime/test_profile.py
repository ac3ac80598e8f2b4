"""The time of layers, by a clock that counts what is computed."""

from __future__ import annotations

import torch

from chimera_mpi.models import GPT, Model, gpt
from chimera_mpi.runtime.profile import REPEATS, layer_seconds


class Counting(torch.nn.Module):
    """Adds to a common count when it computes, forth and back."""

    def __init__(self, count, cost):
        super().__init__()
        self.count, self.cost = count, cost
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.count[0] += self.cost
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: self.count.__setitem__(0, self.count[0] + 2 * self.cost))
        return y


def test_forward_backward_and_loss_count():
    count = [0.0]

    def loss(x, targets):
        count[0] += 100
        return x.sum(), torch.tensor(1.0)

    model = Model(tuple(lambda cost=cost: Counting(count, cost) for cost in (1, 2, 5)), loss)
    found = layer_seconds(model, (torch.ones(2),), torch.ones(2), clock=lambda: count[0])
    assert found == [3, 6, 115]


def test_layers_that_are_alike_are_measured_once():
    ticks = [0.0]

    def clock():
        ticks[0] += 1
        return ticks[0]

    model = gpt(GPT(layers=6, hidden=8, heads=2, vocabulary=11, positions=5, tied=True))
    ids = torch.zeros(2, 5, dtype=torch.int64)
    found = layer_seconds(model, (ids,), ids, clock=clock)
    measured = len({model.layers.index(factory) for factory in model.layers})
    assert len(found) == 8 and measured == 3
    assert ticks[0] == 2 * measured * (1 + REPEATS)
