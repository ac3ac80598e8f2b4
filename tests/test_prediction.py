"""What a job is predicted to take is what the planner says of the same choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chimera_mpi.config import load
from chimera_mpi.errors import InputError
from chimera_mpi.predict import Link
from chimera_mpi.predict.estimate import estimate
from chimera_mpi.predict.machine import Compute, Optimizer, machines, read_machine
from chimera_mpi.prediction import choice_of, predict
from chimera_mpi.train import plan_job
from chimera_mpi.work import work_of

SMALL = ("layers=6", "hidden=16", "heads=2", "positions=16", "sequence_length=16", "vocabulary=20")


def job(*overrides, ranks=8):
    return plan_job(load("gpt-tiny", [*SMALL, *overrides]), ranks)


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheme=1f1b", "depth=4"),
        ("scheme=chimera", "depth=4", "optimizer_sharding=replicas", "recompute=stage"),
        ("scheme=chimera", "depth=4", "concat=halving", "micro_batches=8"),
        ("scheme=zb_h1", "depth=2", "partition=[3]", "precision=bf16"),
        ("scheme=hanayo", "depth=4", "recompute=2"),
    ],
    ids=" ".join,
)
def test_a_job_is_predicted_as_the_planner_would(overrides):
    planned, box = job(*overrides), read_machine("small-box")
    found = predict(planned, "cpu", box)
    expected = estimate(work_of(planned.config), box, choice_of(planned))
    assert found.step_s == pytest.approx(expected.step_s)
    assert found.memory == expected.memory
    assert found.attributes["predicted_step_s"] == found.step_s and found.attributes["machine"] == "small-box"
    assert max(span.end_s for span in found.spans) == found.step_s
    assert "a step on small-box" in str(found)


def test_without_a_machine_there_are_no_seconds():
    found = predict(job("depth=4"), "cpu")
    assert found.step_s is None and not found.spans and "predicted_step_s" not in found.attributes


def test_what_cannot_be_predicted_is_refused_in_a_line(monkeypatch):
    box = read_machine("small-box")
    point = replace(box.compute.points[0], forward_s=0, backward_s=0, forward_flops=0, backward_flops=0)
    free = replace(box, compute=Compute((point,)), link=Link(), node_link=Link(), optimizer=Optimizer())
    with pytest.raises(InputError, match="a step on small-box takes 0 s"):
        predict(job("depth=4", ranks=4), "cpu", free)

    def no_work(*_):
        raise InputError("model=mine:build cannot be found out")

    monkeypatch.setattr("chimera_mpi.prediction.work_of", no_work)
    assert predict(job("depth=4"), "cpu") is None
    with pytest.raises(InputError, match=r"mine:build cannot be found out: leave out machine="):
        predict(job("depth=4"), "cpu", box)


def test_any_machine_that_comes_along_will_do():
    assert {predict(job("depth=4"), "cuda", read_machine(name)).step_s > 0 for name in machines()} == {True}
