"""Memory of split backwards, against counts by hand."""

from fractions import Fraction

import pytest

from chimera_mpi.predict import Costs, memory_curve, peak_bytes, simulate
from chimera_mpi.schedule import SCHEMES, Kind, build

SPLIT = [s for s in SCHEMES if any(op.kind is Kind.WEIGHT for order in build(s, 2, 2).orders for op in order)]


def peaks(timeline, *sizes, **more):
    return [level.size_bytes for level in peak_bytes(timeline, *sizes, **more)]


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
def test_zb_h1_defers_more_weight_gradients_the_later_the_stage(depth):
    """Stage s has s micro-batches deferred and the others of `depth` whole after its forward, one more after its I."""
    timeline = simulate(build("zb_h1", depth, 3 * depth), Costs(2, 4))
    assert peaks(timeline, 10, deferred_bytes=3) == [3 * s + 10 * (depth - s) for s in range(depth)]
    assert peaks(timeline, 10, deferred_bytes=17) == [17 * (s + 1) + 10 * (depth - 1 - s) for s in range(depth)]


def test_zb_v_by_hand():
    """Worker 0 begins F0 F1 f0 i0 f1 i1 I0 w0, worker 1 F0 f0 F1 f1 i0 I0 i1 I1 w0; f, i, w are of the later stage."""
    timeline = simulate(build("zb_v", 2, 4), Costs(2, 4))
    assert peaks(timeline, 10, deferred_bytes=3) == [10 + 10 + 10 - 7 + 10, 40]
    assert peaks(timeline, 10, deferred_bytes=17) == [40 + 3 * 7, 4 * 17]
    activations, deferred = [10, 20, 30, 40], [5, 2, Fraction(1, 3), Fraction(81, 2)]
    assert peaks(timeline, activations, deferred_bytes=deferred) == [20 + 2 * Fraction(81, 2), 20 + 30 + 20 + 30]
    working = [0, Fraction(1, 7), 5, 7]
    assert peaks(timeline, activations, 1, deferred, working) == [2 + 20 + Fraction(81, 2) + 40 + 7, 2 + 100 + 5]


def test_chimera_zb_by_hand():
    """Worker 0 begins F0 F1 f2 i2 f3 i3 I0 w2, worker 1 F0 f2 F1 f3 i2 I0 i3 I1 w2; f, i, w are of the other pipe."""
    timeline = simulate(build("chimera_zb", 4, 4), Costs(2, 4))
    assert peaks(timeline, 10, deferred_bytes=3) == [33, 40, 40, 33]
    assert peaks(timeline, 10, deferred_bytes=17) == [61, 68, 68, 61]


@pytest.mark.parametrize("scheme", SPLIT)
def test_by_default_all_is_kept_until_the_weight_gradient(scheme):
    timeline = simulate(build(scheme, 4, 8), Costs(2, 4))
    sizes = [Fraction(stage + 1, 3) for stage in range(timeline.schedule.stages)]
    assert memory_curve(timeline, sizes) == memory_curve(timeline, sizes, deferred_bytes=sizes)
    assert all(curve[-1].size_bytes == 0 for curve in memory_curve(timeline, sizes, 0, 5, Fraction(1, 7)))


def test_a_backward_at_work_needs_more_as_long_as_it_lasts():
    """GPipe holds all it ever holds when its first backward starts."""
    timeline = simulate(build("gpipe", 2, 3), Costs(1, 2))
    (first, _) = memory_curve(timeline, 10, 100, working_bytes=4)
    assert [level.size_bytes for level in first] == [100, 110, 120, 130, 134, 120, 124, 110, 114, 100]
    assert [level[:] for level in peak_bytes(timeline, 10, 100, working_bytes=4)] == [(6, 134), (4, 134)]
