"""Times, memory and waits, against figures worked out by hand and a simulator of another kind."""

import itertools
import random
from fractions import Fraction

import pytest

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, Link, memory_curve, peak_activations, peak_bytes, simulate, steady_step_s
from chimera_mpi.schedule import COMPUTE, SCHEMES, Kind, Op, build, messages, needs


def relaxed(schedule, costs):
    """Start times by raising them until nothing has to wait any more: slow, and nothing like a walk."""
    alone = len(schedule.pipes) == 1
    start = {op: 0 for order in schedule.orders for op in order}
    changed = True
    while changed:
        changed = False
        for worker, order in enumerate(schedule.orders):
            for before, op in zip([None, *order], order, strict=False):
                times = [start[before] + costs.seconds(before)] if before else []
                for need in needs(schedule, op):
                    way = costs.transfer(need) if schedule.worker(need) != worker and need.kind in COMPUTE else 0
                    busy = costs.seconds(need)
                    if need.kind is Kind.REDUCE:
                        busy = 0 if alone else costs.allreduce(need)
                    times.append(start[need] + busy + way)
                if max(times, default=0) > start[op]:
                    start[op], changed = max(times), True
    return start


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_costs_against_another_simulator(scheme):
    for seed in range(4):
        chance = random.Random(seed)
        schedule = build(scheme, chance.choice([2, 4]), chance.randint(1, 6))
        times = lambda: [Fraction(chance.randint(0, 9), chance.randint(1, 9)) for _ in range(schedule.stages)]  # noqa: B023, E731
        costs = Costs(times(), times(), times(), times(), times(), times(), times())
        timeline = simulate(schedule, costs)
        assert {span.op: span.start_s for span in timeline.spans} == relaxed(schedule, costs)


def test_costs_of_zero_and_huge_costs():
    for scheme in SCHEMES:
        assert simulate(build(scheme, 4, 8), Costs(1, 1, 1, 1, transfer_s=10**30)).makespan_s > 10**30
        assert simulate(build(scheme, 4, 8), Costs(0, 1)).makespan_s > 0


def test_recomputation_adds_a_forward_to_the_backward():
    for scheme in "1f1b", "zb_h1":
        again = simulate(build(scheme, 4, 8), Costs(1, 2, recompute=True)).makespan_s
        assert again == simulate(build(scheme, 4, 8), Costs(1, 3, input_s=2, weight_s=1)).makespan_s
    assert (
        simulate(build("gpipe", 3, 5), Costs([1, 2, 3], [2, 4, 6], recompute=True)).makespan_s
        == simulate(build("gpipe", 3, 5), Costs([1, 2, 3], [3, 6, 9])).makespan_s
    )


def test_messages_on_a_node_and_between_nodes():
    costs = Costs(
        message_bytes=[10, 20, 30, 40],
        link=Link(latency_s=5, s_per_byte=1),
        node_link=Link(latency_s=1, s_per_byte=Fraction(1, 10)),
        workers_per_node=2,
    )
    assert costs.transfer(Op(Kind.FORWARD, 0, 1, 0), 1, 2) == 5 + 20
    assert costs.transfer(Op(Kind.FORWARD, 0, 0, 0), 0, 1) == 1 + 1
    assert costs.transfer(Op(Kind.BACKWARD, 0, 2, 0), 2, 1) == 5 + 20  # the gradient of stage 1's output
    assert simulate(build("naive", 4, 1), costs).makespan_s == 4 * 3 + 2 * ((1 + 1) + (5 + 20) + (1 + 3))


def test_sends_that_keep_the_sender_busy():
    """Worker 0 sends for 1 after each forward of 1, so its second forward starts at 2."""
    schedule = build("gpipe", 2, 2)
    free, busy = (simulate(schedule, Costs(1, 2, transfer_s=1, sends_block=block)) for block in (False, True))
    starts = lambda timeline: [span.start_s for span in timeline.rows[0] if span.op.kind is Kind.FORWARD]  # noqa: E731
    assert (starts(free), starts(busy)) == ([0, 1], [0, 2])
    assert simulate(schedule, Costs(1, 2, sends_block=True)) == simulate(schedule, Costs(1, 2))


def test_allreduce_in_the_background_and_what_of_it_is_exposed():
    """All-reduces of 5 s: stage 2 and 3 have a bubble to hide in with eager_opt, nothing has with lazy."""
    costs = Costs(1, 2, allreduce_s=5)
    for sync in "lazy", "eager", "eager_opt":
        timeline = simulate(build("chimera", 4, 4, sync=sync), costs)
        assert timeline.makespan_s == 16 + 5
        assert max(timeline.exposed_allreduce_s) == 5
    two = Costs(1, 2, allreduce_s=5, groups=2)
    exposed = {sync: simulate(build("1f1b", 4, 8, sync=sync), two).exposed_allreduce_s for sync in ("lazy", "eager")}
    assert exposed["eager"] == exposed["lazy"] == (5, 5, 5, 5)
    assert simulate(build("1f1b", 4, 8), costs).exposed_allreduce_s == (0, 0, 0, 0)  # one replica: nothing to sum
    assert simulate(build("1f1b", 4, 8), Costs(1, 2)).exposed_allreduce_s == (0, 0, 0, 0)


def test_progress_of_an_allreduce_costs_its_worker():
    eager, lazy = (
        simulate(build("chimera", 4, 4, sync=sync), Costs(1, 2, allreduce_s=4, allreduce_busy=0.5)).makespan_s
        for sync in ("eager", "lazy")
    )
    assert eager >= 16 + 4 and lazy >= 16 + 4


def test_allreduce_over_the_replicas_of_all_groups():
    """2 log2(r) latencies and 2 (r - 1) / r of the bytes (Chimera, Section 3.4), over r = pipelines * groups."""
    link = Link(latency_s=3, s_per_byte=Fraction(1, 2))
    for scheme, groups, expected in ("1f1b", 4, 12 + 3 * 10), ("chimera", 1, 6 + 20), ("chimera", 4, 18 + 35):
        schedule = build(scheme, 4, 4, sync="lazy")
        costs = Costs(1, 2, gradient_bytes=40, link=link, groups=groups)
        assert costs.on(schedule).allreduce_s == expected
        assert simulate(schedule, costs).makespan_s == simulate(schedule, Costs(1, 2, link=link)).makespan_s + expected
        assert costs.on(schedule).on(schedule) == costs.on(schedule)
    assert Costs(1, 2, gradient_bytes=40, link=link).on(build("1f1b", 4, 4)).allreduce_s == 0
    assert Costs(allreduce_s=7, gradient_bytes=40, groups=2).on(build("1f1b", 4, 4)).allreduce_s == 7


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ticks_are_the_same_times_in_whole_numbers(scheme):
    ninth = Fraction(1, 9)
    costs = Costs(
        ninth, 5 * ninth, transfer_s=Fraction(1, 7), allreduce_s=Fraction(5, 3), recompute=True,
        message_bytes=3, link=Link(0, Fraction(1, 11)), node_link=Link(ninth, Fraction(1, 5)), workers_per_node=2,
        gradient_bytes=7, groups=3,
    )  # fmt: skip
    schedule = build(scheme, 4, 6)
    ticks, per_s = costs.on(schedule).in_ticks()
    times = [time for span in simulate(schedule, ticks).spans for time in (span.start_s, span.end_s)]
    assert all(type(time) is int for time in times)
    exact = simulate(schedule, costs)
    assert [float(time) for span in exact.spans for time in (span.start_s, span.end_s)] == pytest.approx(
        [time / per_s for time in times], rel=1e-14
    )
    assert Costs(1, 2, jitter=0.1).in_ticks() == (Costs(1, 2, jitter=0.1), 1)
    assert Costs(1, 3).in_ticks() == (Costs(2, 6), 2)  # half of the backward is whole too


def test_jitter_is_chance_by_seed():
    schedule = build("chimera", 4, 8)
    times = [simulate(schedule, Costs(1, 2, jitter=0.2, seed=seed)).makespan_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert 0.8 * 30 <= times[0] <= 1.2 * 30


def test_steps_without_a_barrier():
    assert steady_step_s(build("zb_h2", 8, 16)) == 48  # no bubble between the steps
    assert steady_step_s(build("zb_h1", 8, 16)) == 48 + 7
    for scheme in SCHEMES:
        schedule = build(scheme, 4, 8)
        assert steady_step_s(schedule) <= simulate(schedule).makespan_s
    longer, shorter = (simulate(build("pipedream", 4, n), Costs(1, 2)).makespan_s for n in (16, 8))
    assert longer - shorter == 8 * 3  # a stream goes on without repeating


def test_bubble_ratio_of_each_worker():
    timeline = simulate(build("1f1b", 4, 4), Costs(Fraction(1), Fraction(2)))
    assert timeline.idle_ratios == (Fraction(9, 21),) * 4 == (timeline.bubble_ratio,) * 4


def test_critical_path_crosses_messages():
    timeline = simulate(build("1f1b", 3, 1), Costs(1, 2, transfer_s=7))
    assert [str(span.op) for span in timeline.critical_path] == ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]
    timeline = simulate(build("chimera", 4, 4), Costs(1, 2, transfer_s=Fraction(1, 10)))
    path = timeline.critical_path
    assert path[0].start_s == 0 and path[-1].end_s == timeline.makespan_s
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(path))
    seconds = sum(span.end_s - span.start_s for span in path)
    ways = sum(Fraction(1, 10) for before, after in itertools.pairwise(path) if before.worker != after.worker)
    assert seconds + ways == timeline.makespan_s


def test_peak_bytes_and_when():
    timeline = simulate(build("gpipe", 2, 3), Costs(1, 2))
    levels = peak_bytes(timeline, activation_bytes=[10, 1], weight_bytes=[100, 200])
    assert [(level.start_s, level.size_bytes) for level in levels] == [(2, 130), (3, 203)]
    for scheme in SCHEMES:
        timeline = simulate(build(scheme, 4, 8))
        assert [level.size_bytes for level in peak_bytes(timeline)] == peak_activations(timeline.schedule)
        assert all(curve[-1].size_bytes == 0 for curve in memory_curve(timeline))


def test_weight_versions_take_memory():
    timeline = simulate(build("pipedream", 4, 8))
    assert [level.size_bytes for level in peak_bytes(timeline, 0, 10)] == [40, 30, 20, 10]


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward_s": -1}, "forward_s must be 0 or more and finite, not -1"),
        ({"transfer_s": float("inf")}, "transfer_s must be 0 or more and finite, not inf"),
        ({"backward_s": [1, float("nan")]}, "backward_s must be 0 or more and finite, not nan"),
        ({"workers_per_node": 0}, "workers_per_node must be at least 1, not 0"),
        ({"jitter": 2}, "are shares"),
    ],
)
def test_costs_that_make_no_sense(costs, words):
    with pytest.raises(InputError, match=words):
        Costs(**costs)


def test_costs_for_another_number_of_stages():
    with pytest.raises(InputError, match="forward_s has values for 3 stages, the schedule has 4"):
        simulate(build("1f1b", 4, 4), Costs(forward_s=[1, 2, 3]))


def test_messages_are_what_transfers_cost():
    schedule = build("interleaved", 4, 8)
    sent = sum(message.source != message.target for message in messages(schedule))
    assert sent == 2 * 8 * (schedule.stages - 1)
