"""What calibration measures with: ranks that act together, pairs, groups, layers in a row."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, isnan

import pytest
import torch
from case import tiny
from late import LateStreams

from chimera_mpi.models import user
from chimera_mpi.predict.calibrated import DEVICE, HOST, LayerReading
from chimera_mpi.runtime.calibration import (
    WAYS,
    Effort,
    Ensemble,
    Layout,
    Manner,
    Pair,
    read_layers,
    read_messages,
    read_moved,
    read_slowdown,
    read_sums,
)
from chimera_mpi.runtime.calibration.ensemble import MOST_REPEATS
from chimera_mpi.runtime.calibration.layers import rows_of, thinned
from chimera_mpi.runtime.calibration.layout import doublings
from chimera_mpi.runtime.calibration.messages import Letters
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.staging import Direct, ThroughHost
from chimera_mpi.runtime.waiting import Patience

FEW = Effort((1, 2), (4, 1 << 18), (1 << 16, 1 << 18), trips=2, repeats=3, point_s=0.01, longest_s=1.0)


def ensemble_of(comm):
    return Ensemble(comm, Patience.for_node(comm.size, 1), FEW)


def test_kinds_are_measured_in_rows() -> None:
    assert rows_of(["embedding", *["block"] * 8, "head"]) == {
        "embedding": range(0, 1),
        "block": range(1, 4),
        "head": range(9, 10),
    }
    assert rows_of(["a", "b", "a", "b", "b"]) == {"a": range(0, 1), "b": range(1, 2)}
    assert thinned(list("abbbbbacc"), 2) == [0, 1, 2, 6, 7, 8]
    assert [doublings(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.mpi(3)
def test_a_reading_is_the_median_of_repeats_and_ranks(comm) -> None:
    repeats = iter([9.0, *[1.0, 5.0] * 30, *[3.0] * (MOST_REPEATS - 60)])  # the first is not counted
    ensemble = Ensemble(comm, Patience.for_node(comm.size, 1), replace(FEW, point_s=1e6))
    reading = ensemble.read(lambda: [next(repeats) * (comm.rank + 1), float("nan")])
    assert reading.values[0] == 3.0 * 2 and isnan(reading.values[1])
    assert reading.noise == pytest.approx(4 / 3)


@pytest.mark.mpi(2)
def test_ranks_that_stand_by_do_not_count(comm) -> None:
    assert ensemble_of(comm).read(lambda: [4.0 if comm.rank else float("nan")]).values == [4.0]


@pytest.mark.mpi(2)
def test_layers_of_any_model_and_what_lies_between_them(comm) -> None:
    """A layer whose kind was measured before is passed, unless it changes what comes after."""
    linear = torch.nn.Linear
    layers = [linear(3, 4), torch.nn.Tanh(), linear(4, 5), torch.nn.Tanh(), linear(5, 1)]
    model = user.as_model((layers, lambda y, targets: (y.sum(), torch.tensor(1.0))))
    kinds = ["first", "tanh", "first", "tanh", "last"]
    manner = Manner(torch.float32, Recipe("sgd"), True, Direct())
    found, updates = read_layers(
        ensemble_of(comm), model, kinds, lambda n: ((torch.ones(n, 3),), torch.ones(n)), manner
    )
    assert [(layer.kind, layer.samples) for layer in found] == [
        (k, n) for k in ("first", "tanh", "last") for n in (1, 2)
    ]
    assert [update.parameters for update in updates] == [16, 6]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_of_a_gpt(comm, dtype) -> None:
    manner = Manner(dtype, Recipe("adamw"), True, Direct())
    ids = torch.zeros(2, 5, dtype=torch.int64)
    kinds = ["embedding", *["block"] * 6, "head"]
    found, updates = read_layers(ensemble_of(comm), tiny(), kinds, lambda n: ((ids[:n],), ids[:n]), manner)
    assert len(found) == 6 and all(
        0 < seconds < 5 for layer in found for seconds in layer[2:6] if layer.kind != "embedding"
    )
    assert [update.parameters for update in updates] == [(11 + 5) * 8, 3 * (12 * 8 + 13) * 8, (11 + 2) * 8]


@pytest.mark.mpi(4)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_pipeline_of_these_layers(comm, ranks) -> None:
    """Layers that are said to take no time make a pipeline look slow, and the other way round."""
    part = comm.Split(comm.rank < ranks, comm.rank)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    kinds = ["embedding", *["block"] * 6, "head"]
    manner = Manner(torch.float32, Recipe("adamw"), True, Direct())

    def slowdown(seconds):
        readings = [LayerReading(k, n, *[seconds] * 4, 0.0) for k in dict.fromkeys(kinds) for n in (1, 2)]
        return read_slowdown(ensemble_of(part), tiny(), kinds, readings, lambda n: ((ids[:n],), ids[:n]), manner)

    assert slowdown(1e-9) > 1000 and slowdown(1e3) < 0.01
    part.Free()


@pytest.mark.parametrize("way", WAYS)
def test_messages_on_the_critical_path(way: str) -> None:
    """Of a ping-pong all; where both send at once, half of them."""

    class Alone:
        rank, size = 0, 2
        Isend = Issend = None

        def Get_attr(self, key):
            return 32767

    letters = Letters(Pair(Alone(), None), WAYS[way].scheme, 4, 64, Patience(0.0), Direct())
    serial = WAYS[way].scheme == "naive"
    assert letters.share_of_critical_path() == ((1, 8) if serial else (0.5, 4))


class TwoNodes(Grid):
    """Half of the ranks on either of two nodes, as far as this grid can tell."""

    def together(self, comm):
        ranks = comm.group.Translate_ranks(None, self.world.group)
        return comm.Split(ranks[comm.rank] // (self.world.size // 2), comm.rank)


@pytest.mark.mpi(4)
def test_pairs_and_groups_on_two_nodes(comm) -> None:
    grid = TwoNodes(comm, 1)
    layout = Layout(grid)
    assert layout.sizes == [2, 2] and layout.number == comm.rank // 2
    near, far = layout.neighbours(), layout.apart()
    assert near.comm.size == 2 and near.comm.rank == comm.rank % 2
    assert (far is not None) == (comm.rank in (0, 2))
    found = read_messages(ensemble_of(grid.world), far, Direct(), HOST)  # ranks 1 and 3 stand by, and learn of it
    assert all(other == found for other in comm.allgather(found)) and all(isfinite(m.seconds) for m in found)
    groups = [(group.replicas, group.nodes, group.comm.size) for group in layout.groups()]
    assert groups == [(2, 1, 2), (2, 2, 2), (4, 2, 4)]
    layout.close()
    grid.close()


@pytest.mark.mpi(3)
def test_a_rank_without_a_neighbour_stands_by(comm) -> None:
    grid = Grid(comm, 1)
    layout = Layout(grid)
    assert (layout.neighbours() is None) == (comm.rank == 2)
    groups = list(layout.groups())
    assert [group.replicas for group in groups] == [2, 3] and (groups[0].comm is None) == (comm.rank == 2)
    for group in groups:
        found = read_sums(ensemble_of(grid.world), group, Direct())
        assert all(other == found for other in comm.allgather(found)) and all(isfinite(s.seconds) for s in found)
    layout.close()
    grid.close()


@pytest.mark.mpi(2)
def test_buffers_of_a_device_take_the_way_of_the_runtime(comm) -> None:
    grid, staging = Grid(comm, 1), ThroughHost(LateStreams(comm.rank))
    layout, ensemble = Layout(grid), ensemble_of(grid.world)
    pair = layout.neighbours()
    found = read_messages(ensemble, pair, staging, DEVICE)
    assert len(found) == len(WAYS) * 2 and {m.buffers for m in found} == {DEVICE}
    assert 0 <= read_moved(ensemble, pair, 1 << 18, 1e-3, staging) <= 1
    (group,) = layout.groups()
    assert all(s.seconds > 0 for s in read_sums(ensemble, group, staging))
    assert {"fetch", "bring"} <= set(staging.streams.calls)
    layout.close()
    grid.close()
