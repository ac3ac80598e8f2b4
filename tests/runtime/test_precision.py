"""Half precision: masters, sums and reductions in single."""

from __future__ import annotations

import pytest
import torch
from case import TOKENS, Case, grid_of, mini_batch, tiny

from chimera_mpi.runtime.mailbox import Spec
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.pipeline import Pipeline, Settings
from chimera_mpi.runtime.worker import MicroBatch
from chimera_mpi.schedule import build

PLAIN = Recipe("sgd", weight_decay=0.0)


def gradient(comm, schedule, dtype):
    """The mean gradient of a mini-batch, by the change of the masters at learning rate 1, as one vector."""
    inputs = [[Spec((1, TOKENS), torch.int64)]] * schedule.micro_batches
    pipeline = Pipeline(grid_of(comm, schedule.depth), schedule, tiny(), inputs, Settings(7, dtype, PLAIN))
    batch = mini_batch((1,) * schedule.micro_batches)
    masters = [m for weights in pipeline.worker.weights.values() for m in weights.masters.values()]
    before = [m.detach().clone() for m in masters]
    pipeline.run(lambda n: MicroBatch(0, n, lambda: ((batch[n][0],), batch[n][1])), 0, lambda step: 1.0)
    return torch.cat([(b - m.detach()).flatten() for b, m in zip(before, masters, strict=True)])


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_h1"])
def test_small_gradients_are_not_lost_in_bf16(comm, scheme):
    schedule = build(scheme, 2, 256)
    exact = gradient(comm, schedule, torch.float32)
    half = gradient(comm, schedule, torch.bfloat16)
    assert half.dtype == torch.float32
    assert (half - exact).norm() < 0.01 * exact.norm()


@pytest.mark.mpi(2)
def test_messages_travel_in_bf16(comm):
    pipeline = Case(comm, build("1f1b", 2, 1), dtype=torch.bfloat16).pipeline
    activation = pipeline.worker.mailbox.spec(pipeline.schedule.orders[0][0])
    assert [spec.dtype for spec in activation] == [torch.bfloat16]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["lamb", "adafactor", "adamw"])
def test_optimizers_learn(comm, name):
    case = Case(comm, build("chimera", 2, 4), tiny(tied=True), recipe=Recipe(name), dtype=torch.float32)
    batch = mini_batch(case.sizes)
    losses = []
    for step in range(30):
        _, (sums,) = case.pipeline.run(case.feed(batch, step), step, lambda step: 0.1)
        losses.append(case.total(sums.loss)[0])
    assert losses[-1] < 0.9 * losses[0]
