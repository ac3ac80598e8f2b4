"""`profile=`: which steps torch.profiler records, into which files, and what is in them."""

from __future__ import annotations

import errno
import gzip
import json
import os
from itertools import count
from pathlib import Path

import launch
import numpy as np
import pytest
import small
import torch

from chimera_mpi.cli import main
from chimera_mpi.config import Config, check_together, profiled
from chimera_mpi.errors import InputError
from chimera_mpi.runlog import read_run
from chimera_mpi.runtime.recorder import place_of
from chimera_mpi.schedule import build
from chimera_mpi.stopping import Stops


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return small.write(tmp_path, layers=2, micro_batches=2, log="run.h5", threads=1)


def names_in(path: Path) -> list[str]:
    """Those that were given to what is in a profile, in the order of time."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    marked = [event for event in events if event.get("cat") == "user_annotation"]
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in marked)
    assert any(event.get("cat") == "cpu_op" and event["name"].startswith("aten::") for event in events)
    return [event["name"] for event in sorted(marked, key=lambda event: event["ts"])]


def named(order, *steps: int) -> list[str]:
    """What a worker with this order is seen to do."""
    ops = [name for op in order for name in (f"{op} waits", str(op))]
    return [name for step in steps for name in (f"step {step}", *ops)]


@pytest.mark.parametrize(
    ("given", "steps"),
    [("2-4", [2, 3, 4]), ("steps 2-4", [2, 3, 4]), ("step 3", [3]), (3, [3]), ("0-0", [0]), (None, [])],
)
def test_what_is_a_range(given, steps) -> None:
    assert list(profiled(Config(steps=5, profile=given))) == steps


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("4-5", "profile=4-5: the steps of this run are 0 to 4: take some of those, or set steps=6 or more"),
        (5, "profile=5: the steps of this run are 0 to 4"),
        ("3-2", "profile=3-2 ends before it begins: try profile=2-3"),
        ("soon", "profile='soon' is no range of steps: give one such as 10-12, or a single step"),
        ("1-", "profile='1-' is no range of steps"),
        ("-3", "profile='-3' is no range of steps"),
    ],
)
def test_what_is_none_is_refused_in_a_line(given, message, capsys) -> None:
    with pytest.raises(InputError) as caught:
        check_together(Config(steps=5, profile=given))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_two_ranks_and_those_steps_only(folder) -> None:
    done = launch.chimera(2, "train", "small.toml", "scheme=1f1b", "depth=2", "profile=2-3", cwd=folder, timeout_s=80)
    assert done.returncode == 0, done.stderr
    schedule = build("1f1b", 2, 2)
    for rank in range(2):
        names = names_in(folder / f"run-profile-rank{rank}.json.gz")
        assert [name for name in names if "Optimizer" not in name] == named(schedule.orders[rank], 2, 3)
    assert sorted(path.name for path in folder.glob("run*")) == [
        "run-profile-rank0.json.gz", "run-profile-rank1.json.gz", "run.h5"
    ]  # fmt: skip
    assert "profile     run-profile-rank0.json.gz, and one of each other rank" in done.stdout
    assert "profiler_start" not in done.stdout + done.stderr, "ranks print nothing"
    assert len(read_run("run.h5").steps["step"]) == 6


def test_one_rank_is_not_changed_by_it_and_nothing_is_replaced(folder, capsys) -> None:
    """Steps are those of a run without, a profile is never overwritten, a resumed run leaves it as it is."""
    words = ["train", "small.toml", "scheme=gpipe", "depth=1", "precision=fp64"]
    assert main([*words, "log=plain.h5"]) == 0
    assert not list(folder.glob("*profile*"))
    assert main([*words, "profile=3", "checkpoint=saved", "steps=6"]) == 0
    path = place_of(Path("run.h5"), 0)
    assert [n for n in names_in(path) if "Optimizer" not in n] == named(build("gpipe", 1, 2).orders[0], 3)
    assert np.array_equal(read_run("plain.h5").steps["loss"], read_run("run.h5").steps["loss"])
    before = path.read_bytes()
    Path("run.h5").rename("old.h5")
    capsys.readouterr()
    assert main([*words, "profile=3", "checkpoint=none"]) == 2
    err = capsys.readouterr().err
    told = f"{path} exists and a profile is never overwritten: give another log=FILE, or move it away"
    assert err == f"chimera-mpi: {told}\n"
    assert not Path("run.h5").exists()
    Path("old.h5").rename("run.h5")
    more = ["profile=7", "checkpoint=saved", "resume=auto", "steps=8", "minimum_learning_rate=3e-4"]
    assert main([*words, *more]) == 0
    assert "is there already, and stays" in capsys.readouterr().out and path.read_bytes() == before


def test_a_run_that_stops_within_the_range_writes_what_there_is(folder, monkeypatch, capsys) -> None:
    """As if a signal had come after the fourth step: the fifth is the last."""
    asked = count()
    monkeypatch.setattr(Stops, "why", lambda stops, *told: "told so" if next(asked) > 3 else "")
    assert main(["train", "small.toml", "depth=1", "scheme=gpipe", "profile=1-5"]) == 1
    assert "told so: stopped after" in capsys.readouterr().err
    done = len(read_run("run.h5").steps["step"])
    assert 1 < done < 6
    names = [name for name in names_in(Path("run-profile-rank0.json.gz")) if "Optimizer" not in name]
    assert names == named(build("gpipe", 1, 2).orders[0], *range(1, done))


def test_a_profile_that_cannot_be_written_is_told_and_the_run_goes_on(folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    assert main(["train", "small.toml", "depth=1", "scheme=gpipe", "profile=2"]) == 0
    out = capsys.readouterr().out
    assert "profile     rank 0: run-profile-rank0.json.gz cannot be written (No space left on device)" in out
    assert len(read_run("run.h5").steps["step"]) == 6 and not list(folder.glob("*profile*"))


def fail(recorded, path):
    Path(path).write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_a_place_it_is_refused(folder, capsys) -> None:
    assert main(["train", "small.toml", "profile=2", "log=none"]) == 2
    assert "profile=2 is written beside the log, and log=none: give log=FILE" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.h5", "small.toml"]
