"""The benchmark of real compute compares what trains the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

ROOT = Path(__file__).parent.parent
TRAINING = ["ours/chimera", "torch/1f1b", "torch/ddp"]
TINY = (
    "--layers 2 --hidden 32 --head-size 8 --vocabulary 64 --sequence 16 --samples 2 "
    "--micro-batches 2 --rounds 1 --steps 2 --ceiling-every 2"
)


@pytest.mark.timeout(400)
def test_rows(tmp_path):
    asked = [*TRAINING, "torch/dualpipe_v"]
    result = tmp_path / "result.json"
    command = [*TINY.split(), "--contenders", *asked, "--json", str(result)]
    job = subprocess.run(
        [sys.executable, "scripts/bench/compute.py", *command],
        cwd=ROOT,
        env=environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    rows = {row["contender"]: row for row in json.loads(result.read_text())["rows"]}
    assert sorted(rows) == sorted([*asked, "alone/ceiling"])
    assert all(row["micro_batches"] == 2 for row in rows.values())
    assert len(rows["alone/ceiling"]["samples_per_s"]) == 3  # before the others, after the first two, and at the end
    for name in TRAINING:
        assert len(rows[name]["samples_per_s"]) == len(rows[name]["share"]) == 1
        assert rows[name]["samples_per_s"][0] > 0
        assert rows[name]["loss"] == pytest.approx(rows["ours/chimera"]["loss"], abs=1e-4), name
    refused = rows["torch/dualpipe_v"]
    assert "at least as many microbatches" in refused["refused"] and not refused["share"]
