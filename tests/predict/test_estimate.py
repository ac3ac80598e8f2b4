"""What a choice comes to: by simulation, by Eq. 1, in memory, however many micro-batches and replicas there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chimera_mpi.predict import Link, simulate
from chimera_mpi.predict.estimate import Choice, costs_of, estimate, schedule_of, stepped
from chimera_mpi.predict.footprint import memory_of
from chimera_mpi.predict.machine import AllReduce, Compute, Level, Machine, Optimizer, Point
from chimera_mpi.predict.performance import performance
from chimera_mpi.predict.work import Transformer, gpt_work
from chimera_mpi.schedule import SCHEMES, STREAMS, build, without_updates

WORK = gpt_work(Transformer(layers=14, hidden=64, heads=4, vocabulary=200, positions=32, sequence_length=32))
BLOCK, HEAD = WORK.layers[1], WORK.layers[-1]
MACHINE = Machine(
    name="test",
    source="made up",
    memory_bytes=1e9,
    workers_per_node=1,
    compute=Compute(
        tuple(
            Point(
                "block", n, 1.0 + n, 2.0 + 2 * n, forward_flops=BLOCK.forward_flops, backward_flops=BLOCK.backward_flops
            )
            for n in (1, 2)
        )
    ),
    link=Link(0.125, 0.25 / BLOCK.output_bytes),
    allreduce=AllReduce(Level(0.5, 4.0 / 4 / BLOCK.parameters), above=Level(1.0, 0.0), nodes_per_switch=64),
    optimizer=Optimizer(0.25, 0.0),
)
FLUSHES = [scheme for scheme in SCHEMES if scheme not in STREAMS]


def choice(scheme, depth=4, width=2, size=1, micro_batches=8, **more):
    return Choice(scheme, depth, width, size, micro_batches, **more)


@pytest.mark.parametrize("scheme", FLUSHES)
def test_a_step_is_simulated_whole_or_as_if(scheme):
    """A long step takes what its simulation takes, at the cost of a short one; so do its bubbles and its memory."""
    for micro_batches in 1, 6, 40, 67:
        chosen = choice(scheme, micro_batches=micro_batches)
        whole = schedule_of(chosen)
        assert all(of.micro_batches <= 32 for _, of in stepped(chosen))
        found, fact = estimate(WORK, MACHINE, chosen), simulate(whole, costs_of(WORK, MACHINE, chosen, whole))
        assert found.step_s == pytest.approx(fact.makespan_s, rel=1e-9)
        assert found.bubble_ratio == pytest.approx(fact.bubble_ratio, abs=1e-9)
        for held, expected in zip(found.memory, memory_of(WORK, chosen, whole), strict=True):
            assert held.total_bytes == pytest.approx(expected.total_bytes)


@pytest.mark.parametrize("scheme", STREAMS)
def test_a_step_of_a_stream_is_one_in_its_midst(scheme):
    for micro_batches in 4, 8, 44:
        chosen = choice(scheme, micro_batches=micro_batches)
        every = {"every": micro_batches} if scheme == "pipedream_2bw" else {}
        long, longer = (build(scheme, 4, steps * micro_batches, **every) for steps in (4, 5))
        ends = [simulate(of, costs_of(WORK, MACHINE, chosen, of)).makespan_s for of in (long, longer)]
        assert estimate(WORK, MACHINE, chosen).step_s == pytest.approx(ends[1] - ends[0])


def test_costs_are_those_of_each_stages_layers():
    chosen = choice("1f1b", size=2, cuts=[range(0, 1), range(1, 3), range(3, 15), range(15, 16)])
    costs = costs_of(WORK, MACHINE, chosen, schedule_of(chosen))
    assert costs.forward_s[1:3] == (2 * 3.0, 12 * 3.0)
    head_s = 1 + 2 * HEAD.forward_flops / BLOCK.forward_flops
    assert costs.forward_s[3] == pytest.approx(head_s)
    assert costs.transfer(build("1f1b", 4, 1).orders[1][0]) == 0.125 + 2 * 0.25
    embedding = 4.0 * WORK.layers[0].parameters / BLOCK.parameters
    assert costs.allreduce_s[:2] == pytest.approx((2 * 0.5 + embedding, 2 * 0.5 + 2 * 4.0))  # over two replicas
    assert costs.update_s == (0.25,) * 4
    assert costs.input_s is None
    halves = costs_of(WORK, MACHINE, choice("zb_h1"), build("zb_h1", 4, 8))
    assert halves.input_s == halves.weight_s == tuple(both / 2 for both in halves.backward_s)


def test_recomputation_and_half_micro_batches():
    kept, again = (estimate(WORK, MACHINE, choice("gpipe", recompute=what)) for what in ("none", "layer"))
    assert again.step_s > 1.2 * kept.step_s
    assert max(m.activations_bytes for m in again.memory) < max(m.activations_bytes for m in kept.memory)
    halved = choice("chimera", size=2, options=(("concat", "halving"),))
    assert schedule_of(halved).micro_batches == 16
    assert costs_of(WORK, MACHINE, halved, schedule_of(halved)).forward_s[1] == 4 * 2.0
    assert (halved.samples, halved.workers) == (2 * 8 * 2, 8)


def test_sharded_updates_shrink_with_the_replicas():
    machine = replace(MACHINE, optimizer=Optimizer(0.0, 1.0))
    whole, sharded = (choice("1f1b", width=8, sharded=shared) for shared in (False, True))
    updates = [costs_of(WORK, machine, of, schedule_of(of)).update_s for of in (whole, sharded)]
    assert updates[0] == tuple(8 * seconds for seconds in updates[1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_formula_stands_beside_the_simulation(scheme):
    found = estimate(WORK, MACHINE, choice(scheme))
    schedules = stepped(found.choice)
    costs = costs_of(WORK, MACHINE, found.choice, schedules[-1][1])
    assert found.formula_s == performance(schedules, costs).step_s
    assert found.disagreement == pytest.approx(found.formula_s / found.step_s - 1)
    assert abs(found.disagreement) < 0.5
    assert 0 < found.bubble_ratio < 1


def test_versions_of_weights_cost_the_streams_alone():
    machine = replace(MACHINE, optimizer=Optimizer(version_s_per_parameter=1e-4))
    for scheme in "1f1b", "pipedream", "pipedream_2bw":
        plain, versions = (costs_of(WORK, of, choice(scheme), build(scheme, 4, 8)) for of in (MACHINE, machine))
        more = [after - before for before, after in zip(plain.backward_s, versions.backward_s, strict=True)]
        held = [sum(layer.parameters for layer in WORK.layers[4 * stage : 4 * stage + 4]) for stage in range(4)]
        assert more == pytest.approx([1e-4 * parameters * (scheme in STREAMS) for parameters in held])


def test_what_of_the_allreduce_is_exposed():
    for scheme in "1f1b", "chimera":
        chosen = choice(scheme)
        found = estimate(WORK, MACHINE, chosen)
        bare = simulate(without_updates(schedule_of(chosen)), costs_of(WORK, MACHINE, chosen, schedule_of(chosen)))
        updates_s = 0.25 * (2 if scheme == "chimera" else 1)
        assert found.step_s == pytest.approx(bare.makespan_s + found.exposed_allreduce_s + updates_s)
    assert estimate(WORK, MACHINE, choice("1f1b", width=1)).exposed_allreduce_s == 0


def test_replicas_are_alike_so_that_more_of_them_cost_no_more_to_estimate():
    """A step of 131,072 workers is looked at through one group; only its all-reduce is longer."""
    small, large = (estimate(WORK, MACHINE, choice("1f1b", width=width)) for width in (2, 2**15))
    assert len(large.memory) == len(small.memory) == 4
    sums = [MACHINE.allreduce_s(4 * sum(layer.parameters for layer in WORK.layers[:4]), w, 4) for w in (2, 2**15)]
    assert large.step_s - small.step_s == pytest.approx(sums[1] - sums[0])
    assert large.choice.samples == 2**14 * small.choice.samples
