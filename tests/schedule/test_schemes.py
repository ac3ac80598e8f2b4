"""Laws over the registry, and the orders that papers and drawings give."""

import gc
import inspect
import itertools

import pytest

from chimera_mpi.predict import Costs, peak_activations, simulate, weight_versions
from chimera_mpi.schedule import (
    ALIASES,
    COMPUTE,
    SCHEMES,
    SYNCS,
    Kind,
    ScheduleError,
    build,
    check,
    messages,
    repeat,
    used_versions,
)
from chimera_mpi.schedule import schemes as module
from chimera_mpi.schedule.schemes import LIVE, STREAMS

OPTIONS = {
    "chimera": [{}, {"concat": "doubling"}, {"concat": "halving"}, {"pairs": 2}, {"pairs": 2, "concat": "doubling"}],
    "chimera_zb": [{}, {"pairs": 2}],
    "interleaved": [{}, {"chunks": 1}, {"chunks": 3}],
    "interleaved_zb": [{}, {"chunks": 1}, {"chunks": 3}],
    "hanayo": [{}, {"waves": 2}],
    "pipedream_2bw": [{}, {"every": 9}],
}
VARIANTS = [(scheme, options) for scheme in SCHEMES for options in OPTIONS.get(scheme, [{}])]


def shapes(scheme, options, depths=range(1, 9)):
    """All small shapes that a scheme does not refuse, built."""
    for depth in depths:
        for micro_batches in sorted({1, 2, 3, depth - 1, depth, depth + 1, 2 * depth, 2 * depth + 1, 5 * depth} - {0}):
            try:
                yield depth, micro_batches, build(scheme, depth, micro_batches, **options)
            except ScheduleError as error:
                assert "try" in str(error), error


@pytest.mark.parametrize(("scheme", "options"), VARIANTS)
def test_every_shape_is_sound(scheme, options):
    built = 0
    for depth, micro_batches, schedule in shapes(scheme, options):
        check(schedule)
        assert schedule.micro_batches == micro_batches and schedule.depth == depth and schedule.scheme == scheme
        assert sum(len(share) for share in schedule.shares.values()) == micro_batches
        built += 1
    assert built >= 16


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(("scheme", "options"), VARIANTS)
def test_every_sync_is_sound(scheme, options, sync):
    for depth, micro_batches in (4, 6), (8, 16):
        try:
            schedule = build(scheme, depth, micro_batches, sync=sync, **options)
        except ScheduleError:
            continue
        assert {op.kind for order in check(schedule).orders for op in order} >= {Kind.REDUCE, Kind.UPDATE}


@pytest.mark.parametrize(("scheme", "options"), VARIANTS)
def test_memory_is_within_what_the_scheme_states(scheme, options):
    for _, _, schedule in shapes(scheme, options, depths=(1, 2, 3, 4, 6, 12)):
        assert max(peak_activations(schedule)) <= LIVE[scheme](schedule)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_steps_follow_each_other_without_a_barrier(scheme):
    once = build(scheme, 4, 8)
    often = check(repeat(once, 3))
    assert often.micro_batches == 24 and often.updates == 3 * once.updates
    assert often.update_of(8) == once.updates and often.update_of(7) == once.updates - 1
    assert simulate(often).makespan_s <= 3 * simulate(once).makespan_s


@pytest.mark.parametrize(("scheme", "options"), VARIANTS)
def test_each_micro_batch_passes_every_boundary_twice(scheme, options):
    schedule = build(scheme, 4, 8, **options)
    crossings = sum(message.source != message.target for message in messages(schedule))
    borders = sum(a != b for a, b in itertools.pairwise(schedule.pipes[0]))
    assert crossings == 2 * 8 * borders


def drawings():
    for name, function in inspect.getmembers(module, inspect.isfunction):
        rows = [line.split() for line in (function.__doc__ or "").splitlines() if line.strip().startswith("P")]
        if rows and rows[0][0] == "P0":
            yield name, [[cell for cell in row[1:] if len(cell) == 2 and cell[1].isdigit()] for row in rows]


def words(schedule, worker):
    """The compute ops of a worker as they are drawn."""
    places = schedule.places(worker)
    later = {place for place in places if (place[0], place[1] - schedule.depth) > (place[0], -1) and len(places) > 1}
    several = len(schedule.pipes) == 1
    for op in schedule.orders[worker]:
        if op.kind in COMPUTE:
            word = f"{op.kind.value}{op.index}"
            yield word.lower() if several and op.place in later else word


@pytest.mark.parametrize(("name", "rows"), list(drawings()))
def test_the_drawing_is_the_order(name, rows):
    micro_batches = len({cell[1] for cell in rows[0]})
    scheme = {"one_f_one_b": "1f1b", "doubled_unit": "chimera"}.get(name, name)
    options = {"concat": "doubling"} if name == "doubled_unit" else {}
    schedule = build(scheme, len(rows), micro_batches, **options)
    assert rows == [list(words(schedule, worker)) for worker in range(schedule.depth)]


def test_every_scheme_is_drawn():
    drawn = {name for name, _ in drawings()}
    assert {"one_f_one_b" if scheme == "1f1b" else scheme for scheme in SCHEMES} <= drawn


def compute_words(schedule, worker):
    return " ".join(f"{op.kind.value}{op.index}" for op in schedule.orders[worker] if op.kind in COMPUTE)


def test_golden_chimera_with_its_start_times():
    timeline = simulate(build("chimera", 4, 4), Costs(forward_s=1, backward_s=2))
    spans = [
        [f"{s.op.kind.value}{s.op.index}@{s.start_s}" for s in row if s.op.kind in COMPUTE] for row in timeline.rows
    ]
    assert spans[0] == ["F0@0", "F1@1", "F2@3", "B2@4", "F3@6", "B3@7", "B0@10", "B1@14"]
    assert spans[1] == ["F0@1", "F2@2", "F1@3", "F3@4", "B2@6", "B0@8", "B3@10", "B1@12"]
    mirror = str.maketrans("0123", "2301")
    for worker in 2, 3:
        assert spans[worker] == [word[:2].translate(mirror) + word[2:] for word in spans[3 - worker]]


# Written down by hand from the rules of the papers.
GOLDEN = {
    ("gpipe", 3, 3, 1): "F0 F1 F2 B0 B1 B2",
    ("1f1b", 4, 6, 0): "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
    ("1f1b", 4, 6, 2): "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    ("1f1b", 4, 2, 1): "F0 F1 B0 B1",
    ("gems", 4, 3, 1): "F0 B0 F1 B1 F2 B2",
    ("pipedream", 3, 4, 2): "F0 B0 F1 B1 F2 B2 F3 B3",
    ("interleaved", 2, 4, 0): "F0 F1 F0 F1 F2 B0 F3 B1 F2 B0 F3 B1 B2 B3 B2 B3",
    ("zb_h1", 4, 6, 0): "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5",
    ("zb_h1", 4, 6, 3): "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5",
    ("zb_h2", 3, 6, 0): "F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5",
    ("zb_h2", 3, 6, 2): "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
    ("hanayo", 2, 2, 1): "F0 F0 F1 F1 B0 B0 B1 B1",
    ("chimera", 4, 8, 3): "F2 F3 F0 B0 F1 B1 B2 F6 B3 F7 F4 B4 F5 B5 B6 B7",
    ("chimera", 4, 2, 0): "F0 F1 B1 B0",
    ("chimera", 4, 1, 3): "F0 B0",
}


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_orders(key):
    scheme, depth, micro_batches, worker = key
    assert compute_words(build(scheme, depth, micro_batches), worker) == GOLDEN[key]


def test_golden_doubling():
    schedule = build("chimera", 4, 8, concat="doubling")
    assert compute_words(schedule, 0) == "F0 F1 F2 F3 F4 F5 B4 F6 F7 B5 B0 B6 B1 B7 B2 B3"
    assert schedule == build("chimera", 4, 8, concat="halving")
    left_over = compute_words(build("chimera", 4, 12, concat="doubling"), 0)
    assert left_over == "F0 F1 F2 F3 F4 F5 B4 F6 F7 B5 B0 B6 B1 B7 B2 F8 B3 F9 F10 B10 F11 B11 B8 B9"


def test_two_f_pipelines_start_evenly_round_the_ring():
    schedule = build("chimera", 8, 8, pairs=2)
    assert [pipe[0] for pipe in schedule.pipes] == [0, 7, 4, 3]
    assert {len(share) for share in schedule.shares.values()} == {2}


def test_micro_batches_are_shared_evenly():
    for micro_batches in range(1, 9):
        shares = build("chimera", 8, micro_batches, pairs=2).shares
        sizes = [len(shares.get((pipe, 0), ())) for pipe in range(4)]
        assert sum(sizes) == micro_batches and max(sizes) - min(sizes) <= 1


def test_live_activations_of_the_paper():
    assert peak_activations(build("chimera", 8, 8)) == [5, 6, 7, 8, 8, 7, 6, 5]
    assert peak_activations(build("chimera", 8, 16, concat="doubling")) == [13, 14, 15, 16, 16, 15, 14, 13]
    assert peak_activations(build("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert peak_activations(build("gpipe", 4, 8)) == [8] * 4
    assert peak_activations(build("gems", 4, 8)) == [1] * 4
    assert peak_activations(build("zb_h2", 4, 16)) == [7] * 4
    assert max(peak_activations(build("v_half", 32, 64))) == 34  # half stages: 17 of the 32 of 1F1B
    assert max(peak_activations(build("v_min", 32, 64))) == 24


def test_memory_does_not_grow_with_the_micro_batches():
    for scheme in set(SCHEMES) - {"gpipe"}:
        assert peak_activations(build(scheme, 4, 64)) == peak_activations(build(scheme, 4, 16))


def test_weight_versions():
    assert weight_versions(build("pipedream", 4, 12)) == [4, 3, 2, 1]
    assert weight_versions(build("pipedream_2bw", 4, 16)) == [2] * 4
    assert weight_versions(build("chimera", 4, 8)) == [1] * 4
    assert weight_versions(repeat(build("chimera", 4, 8), 3)) == [1] * 4


def test_versions_that_streams_use():
    schedule = build("pipedream", 4, 12)
    for forward, version in used_versions(schedule).items():
        assert version == max(forward.index - (schedule.stages - 1 - forward.stage), 0)
    schedule = build("pipedream_2bw", 4, 16)
    for forward, version in used_versions(schedule).items():
        assert version == max(forward.index // 4 - 1, 0)


def test_streams_share_out_what_is_over():
    schedule = check(build("pipedream_2bw", 4, 11))
    assert schedule.updates == 2 and schedule.shares == {(0, 0): tuple(range(6)), (0, 1): tuple(range(6, 11))}
    assert build("pipedream", 4, 5).shares == {(0, n): (n,) for n in range(5)}
    assert tuple(scheme for scheme in SCHEMES if build(scheme, 4, 8).updates > 1) == STREAMS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chimera", 5, 4), "depth=4 or depth=6"),
        (("chimera_zb", 1, 4), "depth=2"),
        (("dualpipe", 3, 4), "depth=2 or depth=4"),
        (("gpipe", 0, 4), "depth must be at least 1, not 0"),
        (("gpipe", 4, 0), "micro_batches must be at least 1, not 0"),
        (("chimerra", 4, 4), "did you mean 'chimera'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_remedy(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        build(*arguments)


def test_options_that_cannot_be_had():
    with pytest.raises(ScheduleError, match="pairs = 1, 3"):
        build("chimera", 6, 6, pairs=2)
    with pytest.raises(ScheduleError, match="did you mean 'doubling'"):
        build("chimera", 4, 4, concat="doublin")
    with pytest.raises(ScheduleError, match="try every=4"):
        build("pipedream_2bw", 4, 8, every=3)
    with pytest.raises(ScheduleError, match="no option 'chunks'"):
        build("gpipe", 4, 4, chunks=2)
    for scheme, option in ("interleaved", "chunks"), ("hanayo", "waves"):
        with pytest.raises(ScheduleError, match=f"try {option}=2"):
            build(scheme, 4, 4, **{option: 0})


def test_aliases_are_schemes():
    assert {ALIASES[alias] for alias in ALIASES} <= set(SCHEMES)
    assert build("dapple", 4, 8) == build("1f1b", 4, 8)


def test_the_collector_is_only_paused():
    for was_on in True, False, True:
        gc.enable() if was_on else gc.disable()
        simulate(check(build("chimera", 4, 4)))
        with pytest.raises(ScheduleError):
            build("chimera", 3, 4)
        assert gc.isenabled() == was_on


@pytest.mark.parametrize(
    ("scheme", "depth", "options"),
    [("interleaved", 4, {"chunks": 10**8}), ("hanayo", 4, {"waves": 10**8}), ("gpipe", 10**9, {})],
)
def test_what_cannot_be_planned_is_refused_at_once(scheme, depth, options):
    with pytest.raises(ScheduleError, match=r"more than can be planned at once"):
        build(scheme, depth, 4, **options)
