"""Machine files, and what a machine says of layers, messages and sums."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Link
from chimera_mpi.predict.machine import (
    AllReduce,
    Compute,
    Law,
    Level,
    Machine,
    Optimizer,
    Overlap,
    Point,
    machine_text,
    machines,
    parse_machine,
    read_machine,
    write_machine,
)
from chimera_mpi.predict.work import Transformer, gpt_work

LAYERS = gpt_work(Transformer(layers=1, hidden=64, heads=4, vocabulary=100, positions=32, sequence_length=32)).layers
BLOCK = LAYERS[1]
SHAPE = {"forward_flops": BLOCK.forward_flops, "backward_flops": BLOCK.backward_flops}

MEASURED = Machine(
    name='a "box"\\ with\nlines',
    source="this test",
    memory_bytes=8e9,
    workers_per_node=4,
    compute=Compute(
        (
            Point("block", 1, 2.0, 4.0, 2.5, 1.5, **SHAPE),
            Point("block", 4, 5.0, 13.0, 7.0, 6.0, **SHAPE),
            Point("embedding", 1, 0.1, 0.2, output_bytes=LAYERS[0].output_bytes),
        )
    ),
    link=Link(1e-3, 1e-9),
    node_link=Link(1e-6, 1e-10),
    allreduce=AllReduce(Level(1e-3, 1e-9), node=Level(1e-6, 1e-10), above=Level(1e-2, 1e-8), nodes_per_switch=16),
    overlap=Overlap(0.25),
    optimizer=Optimizer(0.5, 1e-9),
)


@pytest.mark.parametrize("machine", [MEASURED, replace(MEASURED, node_link=None), *map(read_machine, machines())])
def test_a_file_gives_the_machine_again(machine, tmp_path):
    path = tmp_path / "machine.toml"
    write_machine(machine, path)
    assert read_machine(path) == machine
    values = [line for line in path.read_text().splitlines() if " = " in line]
    assert values and all("  # " in line for line in values)


def test_machines_that_ship():
    assert machines() == ["nvlink-box", "piz-daint", "small-box"]
    for name in machines():
        assert read_machine(name).name == name


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_bytes = 8000000000.0", "", "machine.memory_bytes is missing: usable bytes of one worker"),
        ("memory_bytes = 8000000000.0", "memory_bytes = -1", "machine.memory_bytes=-1 must be from 1 to 1e+18"),
        ("workers_per_node = 4", "workers_per_node = 0", "machine.workers_per_node=0 must be a whole number from 1"),
        ("workers_per_node = 4", "workers_per_node = 1.5", "machine.workers_per_node=1.5 must be a whole number"),
        ('device = "cpu"', 'device = "tpu"', "machine.device='tpu' must be one of cpu, cuda"),
        ("workers_per_node = 4", "workers_per_node = true", "machine.workers_per_node=True must be a whole number"),
        ("[link]\nlatency_s = 0.001", "[link]\nlatency_s = nan", "link.latency_s=nan must be from 0 to 100"),
        ("[link]\nlatency_s = 0.001", "[link]\nlatency_s = '1 ms'", "link.latency_s='1 ms' must be from 0 to 100"),
        ("[link]\nlatency_s = 0.001", "[link]", "link.latency_s is missing: seconds of a message of no bytes"),
        ("memory_bytes = 8000000000.0", f"memory_bytes = 1{'0' * 400}", "must be from 1 to 1e+18"),
        ("memory_bytes = 8000000000.0", f"memory_bytes = 1{'0' * 5000}", "is not a TOML file"),
        ("[link]", "[lnk]", "unknown key machine.lnk: did you mean 'link'?"),
        ("nodes_per_switch = 16", "nodes_per_switch = inf", "allreduce.nodes_per_switch=inf must be a whole number"),
        ("[allreduce.switch]\nlatency_s = 0.001", "[allreduce.switch]", "allreduce.switch.latency_s is missing"),
        ("allreduce_busy = 0.25", "allreduce_busy = 25", "overlap.allreduce_busy=25 must be from 0 to 1: share"),
        ("sends_block = false", "sends_block = 0", "overlap.sends_block=0 must be a bool: whether"),
        ("forward_s = 2.0", "forward_s = -2", "compute.points[0].forward_s=-2 must be from 0 to 1e+06: seconds"),
        ("[compute]", "[[compute]]", "compute must be one table, not a list: write [compute] above its keys"),
        ("[machine]", "[[machine]]", "machine must be a table: write [machine] above its keys"),
        ("[link]", "[link", "is not a TOML file"),
        ("[link]", f"x = {'[' * 5000}", "is not a TOML file"),
        (
            "memory_bytes = 8000000000.0",
            f"memory_bytes = 0x{'F' * 5000}",
            "(int, too long to show) must be from",
        ),
        (
            f"forward_flops = {BLOCK.forward_flops}",
            "forward_flops = 1e-300",
            "forward_flops=1e-300 is less than one of them",
        ),
    ],
)
def test_files_that_make_no_sense(old, new, words):
    text = machine_text(MEASURED)
    assert old in text
    with pytest.raises(InputError) as refused:
        parse_machine(text.replace(old, new, 1), "box.toml")
    assert str(refused.value).startswith("box.toml") and words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_machine_without_points():
    with pytest.raises(InputError, match=r"compute\.points is missing"):
        parse_machine(machine_text(MEASURED).replace("compute.points", "x", 0).split("[[compute.points]]")[0], "box")
    with pytest.raises(InputError, match=r"compute\.points is empty"):
        Compute(())


def test_a_rate_that_no_machine_has():
    with pytest.raises(InputError, match=r"forward_s=1e-06 makes 2e\+20 FLOP/s"):
        Compute((Point("block", 2, 1e-6, 1, forward_flops=1e14, backward_flops=1),))
    with pytest.raises(InputError, match="backward_s=0 makes FLOPs in no time"):
        Compute((Point("block", 2, 1, 0, forward_flops=1, backward_flops=1),))


def test_names_and_files_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="neither a machine nor a file: did you mean 'piz-daint'"):
        read_machine("piz-dant")
    with pytest.raises(InputError, match="neither a machine nor a file"):
        read_machine("x" * 5000)
    with pytest.raises(InputError, match="cannot write"):
        write_machine(MEASURED, tmp_path / "nowhere" / "machine.toml")


def test_layers_that_were_measured_and_others():
    """Straight between points, on at the rate of the last, and towards what a call costs by itself below the first."""
    assert [MEASURED.forward_s(BLOCK, samples) for samples in (1, 2, 4, 8)] == pytest.approx([2, 3, 5, 10])
    assert MEASURED.forward_s(BLOCK, 0.5) == pytest.approx(1.5)
    assert MEASURED.backward_s(BLOCK, 4) == 13
    assert (MEASURED.input_s(BLOCK, 1), MEASURED.weight_s(BLOCK, 1)) == (2.5, 1.5)
    assert MEASURED.forward_s(LAYERS[0], 3) == pytest.approx(0.3)
    halves = MEASURED.input_s(LAYERS[0], 2), MEASURED.weight_s(LAYERS[0], 2)
    assert halves == pytest.approx((0.2, 0.2))
    larger = replace(BLOCK, forward_flops=2 * BLOCK.forward_flops, backward_flops=2 * BLOCK.backward_flops)
    assert MEASURED.forward_s(larger, 1) == pytest.approx(3)
    head = replace(BLOCK, kind="head")
    assert MEASURED.backward_s(head, 3) == pytest.approx(10)


def test_the_law_of_other_layers_is_a_line_near_the_points_in_shares():
    """What a call costs by itself, and a rate; no cost of a call below 0."""
    assert Law.through([(1, 2.0), (2, 3.0), (10, 11.0)]) == pytest.approx((1, 1))
    assert Law.through([(4, 2.0)]) == (0, 0.5)
    assert Law.through([(1, 1.0), (2, 4.0)]).call_s == 0
    law = Law.through([(1, 1.1), (1, 0.9), (100, 110.0), (100, 90.0)])
    assert law(50) == pytest.approx(50, rel=0.03)


def test_what_is_kept_counts_as_flops_where_a_machine_says_so():
    points = (Point("block", 1, 2.0, 4.0, activation_bytes=BLOCK.activation_bytes, **SHAPE),)
    weighing = replace(MEASURED, compute=Compute(points, flops_per_byte=BLOCK.forward_flops / BLOCK.activation_bytes))
    assert weighing.forward_s(BLOCK, 1) == 2.0
    hoarder = replace(BLOCK, kind="head", activation_bytes=3 * BLOCK.activation_bytes, output_bytes=1)
    assert (weighing.forward_s(hoarder, 1), weighing.backward_s(hoarder, 1)) == pytest.approx((4.0, 8.0))


def test_a_slower_training_step():
    slower = replace(MEASURED, compute=replace(MEASURED.compute, slowdown=1.5))
    assert slower.forward_s(BLOCK, 2) == pytest.approx(1.5 * MEASURED.forward_s(BLOCK, 2))


def test_an_allreduce_of_one_level_is_the_papers():
    """2 log2(r) latencies and 2 (r - 1) / r of the bytes over r replicas (Chimera, Section 3.4)."""
    flat = AllReduce(Level(3.0, 0.5))
    assert flat.seconds(40, 1) == 0
    for replicas in 2, 3, 8, 1000:
        expected = 2 * log2(replicas) * 3 + 2 * (replicas - 1) / replicas * 40 * 0.5
        assert flat.seconds(40, replicas) == pytest.approx(expected)


def test_an_allreduce_over_nodes_and_switches():
    """Each level sums what the one below has shared out: 4 of a node, 16 nodes of a switch, then switches."""
    tree = MEASURED.allreduce
    size = 1e9
    node = 2 * 2 * 1e-6 + 2 * 3 / 4 * size * 1e-10
    switch = 2 * 4 * 1e-3 + 2 * 15 / 16 * size / 4 * 1e-9
    above = 2 * 1 * 1e-2 + 2 / 2 * size / 64 * 1e-8
    assert tree.seconds(size, 4, per_node=4) == pytest.approx(node)
    assert tree.seconds(size, 64, per_node=4) == pytest.approx(node + switch)
    assert tree.seconds(size, 128, per_node=4) == pytest.approx(node + switch + above)
    assert tree.seconds(size, 4, nodes_apart=8) == pytest.approx(2 * 1e-3 + size * 1e-9 + 2 * 1e-2 + size / 2 * 1e-8)


def test_replicas_of_pipelines_that_are_shorter_or_longer_than_a_node():
    """Four workers a node: pipelines of 2 workers put 2 replicas of a stage on each, those of 8 one on every other."""
    near = MEASURED.allreduce_s(1e9, 8, depth=2)
    assert near == MEASURED.allreduce.seconds(1e9, 8, per_node=2)
    assert MEASURED.allreduce_s(1e9, 8, depth=2, pipes=2) == MEASURED.allreduce.seconds(1e9, 8, per_node=4)
    apart = MEASURED.allreduce_s(1e9, 32, depth=8)
    assert apart == MEASURED.allreduce.seconds(1e9, 32, per_node=1, nodes_apart=2)
    assert MEASURED.update_s(1e9) == 1.5
