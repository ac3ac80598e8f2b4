"""The makespans that the papers give, exactly, in integers and fractions."""

from fractions import Fraction

import pytest

from chimera_mpi.predict import Costs, peak_activations, simulate
from chimera_mpi.schedule import Kind, build

DEPTHS = (2, 3, 4, 5, 7, 8, 12, 16, 24, 32)
EVEN = tuple(depth for depth in DEPTHS if depth % 2 == 0)
PASSES = [(1, 1), (1, 2), (1, 3), (Fraction(3, 7), Fraction(10, 11))]


def counts(depth):
    """Numbers of micro-batches up to 8 * depth, few for deep pipelines."""
    return sorted({1, depth - 1, depth, depth + 1, 8 * depth} - {0}) if depth <= 8 else [1, depth + 1]


def makespan(scheme, depth, micro_batches, costs, **options):
    return simulate(build(scheme, depth, micro_batches, **options), costs).makespan_s


@pytest.mark.parametrize("depth", DEPTHS)
def test_gpipe_dapple_naive_and_gems(depth):
    for micro_batches in counts(depth):
        for f, b in PASSES:
            costs = Costs(forward_s=f, backward_s=b)
            for scheme in "gpipe", "1f1b":
                timeline = simulate(build(scheme, depth, micro_batches), costs)
                assert timeline.makespan_s == (micro_batches + depth - 1) * (f + b)
            assert makespan("naive", depth, micro_batches, costs) == micro_batches * depth * (f + b)
            if f <= b:
                expected = depth * f + micro_batches * depth * b + (micro_batches - 1) * f
                assert makespan("gems", depth, micro_batches, costs) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_bubble_ratios_of_table_2(depth):
    for n in counts(depth):
        for scheme in "gpipe", "1f1b":
            ratio = simulate(build(scheme, depth, n), Costs(Fraction(1), Fraction(2))).bubble_ratio
            assert ratio == Fraction(depth - 1, n + depth - 1)
        assert simulate(build("naive", depth, n), Costs(Fraction(1), Fraction(2))).bubble_ratio == Fraction(
            depth - 1, depth
        )


@pytest.mark.parametrize("depth", EVEN)
def test_chimera_direct(depth):
    for units in 1, 2, 3, 8 if depth <= 12 else 4:
        for f, b in [*PASSES[:-1], (Fraction(3, 7), Fraction(9, 7))]:
            timeline = simulate(build("chimera", depth, units * depth), Costs(forward_s=f, backward_s=b))
            one = depth * f + (2 * depth - 2) * b
            assert timeline.makespan_s == one + (units - 1) * (depth * (f + b) + (depth - 2) * (b - f))
            if units == 1 and f < b:
                passes = timeline.on_critical_path(Kind.FORWARD), timeline.on_critical_path(Kind.BACKWARD)
                assert passes == (depth, 2 * depth - 2)


@pytest.mark.parametrize("depth", EVEN)
def test_chimera_with_equal_passes(depth):
    for n in depth, 2 * depth, 4 * depth:
        ratio = simulate(build("chimera", depth, n), Costs(Fraction(1), Fraction(1))).bubble_ratio
        assert ratio == Fraction(depth - 2, 2 * n + depth - 2)
    for f in range(1, depth // 2 + 1):
        if depth % (2 * f) == 0:
            ratio = simulate(build("chimera", depth, depth, pairs=f), Costs(Fraction(1), Fraction(1))).bubble_ratio
            assert ratio == Fraction(depth - 2 * f, 2 * f * depth + depth - 2 * f)


@pytest.mark.parametrize("depth", EVEN)
def test_chimera_doubling(depth):
    for units in 1, 2, 4 if depth <= 12 else 3:
        n = 2 * units * depth
        for f in 1, Fraction(5, 3):
            costs = Costs(forward_s=f, backward_s=2 * f)
            assert makespan("chimera", depth, n, costs, concat="doubling") == (n + Fraction(depth, 2) - 1) * 3 * f


def test_the_papers_own_checks():
    costs = Costs(forward_s=1, backward_s=2)
    four = {scheme: makespan(scheme, 4, 4, costs) for scheme in ("gpipe", "1f1b", "gems", "chimera")}
    assert four == {"gpipe": 21, "1f1b": 21, "gems": 39, "chimera": 16}
    assert makespan("chimera", 4, 8, costs) == 30
    assert makespan("chimera", 4, 8, costs, concat="doubling") == 27
    assert [makespan(scheme, 8, 8, Costs(1, 2)) for scheme in ("1f1b", "chimera", "zb_h1", "chimera_zb")] == [
        45,
        36,
        31,
        27,
    ]


@pytest.mark.parametrize("depth", DEPTHS)
def test_interleaved(depth):
    for chunks in 1, 2, 3:
        for f, b in (1, 2), (Fraction(3, 7), Fraction(10, 11)):
            costs = Costs(forward_s=Fraction(f) / chunks, backward_s=Fraction(b) / chunks)
            for n in depth, 3 * depth if depth <= 16 else depth:
                expected = n * (f + b) + (depth - 1) * Fraction(f + b) / chunks
                assert makespan("interleaved", depth, n, costs, chunks=chunks) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_interleaved_with_a_split_backward(depth):
    """A stage is one of `chunks` parts, and the bubble of `zb_h1` one of those of a part."""
    for chunks in 1, 2, 3:
        for f, i, w in (1, 1, 1), (2, 3, 1), (5, 7, 2), (1, 2, 1):
            costs = Costs(forward_s=f, backward_s=i + w, input_s=i, weight_s=w)
            for n in depth, 3 * depth if depth <= 16 else depth:
                schedule = build("interleaved_zb", depth, n, chunks=chunks)
                assert simulate(schedule, costs).makespan_s == chunks * n * (f + i + w) + (depth - 1) * (f + i - w)
                assert max(peak_activations(schedule)) == chunks * depth
    ratio = simulate(build("interleaved_zb", depth, depth, chunks=3), Costs(Fraction(1), Fraction(2))).bubble_ratio
    assert ratio == Fraction(depth - 1, 9 * depth + depth - 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_zero_bubble(depth):
    n = 3 * depth
    for f, i, w in (1, 1, 1), (2, 3, 1), (5, 7, 2), (1, 2, 1):
        costs = Costs(forward_s=f, backward_s=i + w, input_s=i, weight_s=w)
        work = n * (f + i + w)
        assert makespan("zb_h1", depth, n, costs) == work + (depth - 1) * (f + i - w)
        rows = simulate(build("zb_h2", depth, n), costs).rows
        longest = max(row[-1].end_s - row[0].start_s for row in rows)
        assert longest == work + (depth - 1) * max(f + i - 2 * w, 0)


@pytest.mark.parametrize("depth", EVEN)
def test_dualpipe(depth):
    n = 2 * depth
    assert makespan("dualpipe", depth, n, Costs(1, 2)) == 3 * n + (depth // 2 - 1) * (3 + 2 - 3)
    assert makespan("dualpipe_v", depth, n, Costs(Fraction(1, 2), 1)) == makespan("zb_h1", depth, n, Costs(1, 2))


@pytest.mark.parametrize("depth", range(2, 33, 2))
def test_chimera_zb_reaches_its_bound_in_the_memory_of_1f1b(depth):
    for units in 1, 2, 3, 4 if depth > 8 else 16:
        n = units * depth
        for pairs in (f for f in range(1, depth // 2 + 1) if depth % (2 * f) == 0 and units * f <= 16):
            schedule = build("chimera_zb", depth, n, pairs=pairs)
            assert simulate(schedule).makespan_s == 3 * n + depth // (2 * pairs) - 1
            assert max(peak_activations(schedule)) <= depth


def test_chimera_zb_at_the_size_of_the_statement():
    assert makespan("chimera_zb", 8, 8, Costs()) == 27
    assert makespan("chimera_zb", 16, 64, Costs()) == 199


@pytest.mark.parametrize("depth", DEPTHS)
def test_v_placements(depth):
    """In half stages: no bubble but the ramp for ZB-V, about a half and two thirds of 1F1B's for its siblings."""
    n = 4 * depth
    assert makespan("zb_v", depth, n, Costs()) == 6 * n + depth - 1
    bubble_1f1b = 6 * (depth - 1)
    for scheme, share in ("v_half", 2 / 3), ("v_min", 3 / 4):
        assert makespan(scheme, depth, n, Costs()) - 6 * n <= share * bubble_1f1b


@pytest.mark.parametrize("depth", DEPTHS)
def test_hanayo(depth):
    for waves in 1, 2, 4:
        part = Fraction(1, 2 * waves)
        for n in depth, 2 * depth:
            schedule = build("hanayo", depth, n, waves=waves)
            ratio = simulate(schedule, Costs(part, part)).bubble_ratio
            assert ratio == Fraction(depth - 1, 2 * waves * n + depth - 1)
            assert max(peak_activations(schedule)) == 2 * waves * depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_live_activations_of_long_steps(depth):
    """In stages, of the worker that has most: what the README's table says."""
    n = 4 * depth
    said = {
        "naive": 1, "gpipe": n, "1f1b": depth, "gems": 1, "pipedream": depth, "pipedream_2bw": depth,
        "interleaved": depth + Fraction(depth - 1, 2), "hanayo": depth, "interleaved_zb": depth, "zb_h1": depth,
        "zb_h2": 2 * depth - 1,
        "zb_v": depth, "v_half": Fraction(depth, 2) + 1, "dualpipe": depth, "dualpipe_v": depth,
        "chimera": depth, "chimera_zb": depth,
    }  # fmt: skip
    for scheme, live in said.items():
        if depth % 2 == 0 or scheme not in ("chimera", "chimera_zb", "dualpipe"):
            schedule = build(scheme, depth, n)
            stages = Fraction(max(peak_activations(schedule)) * depth, schedule.stages)
            assert stages <= live and stages > live - 1, scheme
    assert max(peak_activations(build("v_min", depth, n))) <= 2 + -(-2 * depth // 3)


def test_more_waves_less_bubble():
    times = [
        makespan("hanayo", 8, 8, Costs(Fraction(1, 2 * waves), Fraction(1, waves)), waves=waves) for waves in (1, 2, 4)
    ]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
