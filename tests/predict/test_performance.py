"""Eq. 1 of the Chimera paper, and the passes on the critical path of every scheme."""

from __future__ import annotations

import pytest

from chimera_mpi.predict import Costs, Link, simulate
from chimera_mpi.predict.performance import Passes, critical_passes, performance
from chimera_mpi.schedule import SCHEMES, STREAMS, Kind, build

DEPTHS = (2, 4, 8)


def passes(scheme, depth, micro_batches, costs=(1.0, 2.0, 0.0), **options):
    return critical_passes(build(scheme, depth, micro_batches, **options), Passes(*costs))[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_passes_on_the_critical_path(depth):
    """The closed forms of the papers: Chimera at N = D has C_f = D and C_b = 2D - 2 (Section 3.4)."""
    n = 2 * depth
    assert passes("naive", depth, n) == Passes(n * depth, n * depth, 0)
    for scheme in "gpipe", "1f1b":
        assert passes(scheme, depth, n) == Passes(n + depth - 1, n + depth - 1, 0)
    assert passes("gems", depth, n) == Passes(depth + n - 1, n * depth, 0)
    assert passes("chimera", depth, depth) == Passes(depth, 2 * depth - 2, 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_messages_and_sums_eq_1_is_the_makespan(scheme):
    for depth, micro_batches in (2, 3), (4, 4), (4, 12):
        schedule = build(scheme, depth, micro_batches)
        costs = Costs(1.25, 2.5, 1.5, 0.75) if schedule.split else Costs(1.25, 2.5)
        found = performance([(1, schedule)], costs)
        assert found.step_s == pytest.approx(simulate(schedule, costs).makespan_s)
        split = found.passes.weight > 0
        assert split <= bool(schedule.split)


def test_the_passes_of_a_long_schedule_do_not_run_into_each_other():
    assert passes("1f1b", 2, 4000) == Passes(4001, 4001, 0)
    assert passes("1f1b", 2, 5, costs=(1e-9, 1e3, 0.0)) == Passes(6, 6, 0)


def test_messages_count_once_for_each_pass():
    link = Link(latency_s=0.5, s_per_byte=0.25)
    found = performance([(1, build("chimera", 4, 4))], Costs(1, 2, message_bytes=2, link=link))
    assert found.transfer_s == 1
    assert found.step_s == (1 + 1) * 4 + (2 + 1) * 6


def test_messages_within_a_worker_and_a_node_are_nearer():
    costs = Costs(1, 2, message_bytes=1, link=Link(0, 4), node_link=Link(0, 1), workers_per_node=2)
    assert performance([(1, build("1f1b", 4, 4))], costs).transfer_s == pytest.approx((1 + 4 + 1) / 3)
    hop = performance([(1, build("zb_v", 2, 4))], Costs(1, 2, transfer_s=3)).transfer_s
    assert hop == pytest.approx(2 / 3 * 3)  # the turn of the V stays on its worker


def test_what_of_an_allreduce_its_free_region_does_not_hide():
    """Chimera, D = N = 4, F = 1, B = 2: stage 3 is done at 9 of 16, so 7 of its all-reduce are hidden."""
    for sync, stage_3_s, expected in ("eager_opt", 8, 1), ("eager_opt", 7, 0), ("lazy", 8, 8):
        costs = Costs(1, 2, allreduce_s=[0, 0, 0, stage_3_s])
        assert performance([(1, build("chimera", 4, 4, sync=sync))], costs).unoverlapped_s == pytest.approx(expected)
    whole = performance([(1, build("chimera", 4, 4))], Costs(1, 2, allreduce_s=5))
    assert (whole.unoverlapped_s, whole.step_s) == (5, 16 + 5)
    assert performance([(1, build("1f1b", 4, 4))], Costs(1, 2, allreduce_s=5)).unoverlapped_s == 0  # one replica


def test_allreduces_that_take_turns_hide_less():
    queued = Costs(1, 2, allreduce_s=5, allreduces_queue=True)
    found = performance([(1, build("chimera", 4, 4, sync="lazy"))], queued)
    assert found.unoverlapped_s == 10
    assert simulate(build("chimera", 4, 4, sync="lazy"), queued).makespan_s == 16 + 10
    assert simulate(build("chimera", 4, 4, sync="lazy"), Costs(1, 2, allreduce_s=5)).makespan_s == 16 + 5


def test_the_busiest_worker_sets_f_and_b():
    """In Chimera workers share stages: 0 and 3, of 1 and 6 s, are 3.5 on average; in 1F1B the last has 6 to itself."""
    costs = Costs([1, 1, 1, 6], [2, 2, 2, 12], update_s=[1, 2, 3, 1])
    chimera, rival = (performance([(1, build(scheme, 4, 4))], costs) for scheme in ("chimera", "1f1b"))
    assert (chimera.busiest_s, chimera.update_s) == ((3.5, 7, 0), 5)
    assert (rival.busiest_s, rival.update_s) == ((6, 12, 0), 3)
    assert chimera.mean_s == rival.mean_s == (9 / 4, 18 / 4, 0)


def test_passes_that_are_not_the_busiest_workers_own_take_what_a_mean_stage_takes():
    """GPipe is done when its heavy last stage has done all, and the ways there and back are through the others."""
    costs = Costs([1, 1, 1, 6], [2, 2, 2, 12])
    found = performance([(1, build("gpipe", 4, 8))], costs)
    assert (found.passes, found.own) == ((11, 11, 0), (8, 8, 0))
    assert found.step_s == 8 * 18 + 3 * 27 / 4
    assert simulate(build("gpipe", 4, 8), costs).makespan_s == 8 * 18 + 3 * 3


def test_recomputation_is_part_of_the_backward():
    assert performance([(1, build("gpipe", 2, 4))], Costs(1, 2, recompute=True)).busiest_s.backward == 3
    assert performance([(1, build("zb_h1", 2, 4))], Costs(1, 2, recompute=True)).busiest_s.backward == 2


@pytest.mark.parametrize("scheme", STREAMS)
def test_the_allreduces_of_a_stream_are_bare(scheme):
    """Its updates follow at once: an update's all-reduce, of the slowest stage, for each of its updates."""
    few, more = build(scheme, 4, 8), build(scheme, 4, 16)
    updates = {"pipedream": 8, "pipedream_2bw": 2}[scheme]
    found = performance([(-1, few), (1, more)], Costs(1, 2, allreduce_s=[1, 2, 5, 1], update_s=0.5, groups=2))
    assert found.unoverlapped_s == updates * 5
    assert found.update_s == updates * 0.5
    assert found.passes == Passes(8, 8, 0)
    assert sum(op.kind is Kind.UPDATE for op in few.orders[0]) == len({op.index for op in few.orders[0]}) * updates // 8
