"""A rank that hangs or has left ends the job, and each rank's whereabouts are told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import launch
import numpy as np
import pytest
import small

from chimera_mpi.runtime import watchdog
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.watchdog import ANSWER_BYTES, Report, Silence, Watchdog, _Neighbour, awaited
from chimera_mpi.runtime.worker import Whereabouts
from chimera_mpi.schedule import Kind, Op, build

ROOT = Path(__file__).parent.parent
OP = Op(Kind.FORWARD, 0, 1, 3)


def test_a_report_comes_back_and_long_ones_lose_the_outermost_frames():
    short = Report("an evaluation", "is in an evaluation", "File a\nFile b")
    assert Report.decoded(short.encoded()) == short
    long = Report("", "line", "é" * ANSWER_BYTES + "innermost")
    encoded = long.encoded()
    assert encoded.dtype == np.uint8 and len(encoded) == ANSWER_BYTES
    assert Report.decoded(encoded).stack.endswith("innermost")


def test_silence_is_what_passes_without_a_change():
    silence = Silence()
    seen = [silence.after(1.0, at) for at in (0, 0, 0, 1, 1)]
    assert seen == [0, 1, 2, 0, 1]
    silence.break_()
    assert silence.after(1.0, 1) == 1


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system does not tell when a process ends")
def test_a_neighbour_that_has_left_is_noticed_before_anybody_waits_for_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        neighbour = _Neighbour(1, os.pidfd_open(process.pid))
        assert not neighbour.has_left()
        process.stdin.close()
        wait_for(neighbour.has_left)
        assert neighbour.has_left()
        neighbour.close()


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)


def watching(comm, here, limit_s):
    """A watchdog whose end is a text."""
    grid, texts = Grid(comm, comm.size), []
    schedule = build("1f1b", comm.size, 4)
    return grid, texts, Watchdog(grid, here, lambda op: awaited(schedule, grid, op), limit_s, texts.append)


def wait_for(what, limit_s=60):
    until_s = time.monotonic() + limit_s
    while not what() and time.monotonic() < until_s:
        time.sleep(0.01)


@pytest.mark.mpi(3)
def test_all_are_asked_and_told(comm, hurried):
    here = Whereabouts()
    here.step, here.op, here.acts = 7, OP, comm.rank == 1
    grid, texts, dog = watching(comm, here, 0.2)
    if comm.rank == 0:
        wait_for(lambda: texts)
        head, *lines = texts[0].splitlines()
        assert "rank 0 has seen no op begin or end" in head and "watchdog_s=0.2" in head
        told = [line for line in lines if "step 7" in line]
        assert [line.partition(": ")[0] for line in told] == ["rank 0", "rank 1", "rank 2"]
        assert told[1].endswith("op 1F3: at work")
        assert all(told[rank].endswith("op 1F3: waits for 0F3 from rank 0") for rank in (0, 2))
        assert all(any(line.startswith(f"rank {rank}:") and "File" in line for line in lines) for rank in range(3))
    dog.close()
    grid.close()


@pytest.mark.mpi(3)
def test_an_excuse_of_one_rank_is_patience_of_all(comm, hurried):
    here = Whereabouts()
    here.step, here.op = 7, OP
    grid, texts, dog = watching(comm, here, 0.1)
    with here.excused("an evaluation") if comm.rank == 2 else here.excused(""):
        time.sleep(1.5)
        assert not texts
        grid.world.Barrier()
    if comm.rank == 0:
        wait_for(lambda: texts)  # it is over, and nothing happens
        assert texts
    dog.close()
    grid.close()


@pytest.mark.mpi(2)
def test_an_answer_that_comes_late_has_memory_of_its_own(comm, hurried, monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWERS_S", 0.1)
    here, awake = Whereabouts(), threading.Event()
    here.step, here.op = 7, OP
    grid, texts, dog = watching(comm, here, 0.1 if comm.rank == 0 else 1000.0)
    if comm.rank == 1:
        answer_all, dog._answer_all = dog._answer_all, lambda: awake.is_set() and answer_all()
    grid.world.Barrier()
    if comm.rank == 0:
        wait_for(lambda: texts and dog._late)
        assert "rank 1: does not answer" in texts[0]
    grid.world.Barrier()
    awake.set()
    if comm.rank == 0:
        wait_for(lambda: "rank 1: step 7" in texts[-1] and not dog._late)
        assert "rank 1: step 7" in texts[-1] and not dog._late
    grid.world.Barrier()
    dog.close()
    grid.close()


@pytest.mark.mpi(2)
def test_it_learns_what_is_long(comm, hurried, monkeypatch):
    monkeypatch.setattr(watchdog, "LEAST_S", 1.0)
    grid, texts, dog = watching(comm, Whereabouts(), None)
    limits = []
    for pass_s in (1.0, 2.0, 0.5):
        dog.measured(pass_s)
        limits.append(dog.limit_s)
    assert limits == [watchdog.AT_FIRST_S, 2.0 * watchdog.TIMES, 2.0 * watchdog.TIMES]
    time.sleep(0.3)  # between two steps
    assert not texts
    dog.close()
    grid.close()


# ------------------------------------------------------------------------------------------------ jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("watchdog"), depth=2)


def train(folder, fault, rank, *overrides, launcher=()):
    command = [*launcher, sys.executable, str(ROOT / "tests" / "fail_at.py"), fault, str(rank)]
    return launch.run(2, [*command, "train", "small.toml", "log=none", *overrides], 200, folder)


def test_a_rank_that_hangs_ends_the_job(folder):
    done = train(folder, "forward:hang:3", 1, "watchdog_s=2")
    assert done.returncode not in (0, 75, 124), done.stderr
    for words in (
        "(watchdog_s=2): ending the job",
        "rank 0: step 0, op 0B2: waits for 1B2 from rank 1",
        "rank 1: step 0, op 1F2: at work",
        'fail_at.py", line',
        "in sleep",
    ):
        assert words in done.stderr, done.stderr


def test_a_rank_that_holds_its_interpreter_for_good_ends_the_job(folder):
    done = train(folder, "forward:freeze:3", 1, "watchdog_s=2")
    assert done.returncode not in (0, 75, 124), done.stderr
    assert "rank 1: does not answer" in done.stderr
    assert "in then_loss" in done.stderr  # by its C runtime


def test_a_rank_that_vanishes_ends_the_job(folder):
    """Also where its launcher does not care, as srun does not."""
    careless = ("-disable-auto-cleanup",) if len(launch.mpiexec()) == 1 else ()
    done = train(folder, "backward:vanish:3", 1, launcher=careless)
    assert done.returncode not in (0, 75, 124), done.stderr
    told = ("rank 1 has left before the end", "mpi4py.MPI.Exception")  # MPICH may find out first
    assert any(words in done.stderr for words in told), done.stderr
