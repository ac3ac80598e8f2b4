"""Half precision: masters, sums and reductions in single."""

from __future__ import annotations

import math

import pytest
import torch
from case import TOKENS, Case, grid_of, mini_batch, tiny

from chimera_mpi.errors import InputError
from chimera_mpi.models import as_model
from chimera_mpi.runtime.mailbox import Spec
from chimera_mpi.runtime.norm import LossScale
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.pipeline import Pipeline, Settings
from chimera_mpi.runtime.worker import MicroBatch
from chimera_mpi.schedule import build

PLAIN = Recipe("sgd", weight_decay=0.0)


def gradient(comm, schedule, dtype, loss_scale=None):
    """The mean gradient of a mini-batch, by the change of the masters at learning rate 1, as one vector."""
    inputs = [[Spec((1, TOKENS), torch.int64)]] * schedule.micro_batches
    settings = Settings(7, dtype, PLAIN, loss_scale=loss_scale)
    pipeline = Pipeline(grid_of(comm, schedule.depth), schedule, tiny(), inputs, settings)
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
    activation = pipeline.worker.mailbox._routes[pipeline.schedule.orders[0][0]]
    assert [spec.dtype for spec in activation.specs] == [torch.bfloat16]


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


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_h1"])
def test_gradients_of_fp16_are_those_of_single(comm, scheme):
    schedule = build(scheme, 2, 16)
    exact = gradient(comm, schedule, torch.float32)
    half = gradient(comm, schedule, torch.float16, loss_scale=64.0)
    assert half.dtype == torch.float32
    assert (half - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_v", "dualpipe"])
def test_an_overflow_in_one_stage_skips_the_step_on_all_ranks(comm, scheme, sharded):
    case = Case(
        comm, build(scheme, 2, 2), tiny(tied=True), dtype=torch.float16, loss_scale=64.0, sharded=sharded, clip=1.0
    )
    scales = [case.pipeline.worker.loss_scale]
    before, changed = weights_of(case), []
    for step in range(4):
        if step == 1 and comm.rank == 3:
            poison(case.pipeline)
        _, (sums,) = case.pipeline.run(case.feed(mini_batch(case.sizes), step), step, lambda step: 0.1)
        (square_norm,) = case.total(sums.square_norm)
        assert math.isfinite(square_norm) == (step != 1)
        after = weights_of(case)
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        before = after
        scales.append(case.pipeline.worker.loss_scale)
    assert changed == [True, False, True, True]
    assert scales == [64, 64, 32, 32, 32]
    case.pipeline.check_replicas()


def poison(pipeline):
    """Let one gradient be infinite, once."""
    parameter = next(p for stage in pipeline.stages.values() for p in stage.parameters())
    handle = parameter.register_hook(lambda gradient: (handle.remove(), torch.full_like(gradient, math.inf))[1])


def weights_of(case):
    return {
        (place, name): p.detach().clone()
        for place, stage in case.pipeline.stages.items()
        for name, p in stage.named_parameters()
    }


def test_the_loss_scale_falls_at_once_and_rises_slowly():
    scale = LossScale(8.0, growth_steps=3)
    seen = []
    for overflowed in (True, False, False, False, False, False, True, False):
        scale.learn(overflowed)
        seen.append(scale.value)
    assert seen == [4, 4, 4, 8, 8, 8, 4, 4]


def test_a_loss_scale_that_never_helps_is_exhausted_and_no_smaller():
    scale = LossScale(1.0)
    assert not scale.exhausted
    for _ in range(2000):
        scale.learn(overflowed=True)
    assert scale.exhausted and scale.value > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_users_loss_counts_exactly_in_half_precision(dtype):
    model = as_model(([torch.nn.Linear(1, 1)], lambda output, targets: (output.sum(), targets.numel())))
    total, count = model.loss(torch.ones(3, dtype=dtype), torch.zeros(70_001))
    assert total.dtype == torch.float32 and count.item() == 70_001


@pytest.mark.mpi(2)
def test_streams_cannot_skip_a_step(comm):
    with pytest.raises(InputError, match=r"pipedream updates stage by stage.*bf16"):
        Case(comm, build("pipedream", 2, 4), dtype=torch.float16, loss_scale=1.0)
