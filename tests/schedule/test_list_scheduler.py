"""The list scheduler and the search: never stuck, never over the memory, never slower."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, Link, peak_activations, simulate
from chimera_mpi.schedule import (
    SCHEMES,
    SYNCS,
    Kind,
    Plan,
    ScheduleError,
    build,
    check,
    improve,
    list_schedule,
    lower_bound,
)
from chimera_mpi.schedule.list_scheduler import gradients_first, peaks, plans_for
from chimera_mpi.schedule.schemes import STREAMS
from chimera_mpi.schedule.sync import with_updates

FLUSHES = [scheme for scheme in SCHEMES if scheme not in STREAMS]


def uneven(schedule, seed, **more):
    chance = random.Random(seed)
    times = lambda most: [chance.choice([0, 1, 1, 2, 3, most]) for _ in range(schedule.stages)]  # noqa: E731
    return Costs(forward_s=times(5), backward_s=times(9), transfer_s=times(2), **more)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(FLUSHES), depth=st.sampled_from([2, 4, 6]), n=st.integers(1, 13), seed=st.integers(0, 9999)
)
def test_every_plan_ends_within_the_memory(scheme, depth, n, seed):
    drawn = SCHEMES[scheme](depth, n)
    sizes = [random.Random(seed + stage).choice([1, 2, 5]) for stage in range(drawn.stages)]
    least = [max(sum(sizes[s] for s, w in enumerate(p) if w == worker) for p in drawn.pipes) for worker in range(depth)]
    limits = [limit + random.Random(seed).choice([0, 1, 7]) for limit in least]
    for plan in [*plans_for(drawn), Plan(gradients_first(drawn), window=0, patience=3)]:
        found = list_schedule(drawn, uneven(drawn, seed), plan, limits, sizes)
        check(with_updates(replace(found, scheme="listed"), "eager"))
        assert all(peak <= limit for peak, limit in zip(peaks(found, sizes), limits, strict=True))


def test_a_worker_that_cannot_hold_one_micro_batch_is_refused():
    drawn = SCHEMES["zb_v"](2, 4)
    with pytest.raises(ScheduleError, match="worker 0 has memory for 1, but one micro-batch takes 2"):
        list_schedule(drawn, Costs(), plans_for(drawn)[0], [1, 4])


@pytest.mark.parametrize("scheme", FLUSHES)
def test_orders_for_costs_are_never_slower(scheme):
    for depth, n in (4, 5), (4, 8):
        fixed = build(scheme, depth, n)
        for costs in (
            Costs(),
            Costs(1, 3),
            Costs(2, 4, 3, 1, transfer_s=0.3),
            uneven(fixed, depth, allreduce_s=3, update_s=1),
            Costs(1, 2, message_bytes=4, link=Link(0.1, 0.2), node_link=Link(0, 0.01), workers_per_node=2),
            Costs(1, 2, transfer_s=0.5, sends_block=True),
        ):
            ordered = check(build(scheme, depth, n, costs=costs))
            assert simulate(ordered, costs).makespan_s <= simulate(fixed, costs).makespan_s
            assert max(peak_activations(ordered)) <= max(peak_activations(fixed))


@pytest.mark.parametrize("sync", SYNCS)
def test_no_order_for_costs_can_wait_for_good_in_an_allreduce(sync):
    """Of more than two pipelines some of the orders that are found could: they are left out."""
    for depth, pairs, n in (4, 2, 5), (4, 2, 7), (8, 2, 9), (6, 3, 7):
        costs = Costs(1, 2, transfer_s=1)
        ordered = check(build("chimera", depth, n, pairs=pairs, sync=sync, costs=costs))
        drawn = build("chimera", depth, n, pairs=pairs, sync=sync)
        assert simulate(ordered, costs).makespan_s <= simulate(drawn, costs).makespan_s
        check(improve(drawn, costs, sync=sync, moves=50).schedule)


def test_orders_for_costs_are_often_better():
    costs = Costs(forward_s=2, backward_s=4, input_s=3, weight_s=1)
    assert simulate(build("chimera_zb", 4, 8), costs).makespan_s == 57
    assert simulate(build("chimera_zb", 4, 8, costs=costs), costs).makespan_s <= 51
    assert simulate(build("chimera", 4, 8, costs=Costs(1, 2)), Costs(1, 2)).makespan_s < 30


def test_the_bound_of_chimera_zb_is_reached_with_costs_too():
    assert build("chimera_zb", 8, 16, costs=Costs()).orders is not None
    assert simulate(build("chimera_zb", 8, 16, costs=Costs())).makespan_s == 51


@pytest.mark.parametrize("scheme", FLUSHES)
def test_no_order_is_below_the_bound(scheme):
    for seed in range(5):
        schedule = build(scheme, 4, 6)
        costs = uneven(schedule, seed)
        assert lower_bound(schedule, costs) <= simulate(build(scheme, 4, 6, costs=costs), costs).makespan_s


def test_bounds_that_are_reached():
    for depth in 2, 4, 8:
        assert lower_bound(build("chimera_zb", depth, 2 * depth), Costs()) == 6 * depth + depth // 2 - 1
        assert lower_bound(build("1f1b", depth, 5), Costs(1, 2)) == (5 + depth - 1) * 3
        assert lower_bound(build("zb_v", depth, 5), Costs(1, 2)) == 6 * 5 + depth - 1


def test_search_is_the_same_for_the_same_seed_and_never_worse():
    costs = Costs(forward_s=2, backward_s=4, input_s=3, weight_s=1)
    start = build("chimera_zb", 4, 8)
    calls = []
    one = improve(start, costs, moves=150, seed=7, progress=lambda *state: calls.append(state))
    two = improve(start, costs, moves=150, seed=7)
    assert one == two and check(one.schedule)
    assert one.makespan_s == simulate(one.schedule, costs).makespan_s < simulate(start, costs).makespan_s
    assert max(peak_activations(one.schedule)) <= 4
    assert one.gap == one.makespan_s / one.bound_s - 1 >= 0
    assert [tried for tried, _, _ in calls] == list(range(1, one.moves + 1))
    assert all(bound <= best for _, best, bound in calls)


def test_search_stops_at_the_bound_and_at_the_time_limit():
    assert improve(build("chimera_zb", 4, 8), Costs()).moves == 0
    assert improve(build("chimera", 4, 8), Costs(1, 2), seconds=0).moves == 0
    with pytest.raises(ScheduleError, match="is a stream"):
        improve(build("pipedream", 4, 8), Costs())


def test_streams_keep_their_order():
    assert build("pipedream_2bw", 4, 8, costs=Costs(1, 5)) == build("pipedream_2bw", 4, 8)


def test_forwards_do_not_fill_the_memory_of_a_v():
    """With room for one micro-batch only, the first stage waits until the last has had its turn."""
    drawn = SCHEMES["zb_v"](4, 6)
    found = list_schedule(drawn, Costs(), plans_for(drawn)[-1], [2] * 4)
    assert max(peaks(found)) == 2
    assert sum(op.kind is Kind.FORWARD for op in found.orders[0]) == 12


def test_costs_for_too_few_stages():
    with pytest.raises(InputError, match="there is a stage 2, but costs for 2 stages only"):
        build("zb_v", 2, 4, costs=Costs(forward_s=[1, 2]))
