"""Sums in memory that replicas share, on one node and on several: the same as by messages."""

from __future__ import annotations

import random
import time

import pytest
import torch
from case import Case, mini_batch, tiny
from test_laws import every_scheme

from chimera_mpi.runtime.gradients import Gradients
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.reduction import Layout, SharedSum, by_messages, in_shared_memory, padded_bytes
from chimera_mpi.schedule import build

SHARED = {"shared_from_bytes": 1, "bucket_bytes": 500}


class TwoNodes(Grid):
    """Half of the ranks on either of two nodes, as far as this grid can tell."""

    def together(self, comm):
        ranks = comm.group.Translate_ranks(None, self.world.group)
        return comm.Split(ranks[comm.rank] // (self.world.size // 2), comm.rank)


class UnevenNodes(Grid):
    def together(self, comm):
        return comm.Split(min(comm.rank, 1), comm.rank)


def run(case, steps=2):
    case.run(steps)
    case.pipeline.close()


def kinds(case):
    return {type(b.sum) for buckets in case.pipeline.worker.gradients._of_place.values() for b in buckets}


@pytest.mark.mpi(4)
@every_scheme(4, 3)
def test_on_one_node(comm, schedule):
    run(Case(comm, schedule, tiny(tied=True), clip=0.1, **SHARED))


@pytest.mark.mpi(4)
@every_scheme(2, 3)
def test_shares_of_two_replicas_on_one_node(comm, schedule):
    case = Case(comm, schedule, tiny(tied=True), sharded=True, **SHARED)
    assert kinds(case) == {SharedSum}
    run(case)


@pytest.mark.mpi(8)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("nodes", [Grid, TwoNodes, UnevenNodes])
def test_eight_replicas(comm, nodes, sharded):
    case = Case(comm, build("gpipe", 1, 2), tiny(tied=True), grid=nodes, sharded=sharded, **SHARED)
    by_memory = nodes is Grid or (nodes is TwoNodes and not sharded)
    assert (kinds(case) == {SharedSum}) == by_memory
    run(case)


@pytest.mark.mpi(8)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_v", "pipedream_2bw"])
def test_two_nodes(comm, scheme):
    if scheme == "pipedream_2bw":
        from test_streams import check_stream

        check_stream(comm, build(scheme, 2, 4), grid=TwoNodes, **SHARED)
    else:
        run(Case(comm, build(scheme, 2, 4), clip=0.1, grid=TwoNodes, **SHARED))


@pytest.mark.mpi(8)
@pytest.mark.parametrize("nodes", [Grid, TwoNodes])
def test_replicas_stay_equal_to_the_bit(comm, nodes):
    options = {"recipe": Recipe("adamw"), "clip": 1.0, "dtype": torch.float32, "grid": nodes, **SHARED}
    case = Case(comm, build("chimera", 2, 2), tiny(tied=True, dropout=0.1), **options)
    for step in range(50):
        case.pipeline.run(case.feed(mini_batch(case.sizes), step), step, lambda step: 0.01)
    case.pipeline.check_replicas()
    case.pipeline.close()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("seed", range(5))
def test_sums_with_random_pauses(comm, seed):
    """Many sums under way, each rank at its own pace: whole numbers, so exact in any order."""
    grid = TwoNodes(comm, 1)
    layouts = [
        Layout(size, counted, torch.float64) for size, counted in ((0, True), (1, False), (37, True), (64, False))
    ]
    memory, sums = in_shared_memory(grid.nearby(grid.world), layouts, sharded=False)
    chance = random.Random(f"{seed} {comm.rank}")
    for turn in range(10):
        pending = []
        for of in sums:
            of.flat.fill_(comm.rank + turn)
            of.start()
            pending.append(of)
            time.sleep(chance.random() * 1e-3 * (chance.random() < 0.3))
        while pending:
            pending = drive(pending)
        for of, layout in zip(sums, layouts, strict=True):
            expected = 6 + 4 * turn
            assert torch.equal(of.mine, torch.full((layout.size,), expected, dtype=torch.float64))
            assert torch.equal(of.count, torch.full((int(layout.counted),), expected, dtype=torch.float64))
    del of, pending
    sums.clear()
    memory.close()
    grid.close()


def drive(pending):
    """As `Gradients.poke` does it."""
    gradients = Gradients.__new__(Gradients)
    gradients._under_way = pending
    gradients.poke()
    return gradients._under_way


@pytest.mark.mpi(2)
def test_small_gradients_travel_in_messages(comm):
    case = Case(comm, build("gpipe", 1, 2))
    assert SharedSum not in kinds(case)


@pytest.mark.mpi(2)
def test_without_room_in_shared_memory_messages_do(comm, monkeypatch):
    monkeypatch.setattr("chimera_mpi.runtime.gradients.free_shared_bytes", lambda: 1e3 if comm.rank else 1e12)
    case = Case(comm, build("gpipe", 1, 2), **SHARED)
    assert SharedSum not in kinds(case)
    case.run()


class Late:
    """A sum that is done once what it waits for has been driven three times."""

    in_order, is_share, bell = True, False, None

    def __init__(self):
        self.driven = 0
        self.count = torch.ones(1)
        self.mine = torch.zeros(4)

    def drive(self):
        return self.driven >= 3


@pytest.mark.mpi(1)
def test_a_wait_for_sums_drives_messages(comm):
    """A replica that waits for this rank's message cannot add its gradients before."""
    case = Case(comm, build("gpipe", 1, 1))
    gradients, late = case.pipeline.worker.gradients, Late()
    (bucket,) = gradients.buckets((0, 0))
    bucket.sum = late
    gradients._under_way.append(late)

    def meanwhile():
        late.driven += 1

    gradients.settle((0, 0), meanwhile=meanwhile)
    assert late.driven >= 3 and not gradients._under_way


def test_buffers_are_padded_to_cache_lines():
    assert padded_bytes(Layout(1, False, torch.float32), 4) == 4 * 64
    assert padded_bytes(Layout(16, True, torch.float32), 1) == 2 * 64
    assert padded_bytes(Layout(0, False, torch.float64), 3) == 0


@pytest.mark.mpi(2)
def test_one_rank_alone_sums_nothing(comm):
    (alone,) = by_messages(Grid(comm, 2).replicas([comm.rank]), [Layout(3, True, torch.float32)], sharded=True)
    alone.flat.fill_(2)
    alone.start()
    assert alone.drive() and alone.flat.tolist() == [2] * 4
