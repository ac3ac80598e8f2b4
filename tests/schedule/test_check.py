"""What check refuses, and that it refuses nothing else: against a definition written here."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_mpi.errors import InputError
from chimera_mpi.schedule import SCHEMES, Deadlock, Kind, Op, Schedule, ScheduleError, build, check, loads, repeat
from chimera_mpi.schedule.schemes import LIVE


def with_orders(schedule, orders):
    return replace(schedule, orders=tuple(map(tuple, orders)))


def why_not(schedule, asked_for):
    """The first reason for which a schedule cannot be carried out, or None: the laws in plain words.

    `asked_for` is how often each op is to be done, taken from the schedule before it was spoilt.
    """
    pipes, orders = schedule.pipes, schedule.orders
    if any(pipes[op.pipe][op.stage] != worker for worker, order in enumerate(orders) for op in order):
        return "holds that stage"
    done = Counter(op for order in orders for op in order)
    if any(times > 1 for times in done.values()):
        return "has done"
    if done != asked_for:
        return "is missing"
    if not runs(orders, asked_for, pipes, rendezvous=False):
        return "waits for|before"
    if len(pipes) > 1:
        if not same_sequence(orders, pipes):
            return "shares it"
        if not runs(orders, asked_for, pipes, rendezvous=True):
            return "waits for"
    return "activation held" if most_live(orders) > LIVE[schedule.scheme](schedule) else None


def most_live(orders):
    most = 0
    for order in orders:
        live = 0
        for op in order:
            live += (op.kind is Kind.FORWARD) - (op.kind in (Kind.BACKWARD, Kind.WEIGHT))
            most = max(most, live)
    return most


def wants(op, all_ops, pipes):
    """What must be done before an op, said again."""
    kind, pipe, stage, n = op
    last = len(pipes[0]) - 1
    if kind is Kind.FORWARD:
        return [Op(Kind.FORWARD, pipe, stage - 1, n)] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Op(Kind.INPUT, pipe, stage, n)]
    if kind in (Kind.BACKWARD, Kind.INPUT):
        above = [Op(k, pipe, stage + 1, n) for k in (Kind.BACKWARD, Kind.INPUT)] if stage < last else []
        return [Op(Kind.FORWARD, pipe, stage, n), *(a for a in above if a in all_ops)]
    if kind is Kind.REDUCE:
        return [o for o in all_ops if o[1:3] == op[1:3] and o.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    return [Op(Kind.REDUCE, p, stage, n) for p in range(len(pipes))]


def runs(orders, all_ops, pipes, rendezvous):
    """Whether workers that do what they can, in their orders, come to the end."""
    done, at = set(), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order) and all(want in done for want in wants(order[at[worker]], all_ops, pipes)):
                op = order[at[worker]]
                if rendezvous and op.kind is Kind.REDUCE and not all_there(op, worker, orders, at, pipes):
                    break
                done.add(op)
                at[worker] += 1
                moved = True
    return len(done) == sum(map(len, orders))


def all_there(op, worker, orders, at, pipes):
    """Whether all that share this all-reduce have come to it."""
    for pipe, placement in enumerate(pipes):
        other = placement[op.stage]
        if other != worker and at[other] < orders[other].index(op._replace(pipe=pipe)):
            return False
    return True


def same_sequence(orders, pipes):
    sequences = {}
    for order in orders:
        mine = {}
        for op in order:
            if op.kind is Kind.REDUCE:
                sharers = frozenset(pipe[op.stage] for pipe in pipes)
                mine.setdefault(sharers, []).append(op.stage)
        for sharers, stages in mine.items():
            if sequences.setdefault(sharers, stages) != stages:
                return False
    return True


@settings(max_examples=400, deadline=None)
@given(
    scheme=st.sampled_from([scheme for scheme in SCHEMES if scheme not in ("pipedream", "pipedream_2bw")]),
    depth=st.sampled_from([2, 4]),
    micro_batches=st.integers(1, 7),
    sync=st.sampled_from(["lazy", "eager", "eager_opt"]),
    how=st.sampled_from(["swap", "swap", "swap near", "swap near", "drop", "double", "move"]),
    data=st.data(),
)
def test_a_spoilt_schedule_is_still_valid_or_refused_for_the_right_reason(
    scheme, depth, micro_batches, sync, how, data
):
    good = build(scheme, depth, micro_batches, sync=sync)
    asked_for = Counter(op for order in good.orders for op in order)
    orders = [list(order) for order in good.orders]
    worker = data.draw(st.integers(0, depth - 1))
    at = data.draw(st.integers(0, len(orders[worker]) - 1))
    other = data.draw(st.integers(0, depth - 1)) if how == "swap" else worker
    there = data.draw(st.integers(0, len(orders[other]) - 1))
    if how == "swap near":
        there = max(at - 1 - there % 3, 0)
    if how.startswith("swap"):
        orders[worker][at], orders[other][there] = orders[other][there], orders[worker][at]
    elif how == "drop":
        del orders[worker][at]
    elif how == "double":
        orders[worker].insert(there, orders[worker][at])
    else:
        orders[worker].insert(there, orders[worker].pop(at))
    spoilt = with_orders(good, orders)
    reason = why_not(spoilt, asked_for)
    if reason is None:
        check(spoilt)
    elif reason == "is missing":
        with pytest.raises(ScheduleError, match=r"is missing|nothing asks for it|does nothing at all"):
            check(spoilt)
    else:
        with pytest.raises(ScheduleError, match=reason):
            check(spoilt)


def test_an_error_names_worker_op_and_neighbours_and_points_at_the_fault():
    good = build("1f1b", 3, 4)
    orders = [list(order) for order in good.orders]
    orders[1].insert(3, orders[1][1])
    with pytest.raises(ScheduleError) as raised:
        check(with_orders(good, orders))
    first, *rows = str(raised.value).splitlines()
    assert first == "1f1b: worker 1, 1F1 (after 1B0, before 1F2): it has done 1F1 before, 2 ops earlier"
    assert rows == [
        "  worker 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 ...",
        "                        v",
        "  worker 1: 1F0 1F1 1B0 1F1 1F2 1B1 1F3 ...",
        "  worker 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 ...",
    ]
    assert rows[1].index("v") == rows[2].index("1F1 1F2")


def test_a_deadlock_names_the_ring():
    good = build("1f1b", 2, 3)
    orders = [list(order) for order in good.orders]
    orders[0][1], orders[0][2] = orders[0][2], orders[0][1]
    orders[1][1], orders[1][2] = orders[1][2], orders[1][1]
    with pytest.raises(Deadlock, match="worker 0 is at 0B0 and waits for 1B0, worker 1 is at 1F1 and waits for 0F1"):
        check(with_orders(good, orders))


def test_collectives_start_in_one_order():
    good = build("chimera", 4, 4, sync="lazy")
    orders = [list(order) for order in good.orders]
    reduces = [at for at, op in enumerate(orders[2]) if op.kind is Kind.REDUCE]
    orders[2][reduces[0]], orders[2][reduces[1]] = orders[2][reduces[1]], orders[2][reduces[0]]
    with pytest.raises(ScheduleError, match="worker 1, with which it shares it, starts 2R0@1 first"):
        check(with_orders(good, orders))


def test_a_flush_is_not_overtaken():
    """In two steps of a flush, no forward of the second comes before the update of the first."""
    good = repeat(build("1f1b", 2, 2), 2)
    orders = [list(order) for order in good.orders]
    update = next(at for at, op in enumerate(orders[0]) if op.kind is Kind.UPDATE)
    orders[0].insert(update, orders[0].pop(update + 1))
    with pytest.raises(ScheduleError, match="it comes after 0 updates of its stage, not after 1"):
        check(with_orders(good, orders))


def test_memory_beyond_what_the_scheme_states():
    greedy = replace(build("gpipe", 2, 8), scheme="1f1b")
    with pytest.raises(ScheduleError, match=r"worker 0, 0F2 .*: it is the 3\. activation held at once, .* allows 2"):
        check(greedy)


def test_placements_that_make_no_sense():
    for pipes in ((0, 1), (1,)), ((0, 7),), ((0, -1),):
        with pytest.raises(ScheduleError):
            check(replace(build("gpipe", 2, 2), pipes=pipes))
    with pytest.raises(ScheduleError, match="there is no such stage"):
        check(Schedule("x", ((0,),), ((Op(Kind.FORWARD, 0, 3, 0),),)))


@pytest.mark.parametrize("scheme", ["pipedream", "pipedream_2bw"])
def test_a_stream_whose_updates_come_too_late_is_refused(scheme):
    schedule = build(scheme, 2, 8)
    late = (sorted(order, key=lambda op: op.kind is Kind.UPDATE) for order in schedule.orders)
    with pytest.raises(ScheduleError, match=r"updates of its stage, not after"):
        check(replace(schedule, orders=tuple(map(tuple, late))))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0,0U0\n1F0,1B0,1U0", "0R0 is missing"),
        ("0F0,0F0@1,0B0,0B0@1", "micro-batch 0 goes down pipeline"),
        ("0F0,0I0,0B0,0W0", "its backward is split too"),
        ("0" * 200_000, "no table of ops"),
    ],
)
def test_the_reason_is_the_right_one(text, reason):
    with pytest.raises(InputError, match=reason):
        loads(text)
