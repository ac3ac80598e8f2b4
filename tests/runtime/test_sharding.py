"""Each replica of a stage updates a share of it: the same weights as if all did all."""

from __future__ import annotations

import pytest
import torch
from case import Case, mini_batch, tiny
from test_laws import every_scheme, frozen

from chimera_mpi.errors import InputError
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.schedule import build


@pytest.mark.mpi(4)
@every_scheme(4, 3)
def test_equals_one_process(comm, schedule):
    Case(comm, schedule, sharded=True).run()


@pytest.mark.mpi(4)
@every_scheme(2, 3)
def test_two_replicas_tied_and_clipped(comm, schedule):
    Case(comm, schedule, tiny(tied=True), clip=0.1, sharded=True).run(steps=3)


@pytest.mark.mpi(8)
def test_eight_replicas_of_a_stage(comm):
    Case(comm, build("gpipe", 1, 1), sharded=True).run()
    Case(comm, build("chimera", 2, 2), tiny(tied=True), sharded=True).run()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("layers", [(0,), (0, 1, 2, 3), (7,)], ids=str)
def test_stages_without_weights_to_train(comm, layers):
    Case(comm, build("chimera", 4, 4), frozen(tiny(), layers), sharded=True).run()


@pytest.mark.mpi(4)
def test_a_rank_has_its_share_of_the_state_only(comm):
    case = Case(comm, build("chimera", 2, 2), recipe=Recipe("adamw"), sharded=True)
    case.pipeline.run(case.feed(mini_batch(case.sizes), 0), 0, lambda step: 0.01)
    for place, weights in case.pipeline.worker.weights.items():
        buckets = case.pipeline.worker.gradients.buckets(place)
        assert all(bucket.sum.is_share and bucket.comm.size == 4 for bucket in buckets)
        held = sum(state["exp_avg"].numel() for state in weights.optimizer.state.values())
        assert held <= sum(len(bucket.mine) for bucket in buckets)
        assert sum(comm.allgather(held)) > 0


@pytest.mark.mpi(4)
def test_replicas_stay_equal_to_the_bit_in_bf16(comm):
    case = Case(comm, build("chimera", 2, 2), recipe=Recipe("adamw"), sharded=True, dtype=torch.bfloat16)
    for step in range(20):
        case.pipeline.run(case.feed(mini_batch(case.sizes), step), step, lambda step: 0.01)
    case.pipeline.check_replicas()


@pytest.mark.mpi(2)
def test_what_cannot_be_shared_is_refused(comm):
    with pytest.raises(InputError, match=r"lamb looks at whole tensors.*optimizer_sharding=none"):
        Case(comm, build("chimera", 2, 2), recipe=Recipe("lamb"), sharded=True)
    with pytest.raises(InputError, match=r"pipedream holds its weights in several versions"):
        Case(comm, build("pipedream", 2, 4), sharded=True)
