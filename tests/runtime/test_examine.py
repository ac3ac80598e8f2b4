"""Gradients or a loss that are not finite: no weight sees them, and the first layer that made them is found."""

from __future__ import annotations

import math

import pytest
import torch
from case import Case, mini_batch, tiny

from chimera_mpi.runtime.examine import first_broken
from chimera_mpi.runtime.norm import GlobalNorm, LossScale
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.stage import Recompute
from chimera_mpi.runtime.waiting import Patience
from chimera_mpi.schedule import build


def layer_of(case, index):
    """This rank's copies of a layer."""
    return [stage.layer(index) for stage in case.pipeline.stages.values() if index in stage.indices]


def spoil_output(case, index):
    """What the layer makes has a nan in it, until the hooks are gone."""

    def spoil(layer, entered, left):
        left = left.clone()
        left.view(-1)[0] = math.nan
        return left

    return [layer.register_forward_hook(spoil) for layer in layer_of(case, index)]


def spoil_gradient(case, index):
    return [
        next(layer.parameters()).register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        for layer in layer_of(case, index)
    ]


def spoil_weights(case, index):
    with torch.no_grad():
        for layer in layer_of(case, index):
            next(layer.parameters()).view(-1)[0] = math.nan
    return []


def weights_of(case):
    return [p.detach().clone() for stage in case.pipeline.stages.values() for p in stage.parameters()]


def step(case, number):
    feed = case.feed(mini_batch(case.sizes, number), number)
    _, (sums,) = case.pipeline.run(feed, number, lambda step: 0.1)
    return feed, sums


@pytest.mark.mpi(4)
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (spoil_output, "what layer 4 makes of micro-batch"),
        (spoil_gradient, "the gradients of layer 4"),
        (spoil_weights, "the weights of layer 4"),
    ],
)
@pytest.mark.parametrize(("scheme", "sharded"), [("1f1b", False), ("1f1b", True), ("chimera", False), ("zb_v", False)])
def test_a_step_that_is_not_finite_changes_nothing_and_its_first_layer_is_found(
    comm, scheme, sharded, spoil, what, recompute
):
    settings = {"guards": True, "sharded": sharded, "recompute": Recompute(recompute)}
    case = Case(comm, build(scheme, 2, 4), tiny(dropout=0.1), **settings)
    step(case, 0)
    assert not case.pipeline.broke
    handles = spoil(case, 4) if case.grid.replica == 1 else []
    before = weights_of(case)
    feed, sums = step(case, 1)
    assert case.pipeline.broke and sums.skipped == 1
    assert all(torch.equal(b, a) or b.isnan().any() for b, a in zip(before, weights_of(case), strict=True))
    found = comm.allgather(str(first_broken(case.pipeline, feed, 1)))
    assert len(set(found)) == 1
    stage = next(stage for stage, layers in enumerate(case.pipeline.cuts) if 4 in layers)
    assert what in found[0] and f"stage {stage} on rank" in found[0], found[0]
    if "gradients" not in what:  # summed, they are the same on all replicas
        assert int(found[0].split()[-1]) // 2 == 1
    for handle in handles:
        handle.remove()
    if handles or spoil is not spoil_weights:
        _, sums = step(case, 2)
        assert sums.skipped == (spoil is spoil_weights)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "zb_v", "interleaved"])
def test_the_micro_batch_that_broke_is_named(comm, scheme):
    case, at_hand = Case(comm, build(scheme, 2, 4), guards=True), {}
    for stage in case.pipeline.stages.values():
        stage.register_forward_pre_hook(lambda stage, entering: at_hand.update(number=entering[-1]))
    for layer in layer_of(case, 4):
        layer.register_forward_hook(lambda layer, entered, left: left * math.nan if at_hand["number"] == 2 else None)
    feed, _ = step(case, 0)
    assert "what layer 4 makes of micro-batch 2" in str(first_broken(case.pipeline, feed, 0))


@pytest.mark.mpi(2)
def test_a_guard_alone_changes_no_bit(comm):
    """Without clipping: what a guarded run learns is what an unguarded one does."""
    found = []
    for guards in (False, True):
        case = Case(comm, build("chimera", 2, 4), recipe=Recipe("adamw"), guards=guards)
        for number in range(3):
            step(case, number)
        found.append(weights_of(case))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("squares", "loss"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan), (1.0, math.inf)])
def test_who_guards_skips_on_all_ranks_alike(comm, squares, loss):
    mine = (squares, loss) if comm.rank else (1.0, 1.0)
    guarding = GlobalNorm(comm, Patience(1e-4), None, None, guards=True)
    assert guarding.judge(*mine) == 1 and guarding.skips and guarding.broke
    assert guarding.judge(1.0, 1.0) == 1 and not guarding.skips and not guarding.broke
    careless = GlobalNorm(comm, Patience(1e-4), None, None)
    careless.judge(*mine)
    assert not careless.skips


@pytest.mark.mpi(2)
def test_an_overflow_is_broken_only_where_no_scale_is_small_enough(comm):
    guarding = GlobalNorm(comm, Patience(1e-4), None, LossScale(2.0**-22), guards=True)
    seen = []
    for _ in range(4):
        guarding.judge(math.inf)
        seen.append((guarding.skips, guarding.broke))
    assert seen == [(True, False), (True, False), (True, True), (True, True)]
    assert guarding.scale > 0
    careless = GlobalNorm(comm, Patience(1e-4), None, LossScale(2.0**-22))
    with pytest.raises(FloatingPointError, match="loss or the weights are inf or nan"):
        for _ in range(100):
            careless.judge(math.inf)
