"""`chimera-mpi calibrate`: fits find what is true of synthetic points, and what is measured comes out whole."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from math import log2
from pathlib import Path

import pytest

from chimera_mpi.cli import main
from chimera_mpi.commands._calibrated import charts, doubts, summary
from chimera_mpi.commands.calibrate import effort, measure
from chimera_mpi.config import load
from chimera_mpi.draw.chart_svg import chart_svg
from chimera_mpi.predict.calibrated import (
    ASSUMED_LINK,
    DEVICE,
    DROWSY,
    HOST,
    Found,
    LayerReading,
    MessageReading,
    SumReading,
    UpdateReading,
    calibrated,
    fit_link,
    fit_sums,
)
from chimera_mpi.predict.fit import fit, hidden_share, moved_share
from chimera_mpi.predict.machine import parse_machine, read_machine
from chimera_mpi.runtime.calibration import WAYS
from chimera_mpi.work import work_of

TINY = ["layers=3", "hidden=16", "heads=2", "vocabulary=40", "positions=8", "sequence_length=8", "threads=1"]
SIZES = (16, 4096, 1 << 20, 1 << 24)


def link_points(latency_s, s_per_byte, way=DROWSY, buffers=HOST):
    return tuple(MessageReading(way, buffers, size, latency_s + size * s_per_byte) for size in SIZES)


def sum_points(latency_s, s_per_byte, nodes=1, hidden=None):
    return tuple(
        SumReading(
            r, r if nodes > 1 else 1, size, 2 * log2(r) * latency_s + 2 * (r - 1) / r * size * s_per_byte, hidden
        )
        for r in (2, 3, 8)
        for size in SIZES
    )


def layer_points(kinds=("embedding", "block", "head")):
    return tuple(
        LayerReading(kind, samples, 1e-3 * samples, 2e-3 * samples, 1.1e-3 * samples, 0.9e-3 * samples, 0.02)
        for kind in kinds
        for samples in (1, 2, 4)
    )


def work(*overrides):
    return work_of(load("gpt-tiny", [*TINY, *overrides]))


# ---- fits --------------------------------------------------------------------------------------------------------


def test_fits_find_the_parameters_of_points_that_have_them() -> None:
    link, found = fit_link(link_points(3e-6, 2e-10))
    assert (link.latency_s, link.s_per_byte) == pytest.approx((3e-6, 2e-10), rel=1e-3)
    assert found.largest_error < 1e-9
    level, _ = fit_sums(sum_points(4e-5, 7e-10))
    assert (level.latency_s, level.s_per_byte) == pytest.approx((4e-5, 7e-10), rel=1e-3)


def test_small_and_large_points_count_alike() -> None:
    """Each is 10 % off, one way or the other: no point's error is made up for by that of one which takes longer."""
    points = [p._replace(seconds=p.seconds * (1.1 if at % 2 else 0.9)) for at, p in enumerate(link_points(3e-6, 2e-10))]
    link, found = fit_link(points)
    assert link.latency_s == pytest.approx(3e-6, rel=0.15) and link.s_per_byte == pytest.approx(2e-10, rel=0.15)
    assert 0.05 < found.typical_error < 0.15 and found.largest_error < 0.2


@pytest.mark.parametrize("rows", [[(1.0, 1.0), (1.0, 3.0)], [(1.0, 5.0), (1.0, 5.0)], [(1.0, 0.0)]])
def test_no_coefficient_is_below_zero(rows) -> None:
    found = fit(rows, [3.0, 1.0][: len(rows)])
    assert min(found.coefficients) >= 0 and max(found.coefficients) > 0


def test_nothing_measured_is_no_fit() -> None:
    for rows, seconds in ([], []), ([(1.0, 2.0)], [0.0]):
        with pytest.raises(ValueError, match="no fit"):
            fit(rows, seconds)


def test_shares_of_what_goes_on_under_compute() -> None:
    assert hidden_share(alone_s=2, compute_s=5, together_s=7) == 0
    assert hidden_share(alone_s=2, compute_s=5, together_s=5) == 1
    assert hidden_share(alone_s=2, compute_s=5, together_s=6) == 0.5
    assert hidden_share(alone_s=2, compute_s=5, together_s=9) == 0
    assert moved_share(alone_s=1, compute_s=4, arrived_s=1) == 1
    assert moved_share(alone_s=1, compute_s=4, arrived_s=5) == 0
    assert moved_share(alone_s=1, compute_s=4, arrived_s=3) == 0.5


# ---- the machine of what was found -------------------------------------------------------------------------------


FOUND = Found(
    name="box",
    source='4 ranks on "two" nodes',
    workers_per_node=2,
    memory_bytes=8e9,
    layers=layer_points(),
    updates=tuple(UpdateReading(n, 1e-4 + 2e-9 * n) for n in (1000, 50_000, 10**6)),
    near=(*link_points(2e-6, 1e-10), *link_points(1e-6, 5e-11, "ping-pong")),
    far=link_points(2e-5, 8e-10),
    moved_near=0.9,
    moved_far=0.1,
    slowdown=1.25,
    sums=(*sum_points(1e-5, 2e-10, hidden=0.8), *sum_points(5e-5, 9e-10, nodes=2, hidden=0.25)),
)


def test_a_machine_says_what_was_measured() -> None:
    layers = work().layers
    made = calibrated(FOUND, layers)
    machine = made.machine
    assert (machine.link.latency_s, machine.link.s_per_byte) == pytest.approx((2e-5, 8e-10))
    assert (machine.node_link.latency_s, machine.node_link.s_per_byte) == pytest.approx((2e-6, 1e-10))
    assert machine.overlap.allreduce_busy == pytest.approx(0.75)  # over nodes, not within one
    assert machine.update_s(7e6) == pytest.approx(1e-4 + 2e-9 * 7e6)
    assert machine.allreduce.seconds(1 << 20, 4, 1) == pytest.approx(sum_s(4, 1 << 20, 5e-5, 9e-10))
    assert machine.allreduce.seconds(1 << 20, 2, 2) == pytest.approx(sum_s(2, 1 << 20, 1e-5, 2e-10))
    for layer in layers:
        for samples in (1, 2, 4):
            found = [
                getattr(machine, name)(layer, samples) for name in ("forward_s", "backward_s", "input_s", "weight_s")
            ]
            assert found == pytest.approx([1.25e-3 * samples * share for share in (1, 2, 1.1, 0.9)])
    assert max(of.largest_error for of in made.fits.values()) < 1e-9


def sum_s(replicas, size, latency_s, s_per_byte):
    return 2 * log2(replicas) * latency_s + 2 * (replicas - 1) / replicas * size * s_per_byte


def test_messages_of_a_device_count_from_its_own_buffers() -> None:
    near = (*link_points(1e-6, 1e-10), *link_points(4e-6, 3e-10, buffers=DEVICE))
    machine = calibrated(Found("box", "", 2, 8e9, layer_points(), near=near), work().layers).machine
    assert (machine.node_link.latency_s, machine.node_link.s_per_byte) == pytest.approx((4e-6, 3e-10))


def test_the_file_is_the_machine_and_tells_of_the_fits() -> None:
    made = calibrated(FOUND, work().layers)
    assert parse_machine(made.text, "file") == made.machine
    for table in "[node_link]", "[link]", "[allreduce.node]", "[allreduce.switch]", "[optimizer]":
        assert re.search(rf"{re.escape(table)}\n# fitted to \d+ points: 0 % off typically, 0 % at most\n", made.text)
    assert "# 10 % of a large message between nodes moved while its sender computed" in made.text
    assert "ASSUMED" not in made.text
    assert all("#" in line for line in made.text.splitlines() if re.match(r"\w+_(s|bytes) =", line))


def test_what_was_not_measured_is_said_to_be_assumed() -> None:
    alone = calibrated(Found("laptop", "", 1, 8e9, layer_points()), work().layers)
    assert alone.machine.link == ASSUMED_LINK and alone.machine.node_link is None
    assert parse_machine(alone.text, "file") == alone.machine
    for table in "[link]", "[allreduce.switch]", "[overlap]":
        assert re.search(rf"{re.escape(table)}\n# ASSUMED", alone.text), table
    sums = sum_points(1e-5, 2e-10, hidden=0.5)
    one_node = calibrated(Found("box", "", 2, 8e9, layer_points(), near=FOUND.near, sums=sums), work().layers)
    assert one_node.machine.link == ASSUMED_LINK != one_node.machine.node_link
    for table in "[link]", "[allreduce.switch]":
        assert re.search(rf"{re.escape(table)}\n# ASSUMED, and yours to edit: run on two nodes", one_node.text)
    assert one_node.text.count("ASSUMED") == 2
    assert "[node_link]\n# fitted" in one_node.text


def test_sizes_reach_beyond_what_is_trained_with() -> None:
    assert effort(8, quick=False).samples == (1, 2, 4, 8, 16)
    assert effort(6, quick=False).samples == (1, 2, 4, 6, 8, 16)


# ---- drawing -----------------------------------------------------------------------------------------------------


def test_charts_show_all_points_and_what_fits_them() -> None:
    drawn = charts(FOUND, calibrated(FOUND, work().layers))
    marked = sum(len(series.points) for chart in drawn for series in chart.series if not series.guide)
    assert marked == 2 * 9 + len(FOUND.near) + len(FOUND.far) + len(FOUND.sums)
    root = ElementTree.fromstring(chart_svg(drawn))
    assert sum(element.tag.endswith("circle") for element in root.iter()) == marked
    for chart in drawn[4:]:  # of sums, which the fit meets
        guide, measured = chart.series
        assert guide.guide and guide.points == [(size, pytest.approx(s)) for size, s in measured.points]


# ---- measuring ---------------------------------------------------------------------------------------------------


def test_one_rank_measures_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "machine.toml", tmp_path / "fit.svg"
    assert main(["calibrate", *TINY, "--quick", "-o", str(path), "--svg", str(picture), "--name", "here"]) == 0
    out = capsys.readouterr().out
    machine = read_machine(path)
    assert machine.name == "here" and machine.workers_per_node == 1 and machine.memory_bytes > 1e6
    assert "ASSUMED" in path.read_text() and "ASSUMED" in out and "block" in out
    points = machine.compute.points
    assert [(p.kind, p.samples) for p in points] == [(k, n) for k in ("embedding", "block", "head") for n in (1, 2)]
    assert all(0 < p.forward_s < 1 and 0 < p.backward_s < 1 for p in points)
    assert machine.update_s(10_000) > 0
    ElementTree.fromstring(picture.read_text())


@pytest.mark.mpi(4)
def test_several_ranks_find_one_machine(comm) -> None:
    config = load("bert-tiny", [*TINY, "vocabulary=80"])
    kinds = [layer.kind for layer in work_of(config).layers]
    found = measure(comm, config, kinds, quick=True)
    assert all(other == found for other in comm.allgather(found))
    sizes = effort(1, quick=True)
    assert [(m.way, m.size_bytes) for m in found.near] == [(way, size) for way in WAYS for size in sizes.message_bytes]
    assert [(s.replicas, s.nodes, s.size_bytes) for s in found.sums] == [
        (r, 1, n) for r in (2, 4) for n in sizes.sum_bytes
    ]
    assert not found.far and found.moved_far is None and 0 <= found.moved_near <= 1
    assert all(0 < m.seconds < 10 for m in (*found.near, *found.sums))
    hidden = [s.hidden for s in found.sums]
    assert hidden[0] is hidden[2] is None and 0 <= hidden[1] <= 1 and 0 <= hidden[3] <= 1
    made = calibrated(found, work_of(config).layers)
    assert parse_machine(made.text, "file") == made.machine
    assert len(list(summary(found, made))) == 7 and found.slowdown > 0


def test_what_was_measured_on_a_busy_machine_says_so() -> None:
    assert not list(doubts(FOUND))
    busy = replace(FOUND, layers=tuple(layer._replace(noise=3.3) for layer in FOUND.layers))
    assert "330 % apart typically: something else ran, so calibrate again" in "".join(doubts(busy))


WRONG = {
    "-o/--output": ["calibrate"],
    "cannot write /nowhere/m.toml (No such file or directory): give a path": ["calibrate", "-o", "/nowhere/m.toml"],
    "unknown key 'hiden'": ["calibrate", "hiden=3", "-o", "m.toml"],
    "'gpt-tinny' is neither a preset nor a file": ["calibrate", "gpt-tinny", "-o", "m.toml"],
    "sequence_length=9 is more than positions=8": ["calibrate", *TINY, "sequence_length=9", "-o", "m.toml"],
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line_and_touch_nothing(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(WRONG[message]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())
