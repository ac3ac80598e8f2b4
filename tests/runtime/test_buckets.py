"""Gradients are reduced in buckets, each started as soon as the backward has filled it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from case import Case, mini_batch, tiny
from test_laws import every_scheme, frozen

from chimera_mpi.runtime.gradients import bucket_runs, sum_of_squares
from chimera_mpi.runtime.stage import Recompute
from chimera_mpi.schedule import SCHEMES, STREAMS, Kind, ScheduleError, accumulated, build, completing

SMALL = 500  # bytes: several buckets a layer


@pytest.mark.mpi(4)
@every_scheme(2, 3)
def test_small_buckets_change_nothing(comm, schedule):
    Case(comm, schedule, tiny(tied=True, dropout=0.5), bucket_bytes=SMALL).run()


@pytest.mark.mpi(4)
@every_scheme(4, 5)
def test_small_buckets_of_shares_change_nothing(comm, schedule):
    Case(comm, schedule, tiny(tied=True), bucket_bytes=SMALL, sharded=True, clip=0.1).run(steps=3)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("stage"), Recompute("layer")], ids=str)
@pytest.mark.parametrize("frozen_layers", [(), (2, 3)], ids=str)
def test_data_parallelism(comm, recompute, frozen_layers):
    """Depth 1: all layers on each rank, tied ones among them."""
    model = frozen(tiny(tied=True), frozen_layers)
    for micro_batches, sharded in ((1, False), (3, False), (3, True)):
        Case(
            comm, build("1f1b", 1, micro_batches), model, bucket_bytes=SMALL, recompute=recompute, sharded=sharded
        ).run()


class Starts:
    """When the buckets of a place start, among the micro-batches that go back through it."""

    def __init__(self, monkeypatch, case):
        self.started, self.open = [], []
        for place, buckets in case.pipeline.worker.gradients._of_place.items():
            for at, bucket in enumerate(buckets):
                monkeypatch.setattr(bucket.sum, "start", self._recorder(place, at, bucket.sum.start))
        for kind, (wait, act) in case.pipeline.worker._handlers.items():
            case.pipeline.worker._handlers[kind] = wait, self._during(act)

    def _recorder(self, place, at, start):
        def recorded():
            self.started.append((place, at, self.open[-1]))
            start()

        return recorded

    def _during(self, act):
        def acted(op, received):
            self.open.append(op)
            act(op, received)

        return acted


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buckets_start_during_the_last_backward(comm, monkeypatch, scheme, dtype):
    schedule = build(scheme, 1, 2, sync="eager")
    case = Case(comm, schedule, tiny(tied=True), bucket_bytes=SMALL, dtype=dtype)
    starts = Starts(monkeypatch, case)
    case.pipeline.run(case.feed(mini_batch(case.sizes), 0), 0, lambda step: 0.1)
    buckets = case.pipeline.worker.gradients._of_place[0, 0]
    assert [at for _, at, _ in starts.started] == list(range(len(buckets))) and len(buckets) > 10
    during = [op.kind for _, _, op in starts.started]
    last = Kind.WEIGHT if scheme == "zb_h1" else Kind.BACKWARD
    # The last bucket has the tied weight, whose gradient comes from two layers.
    assert during == [last] * (len(buckets) - 1) + [Kind.REDUCE]
    assert {op.index for _, _, op in starts.started if op.kind is last} == {1}


@pytest.mark.mpi(4)
@every_scheme(4, 3)
def test_replicas_start_their_buckets_in_one_order(comm, monkeypatch, schedule):
    case = Case(comm, schedule, tiny(), bucket_bytes=SMALL)
    starts = Starts(monkeypatch, case)
    for step in range(2):
        case.pipeline.run(case.feed(mini_batch(case.sizes), step), step, lambda step: 0.1)
    mine = [(stage, at) for (_, stage), at, _ in starts.started]
    for other in comm.allgather(mine):
        shared = {stage for stage, _ in mine} & {stage for stage, _ in other}
        assert [b for b in mine if b[0] in shared] == [b for b in other if b[0] in shared]


@pytest.mark.mpi(2)
def test_streams_fill_the_buckets_of_the_versions_they_see(comm):
    from test_streams import check_stream

    check_stream(comm, build("pipedream", 1, 4), bucket_bytes=SMALL)
    check_stream(comm, build("pipedream_2bw", 2, 8), bucket_bytes=SMALL)


def test_what_completes_a_place_is_followed_by_its_all_reduce():
    for scheme in SCHEMES:
        for sync in ("lazy", "eager", "eager_opt"):
            try:
                schedule = build(scheme, 4, 6, sync=sync)
            except ScheduleError:
                continue
            for worker, order in enumerate(schedule.orders):
                for op, after in pairwise(order):
                    is_own = after.kind is Kind.REDUCE and after.place == op.place
                    assert (op in completing(schedule, worker)) == is_own
            if scheme not in STREAMS and sync == "eager":
                assert any(completing(schedule, worker) for worker in range(4))


def test_runs_of_a_bucket():
    def runs(sizes, limit_bytes):
        return [
            (r.start, r.stop) for r in bucket_runs([torch.nn.Parameter(torch.zeros(n)) for n in sizes], limit_bytes)
        ]

    assert runs([1, 1, 1, 1], 8) == [(2, 4), (0, 2)]
    assert runs([1, 1, 1], 8) == [(1, 3), (0, 1)]
    assert runs([9, 1, 9], 8) == [(2, 3), (1, 2), (0, 1)]
    assert runs([9], 1) == [(0, 1)]
    assert runs([], 8) == [(0, 0)]
    assert runs([1, 0, 1], 4) == [(1, 3), (0, 1)]


@pytest.mark.mpi(4)
@every_scheme(4, 3)
def test_accumulation_adds_steps_up(comm, schedule):
    Case(comm, accumulated(schedule, 3, "eager_opt"), bucket_bytes=SMALL).run()


@pytest.mark.mpi(4)
def test_accumulation_in_data_parallelism(comm):
    Case(comm, accumulated(build("1f1b", 1, 2), 4, "eager"), tiny(tied=True)).run()


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 300_000])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_squares_add_up_in_double(size, dtype, relative):
    flat = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares(flat) == pytest.approx(flat.double().square().sum().item(), rel=relative, abs=0)
