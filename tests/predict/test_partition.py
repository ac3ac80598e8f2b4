"""Cuts into stages: every layer once, none empty, the busiest worker relieved."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from chimera_mpi.config import checked, schedule_of
from chimera_mpi.errors import InputError
from chimera_mpi.predict import peak_activations, simulate
from chimera_mpi.predict.partition import by_thirds, cut_at, cut_by, cut_uniformly, imbalance, stage_costs
from chimera_mpi.schedule import SCHEMES, STREAMS, build


@pytest.mark.parametrize("layers", range(1, 14))
def test_every_layer_is_in_one_stage(layers):
    for stages in range(1, layers + 1):
        cuts = cut_uniformly(layers, stages)
        assert [layer for cut in cuts for layer in cut] == list(range(layers))
        assert max(map(len, cuts)) - min(map(len, cuts)) <= 1
        assert all(cuts)


def test_ten_layers_on_three_stages():
    assert [len(cut) for cut in cut_uniformly(10, 3)] == [3, 3, 4]


def best_possible(costs, schedule):
    points = combinations(range(1, len(costs)), schedule.stages - 1)
    cuts = (cut_at(p, len(costs), schedule.stages) for p in points)
    return min(imbalance(costs, cut, schedule) for cut in cuts)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("scheme", "depth"), [("1f1b", 3), ("1f1b", 4), ("chimera", 4), ("zb_v", 2)])
def test_a_heavy_head_is_balanced(scheme, depth, seed):
    chance = random.Random(seed)
    costs = [0.1, *(chance.uniform(0.8, 1.2) for _ in range(8)), chance.uniform(1, 4)]
    schedule = build(scheme, depth, 4)
    cuts = cut_by(costs, schedule)
    assert [layer for cut in cuts for layer in cut] == list(range(10))
    assert imbalance(costs, cuts, schedule) <= imbalance(costs, cut_uniformly(10, schedule.stages), schedule)
    assert imbalance(costs, cuts, schedule) <= 1.15 * best_possible(costs, schedule)


def test_chimera_balances_the_sum_of_its_two_stages():
    schedule = build("chimera", 2, 2)
    assert imbalance([1, 9], [range(0, 1), range(1, 2)], schedule) == 1


def test_wrong_cuts_are_refused():
    with pytest.raises(InputError, match=r"4 stages need as many layers, and the model has 3"):
        cut_uniformly(3, 4)
    for points in ([3], [3, 3, 5], [0, 2, 4], [2, 4, 10], [5, 4, 6]):
        with pytest.raises(InputError, match=r"give 3 rising numbers from 1 to 9"):
            cut_at(points, 10, 4)


def test_among_equal_workers_the_stages_are_even():
    """Each of Chimera's two workers holds the whole model, however it is cut."""
    costs = [1, 1, 1, 1, 1, 1, 1, 1, 1, 3]
    assert [len(cut) for cut in cut_by(costs, build("chimera", 2, 2))] == [6, 4]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("keys", [{}, {"accumulate": 2}, {"recompute": "stage"}], ids=str)
def test_an_order_for_costs_is_no_slower_and_no_larger(scheme, keys):
    """Of stages of which the last is the heaviest, as the head of a transformer makes it."""
    config = checked({"scheme": scheme, "depth": 4, "micro_batches": 8} | ({} if scheme in STREAMS else keys))
    drawn = schedule_of(config).schedule
    costs = by_thirds([4] * (drawn.stages - 1) + [9], config.recompute != "none")
    found = schedule_of(config, costs).schedule
    assert simulate(found, costs).makespan_s <= simulate(drawn, costs).makespan_s
    assert max(peak_activations(found)) <= max(peak_activations(drawn))
    assert {op for order in found.orders for op in order} == {op for order in drawn.orders for op in order}


def test_the_first_stage_has_no_input_gradient():
    costs = by_thirds(stage_costs([1, 2, 3, 4], [range(2), range(2, 4)]))
    assert costs.input_s == (0, 7) and costs.weight_s == (6, 7) and costs.backward_s == (6, 14)
