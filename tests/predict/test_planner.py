"""The search finds what simulating everything finds; its bounds are bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, Link
from chimera_mpi.predict.anatomy import anatomy
from chimera_mpi.predict.bounds import least_steady_step_s, least_step_s, posts
from chimera_mpi.predict.estimate import Choice, costs_of, estimate, stepped
from chimera_mpi.predict.machine import AllReduce, Compute, Level, Machine, Optimizer, Overlap, Point
from chimera_mpi.predict.planner import SYNCHRONOUS, Space, batches, choices, needed_bytes, search
from chimera_mpi.predict.work import LayerWork, Work
from chimera_mpi.schedule import SCHEMES, STREAMS, ScheduleError, build
from chimera_mpi.schedule.schemes import LIVE
from chimera_mpi.schedule.timing import makespan


def machine(memory_bytes: float = 1e12, busy: float = 0.1, blocks: bool = False) -> Machine:
    """A call costs a quarter of a second, 1e9 FLOPs one more; a gradient of 1e6 numbers a second and a bit."""
    point = Point("block", 1, 1.25, 2.25, None, None, 1e9, 2e9, 1e6)
    return Machine(
        name="drawing-board",
        source="made up",
        memory_bytes=memory_bytes,
        workers_per_node=2,
        compute=Compute((point, replace(point, samples=4, forward_s=4.25, backward_s=8.25))),
        link=Link(0.01, 1e-7),
        node_link=Link(0.005, 3e-8),
        allreduce=AllReduce(Level(0.01, 2e-7)),
        overlap=Overlap(busy, sends_block=blocks, allreduces_queue=not blocks),
        optimizer=Optimizer(0.01, 1e-7, 1e-6),
    )


def model(layers: int, seed: int) -> Work:
    """Of uneven layers, the last one heavy."""
    chance = random.Random(seed)
    weights = [chance.uniform(0.5, 1.5) for _ in range(layers - 1)] + [3.0]
    return Work(
        layers=tuple(
            LayerWork("block", int(1e6 * w), 1e9 * w, 2e9 * w, 1e6, 1e6, 8e6 * w, 9e6 * w, 2e6 * w) for w in weights
        ),
        parameter_bytes=4,
        master_bytes=0,
        gradient_bytes=4,
        state_bytes=8,
    )


# ---- bounds


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_step_is_shorter_than_its_bound(scheme: str) -> None:
    chance = random.Random(scheme)
    for depth in 2, 3, 4, 6:
        for micro_batches in 1, 2, depth, depth + 1, 3 * depth, 4 * depth:
            try:
                schedule = build(scheme, depth, micro_batches, sync=chance.choice(["lazy", "eager", "eager_opt"]))
            except ScheduleError:
                continue
            costs = drawn(schedule.stages, chance)
            live = LIVE[scheme](schedule)
            of = posts(build(scheme, depth, 2 * depth if scheme in STREAMS else 1), costs)
            least_s = least_step_s(of, micro_batches, live) if schedule.updates == 1 else 0
            assert least_s <= makespan(schedule, costs) * (1 + 1e-9), (depth, micro_batches)


def drawn(stages: int, chance: random.Random) -> Costs:
    """Uneven stages, messages that take long, all-reduces that keep their worker busy."""

    def some(most: float) -> list[float]:
        return [chance.uniform(0, most) for _ in range(stages)]

    forward, backward = some(2), some(4)
    split = {"input_s": [b / 3 for b in backward], "weight_s": [2 * b / 3 for b in backward]}
    return Costs(
        forward, backward, **(split if chance.random() < 0.5 else {}), transfer_s=some(chance.choice([0, 0.1, 3])),
        allreduce_s=some(chance.choice([0, 5, 90])), update_s=some(0.5), recompute=chance.random() < 0.5, groups=2,
        allreduce_busy=chance.choice([0, 0.3]), sends_block=chance.random() < 0.3,
        allreduces_queue=chance.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("scheme", "micro_batches"), [("pipedream", 1), ("pipedream_2bw", 4), ("pipedream_2bw", 7)])
def test_nor_is_a_step_of_a_stream(scheme: str, micro_batches: int) -> None:
    work, board = model(9, 0), machine()
    choice = Choice(scheme, 4, 2, 2, micro_batches)
    steps = stepped(choice)
    costs = costs_of(work, board, choice, steps[-1][1])
    of = posts(steps[-1][1], costs)
    least_s = least_steady_step_s(of, micro_batches, 4, 1)
    step_s = estimate(work, board, choice).step_s
    assert 0.6 * step_s < least_s <= step_s * (1 + 1e-9)


def test_the_bound_of_1f1b_is_its_closed_form() -> None:
    for depth, micro_batches in (4, 4), (4, 9), (7, 20):
        of = posts(build("1f1b", depth, 1), Costs(1, 2))
        assert least_step_s(of, micro_batches, depth) == 3 * (micro_batches + depth - 1)


# ---- the search


@pytest.mark.parametrize(("schemes", "alone"), [(("chimera", "zb_h1"), "zb_h1"), (("gems", "1f1b"), "1f1b")])
def test_a_worker_by_itself_has_the_first_scheme_that_can(schemes: tuple[str, ...], alone: str) -> None:
    found = choices(model(4, 0), machine(), 2, 4, Space(schemes=schemes))
    assert {choice.scheme for choice in found if choice.depth == 1} == {alone}
    assert {choice.scheme for choice in found if choice.depth == 2} == set(schemes)


def test_what_is_to_be_recomputed_may_be_named() -> None:
    """A few layers at a time, whatever the depth; of what is alike, one."""

    def found(*asked: str | int) -> dict[int, list[str | int]]:
        space = Space(("1f1b",), recompute=asked, syncs=("eager",), partitions=("uniform",), micro_batch_size=1)
        of = choices(model(16, 0), machine(), 16, 16, space)
        return {depth: [choice.recompute for choice in of if choice.depth == depth] for depth in (2, 8, 16)}

    assert found(3) == {2: [3], 8: [3], 16: [3]}
    assert found("layer") == {2: ["layer"], 8: ["layer"], 16: ["layer"]}
    everything = found("none", "stage", "layer", "layers")
    assert everything == {2: ["none", "stage", "layer", 3], 8: ["none", "stage", "layer"], 16: ["none", "stage"]}


def simulated(work: Work, board: Machine, workers: int, mini_batch: int, space: Space) -> list[float]:
    """The best step of each scheme, depth and micro-batch size that fits, by simulating all that there is."""
    best: dict[tuple, float] = {}
    for choice in choices(work, board, workers, mini_batch, space):
        if needed_bytes(work, choice) <= board.memory_bytes:
            steps = stepped(choice)
            costs = costs_of(work, board, choice, steps[-1][1])
            row = choice.scheme, choice.depth, choice.micro_batch_size
            step_s = sum(weight * makespan(schedule, costs) for weight, schedule in steps)
            best[row] = min(best.get(row, step_s), step_s)
    return sorted(best.values())


SPACES = {
    "synchronous": Space(schemes=SYNCHRONOUS, recompute=("none", "layer"), partitions=("balanced",)),
    "few schemes": Space(schemes=("1f1b", "chimera", "interleaved", "zb_h1")),
    "streams": Space(schemes=("1f1b", "pipedream", "pipedream_2bw", "gpipe"), recompute=("none", "stage")),
    "sharded": Space(schemes=("gems", "chimera", "hanayo"), sharded=True),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("workers", "mini_batch", "memory_bytes", "busy"),
    [(4, 6, 1e12, 0), (4, 8, 3e8, 0.1), (6, 7, 2e8, 0.2), (3, 5, 4e8, 0)],
)
def test_the_search_finds_what_simulating_everything_finds(
    space: str, workers: int, mini_batch: int, memory_bytes: float, busy: float
) -> None:
    work, board = model(9, workers), machine(memory_bytes, busy, blocks=workers == 6)
    everything = simulated(work, board, workers, mini_batch, SPACES[space])
    assert everything
    for keep in 1, 5:
        outcome = search(work, board, workers, mini_batch, SPACES[space], keep)
        assert [found.step_s for found in outcome.best] == pytest.approx(everything[:keep], rel=1e-9)
        assert all(needed_bytes(work, found.choice) <= memory_bytes for found in outcome.best)
    if outcome.rival:
        only = simulated(work, board, workers, mini_batch, replace(SPACES[space], schemes=("1f1b",)))
        assert outcome.rival.step_s == pytest.approx(only[0], rel=1e-9)


def test_it_simulates_few() -> None:
    outcome = search(model(18, 1), machine(3e8), 8, 32)
    assert outcome.simulated < outcome.considered / 4


def test_the_nearest_that_does_not_fit_is_faster_and_too_large() -> None:
    work, board = model(9, 2), machine(2.5e8)
    outcome = search(work, board, 4, 16)
    assert outcome.unfit
    found, lacking = outcome.unfit
    assert needed_bytes(work, found.choice) - board.memory_bytes == pytest.approx(lacking) and lacking > 0
    assert found.step_s < outcome.best[0].step_s
    more = search(work, replace(board, memory_bytes=board.memory_bytes + lacking), 4, 16)
    assert more.best[0].step_s <= found.step_s


def test_where_nothing_fits_the_least_need_is_named() -> None:
    work, board = model(9, 3), machine(1e6)
    least = min(needed_bytes(work, choice) for choice in choices(work, board, 4, 8))
    with pytest.raises(InputError, match=f"need at least {least / 1e6:.3g} MB .* and it has 1 MB") as error:
        search(work, board, 4, 8)
    assert "\n" not in str(error.value)
    fits = replace(board, memory_bytes=least)
    assert needed_bytes(work, search(work, fits, 4, 8).best[0].choice) == pytest.approx(least)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7])
def test_any_number_of_workers_has_a_plan(workers: int) -> None:
    outcome = search(model(9, 4), machine(), workers, 11)
    assert {found.choice.workers for found in outcome.best} == {workers}


def test_what_cannot_be_chosen_is_refused_with_numbers() -> None:
    with pytest.raises(InputError, match=r"a mini-batch of 2 leaves some of 64 workers without a sample.*8 samples"):
        search(model(9, 4), machine(), 64, 2)
    with pytest.raises(InputError, match=r"try one of \[1, 7\]"):
        search(model(9, 4), machine(), 7, 8, Space(depths=(2,)))
    with pytest.raises(InputError, match="needs an even depth"):
        search(model(9, 4), machine(), 7, 8, Space(schemes=("chimera",), depths=(7,)))


def test_costs_do_not_grow_with_the_workers() -> None:
    space = Space(depths=(8,))
    few, many = (search(model(9, 5), machine(), 8 * width, 8 * width, space) for width in (2, 2**14))
    assert many.considered == few.considered and many.simulated <= 2 * few.simulated


@pytest.mark.parametrize("scheme", SCHEMES)
def test_micro_batches_hold_the_mini_batch(scheme: str) -> None:
    for mini_batch in 1, 2, 7, 12, 97, 509, 512:
        for width in (1, 2, 3, 64):
            if width <= mini_batch:
                found = batches(scheme, mini_batch, width)
                assert found
                for size, number in found:
                    assert width * number <= mini_batch <= width * number * size < mini_batch + width * number
                assert all(
                    batch.size <= 2 for batch in batches(scheme, mini_batch, width, Space(largest_micro_batch=2))
                )


# ---- where the seconds go


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_parts_of_a_step_add_up(scheme: str) -> None:
    work, board = model(18, 6), machine(busy=0.2)
    for micro_batches, recompute in (4, "none"), (8, "stage"), (80, "none"):
        choice = Choice(scheme, 4, 2, 1, micro_batches, recompute)
        parts = anatomy(work, board, choice)
        assert parts.step_s == pytest.approx(estimate(work, board, choice).step_s, rel=1e-9)
        assert (parts.recompute_s > 0) == (recompute != "none")
        assert min(parts) >= -1e-9 or scheme in STREAMS
