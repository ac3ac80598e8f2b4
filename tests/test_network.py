"""Training over nodes that have a network each: MPICH speaks TCP between them, and shares memory within."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import launch
import numpy as np
import pytest
import small

sys.path.insert(0, str(Path(__file__).parent))
from cluster import network

from chimera_mpi.runlog import read_run

FOUR_STEPS = {"steps": 4, "eval_every": 4, "hidden": 128, "precision": "fp64", "scheme": "chimera", "spin_s": 5e-5}
pytestmark = [
    pytest.mark.skipif(bool(network.why_not()), reason=str(network.why_not())),
    pytest.mark.skipif("--oversubscribe" in launch.mpiexec(), reason="hydra's remote shell is MPICH's"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("network"), **FOUR_STEPS)


@pytest.fixture(scope="module")
def one_node(folder):
    return train(folder, "one.h5", "depth=4", "micro_batches=4")[1]


def train(folder, log, *overrides, nodes=None):
    """What a run says, and its log; over the nodes of a network, or on this machine."""
    command = [sys.executable, "-m", "chimera_mpi", "train", "small.toml", f"log={log}", *overrides]
    if nodes is None:
        done = launch.run(4, command, 120, folder)
    else:
        with network.Network(nodes, folder) as net:
            options = [*network.mpiexec_over(net), "-ppn", str(4 // nodes)]
            done = launch.run(4, command, 120, folder, options=options, **network.OVER_TCP)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_run(folder / log)


def test_over_four_nodes_the_bits_are_those_of_one(folder, one_node):
    _, log = train(folder, "four.h5", "depth=4", "micro_batches=4", nodes=4)
    assert log.attributes["hosts"] == '["n1", "n2", "n3", "n4"]'
    for column in ("loss", "grad_norm"):
        np.testing.assert_array_equal(log.steps[column], one_node.steps[column])
    np.testing.assert_array_equal(log.evaluations["loss"], one_node.evaluations["loss"])


def test_sums_are_in_shared_memory_within_nodes_and_by_messages_between(folder, one_node):
    said, log = train(folder, "two.h5", "depth=2", "micro_batches=2", nodes=2)
    assert "sums in shared memory" in said
    assert log.attributes["hosts"] == '["n1", "n1", "n2", "n2"]'
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(log.steps[column], one_node.steps[column], rtol=1e-9)


def test_the_network_leaves_nothing_behind(tmp_path):
    with network.Network(2, tmp_path) as net:
        assert all(Path(f"/run/netns/{net.namespace(node)}").exists() for node in net.addresses)
        assert os.path.isdir(f"/sys/class/net/{net.bridge}")
    assert not any(Path(f"/run/netns/{net.namespace(node)}").exists() for node in net.addresses)
    assert not os.path.isdir(f"/sys/class/net/{net.bridge}")
