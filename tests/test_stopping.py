"""Runs that end early: signals to one rank or to the launcher, the end of the job's time, numbers that are none."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import launch
import pytest
import small

from chimera_mpi import stopping
from chimera_mpi.checkpoint import found_in
from chimera_mpi.config import Config, schedule_of
from chimera_mpi.errors import InputError
from chimera_mpi.runlog import read_run
from chimera_mpi.stopping import Signals, Stops, TimeLimit, find_limit, must_stop, parse_end, slurm_end, slurm_job

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("left_s", "pass_s", "save_s", "stops"),
    [(100, 40, 5, False), (92, 40, 5, True), (6, 0, 0, False), (4, 0, 0, True), (-1, 0, 0, True), (20, 1, 20, True)],
)
def test_it_stops_while_there_is_time_for_a_pass_more_and_a_checkpoint(left_s, pass_s, save_s, stops):
    assert must_stop(left_s, pass_s, save_s) == stops


def test_a_limit_learns_how_long_passes_and_checkpoints_take():
    limit = TimeLimit(end_s=1000, name="limit", save_s=500)
    assert not limit.is_near(200) and limit.is_near(250)  # by the estimate
    limit = TimeLimit(end_s=1000, name="limit", save_s=500)
    for now in (0, 10, 20, 120, 130, 700):
        assert limit.is_near(now, save_s=10) == (now == 700)


def test_no_run_outlives_its_limit():
    """Whatever passes and saves take, up to what was seen: word goes round in a pass, then comes the save."""
    for pass_s, save_s in ((1, 0), (7, 30), (50, 3)):
        limit = TimeLimit(end_s=1000, name="limit")
        now = 0.0
        while not limit.is_near(now, save_s):
            now += pass_s
        ended = now + pass_s + save_s
        assert 1000 - 3 * pass_s - save_s - 2 * stopping.EXIT_S < ended <= 1000 - stopping.EXIT_S


@pytest.mark.parametrize("every", [20, 120, 500])
def test_what_comes_now_and_then_is_not_forgotten(every):
    """An evaluation, which takes many times a pass."""
    limit, now = TimeLimit(end_s=2000, name="limit", laps=max(stopping.LAPS, every + 1)), 0.0
    passes = 0
    while not limit.is_near(now):
        passes += 1
        now += 60 if passes % every == 0 else 0.9
    assert passes > every
    passes += 1
    assert now + (60 if passes % every == 0 else 0.9) <= 2000 - stopping.EXIT_S
    assert len(limit._longest) <= every + 1


def test_the_longest_lap_is_that_of_the_last_ones():
    limit, now, laps = TimeLimit(end_s=math.inf, name="limit", laps=5), 0.0, []
    chance = random.Random(0)
    limit.is_near(now)
    for _ in range(200):
        laps.append(chance.choice([1.0, 2.0, 3.0, 10.0]))
        now += laps[-1]
        limit.is_near(now)
        assert limit._longest[0][1] == pytest.approx(max(laps[-5:]))


def test_slurm_tells_the_end():
    told = {}

    def squeue(command, env, **_):
        told.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 0, "2026-11-30T18:30:00\n", "")

    assert slurm_end("7", {"SLURM_TIME_FORMAT": "relative"}, squeue) == datetime(2026, 11, 30, 18, 30)
    assert told == {"command": ["squeue", "-h", "-j", "7", "-o", "%e"], "env": {"SLURM_TIME_FORMAT": "standard"}}


@pytest.mark.parametrize("said", ["N/A", "NONE\n", "UNLIMITED"])
def test_a_job_without_an_end(said):
    assert parse_end(said) is None


@pytest.mark.parametrize(
    "answer",
    [
        subprocess.CompletedProcess([], 0, "", ""),
        subprocess.CompletedProcess([], 0, "2026-11-30T18:30:00\n2026-11-30T19:30:00\n", ""),
        subprocess.CompletedProcess([], 1, "", "slurm_load_jobs error:\nInvalid job id specified\n"),
        OSError("no squeue"),
        subprocess.TimeoutExpired("squeue", 60),
    ],
    ids=["nothing", "two jobs", "an error", "no squeue", "no answer"],
)
def test_a_slurm_that_does_not_tell_is_an_error_in_one_line(answer):
    def squeue(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(InputError, match="give seconds, or time_limit=none") as refused:
        slurm_end("7", {}, squeue)
    assert "\n" not in str(refused.value)
    assert slurm_end("7", {"SLURM_JOB_END_TIME": "1796063400"}, squeue) == datetime.fromtimestamp(1796063400)


def test_whose_end_it_is():
    assert slurm_job({}) is None
    assert slurm_job({"SLURM_JOB_ID": "7"}) == "7"
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm_job(array) == "7_2"


def test_the_limit_that_is_asked_for(monkeypatch):
    assert find_limit(None, 5.0, {"SLURM_JOB_ID": "7"}, 1.0) is None
    assert find_limit("auto", 5.0, {}, 1.0) is None
    assert find_limit(60.0, 5.0, {}, 1.0) == TimeLimit(65.0, "time_limit=60", 1.0)
    monkeypatch.setattr(stopping, "slurm_end", lambda job, environ: datetime.now() + timedelta(seconds=100))
    limit = find_limit("auto", 5.0, {"SLURM_JOB_ID": "7"}, 1.0)
    assert limit is not None and 90 < limit.end_s - time.monotonic() <= 100 and "job 7" in limit.name


@pytest.mark.parametrize(
    ("now", "end", "left_h"), [("03-29T00:30", "03-29T03:30", 1), ("10-24T22:30", "10-25T03:30", 4)]
)
def test_an_end_beyond_a_change_of_clocks(monkeypatch, now, end, left_h):
    """Slurm tells local time, which in Berlin jumps at 1:00 UTC."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        began_s = datetime.fromisoformat(f"2026-{now}+00:00").timestamp()
        monkeypatch.setattr(time, "time", lambda: began_s)
        told = datetime.fromisoformat(f"2026-{end}")
        monkeypatch.setattr(stopping, "slurm_end", lambda job, environ: told)
        limit = find_limit("auto", 5.0, {"SLURM_JOB_ID": "7"}, 1.0)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert limit is not None and limit.end_s - time.monotonic() == pytest.approx(3600 * left_h, abs=60)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == number
        assert Stops(signals).why([0, float(signals.number)]) == f"{number.name} on rank 1"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", stopping.OF_OTHER_QUEUES)
def test_a_warning_that_is_ignored_stays_so(number):
    signal.signal(number, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.number == 0


def test_signals_late_in_an_end_change_nothing():
    interrupt = signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        signals.hush()
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert signals.number == 0 and signal.getsignal(signal.SIGINT) == interrupt


def test_a_second_interrupt_interrupts_and_an_echo_of_the_first_does_not(monkeypatch):
    monkeypatch.setattr(stopping, "ECHO_S", 1000.0)
    with Signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(stopping, "ECHO_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_other_threads_note_no_signals():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter():
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_streams_skip_no_update():
    with pytest.raises(InputError, match=r"pipedream updates stage by stage.*on_nan=stop"):
        schedule_of(Config(scheme="pipedream", depth=2, on_nan="skip"))


# ------------------------------------------------------------------------------------------------ jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    return small.write(folder, layers=4, depth=2, micro_batches=4, steps=40, eval_every=20, spans_every=10)


def train(folder, log, fault, rank, *overrides, timeout_s=100):
    """A job of two ranks, of which one meets with a fault."""
    arguments = [fault, str(rank), "train", "small.toml", f"log={log}", *overrides]
    command = [sys.executable, str(ROOT / "tests" / "fail_at.py"), *arguments]
    return launch.run(2, command, timeout_s, folder, FAULT_LAUNCHED_BY=str(os.getpid()))


def last_session(path):
    return read_run(path).sessions[-1]


@pytest.mark.parametrize(
    ("fault", "rank", "reason", "steps"),
    [
        ("update:term:3", 1, "SIGTERM on rank 1", 4),
        ("log:usr1_launcher:3", 0, "SIGUSR1 on rank", 5),  # which travels for a while
        ("evaluate:usr1", 1, "SIGUSR1 on rank 1", 22),
    ],
)
def test_all_stop_after_the_same_step_with_one_checkpoint(folder, fault, rank, reason, steps):
    name = fault.replace(":", "-")
    done = train(folder, f"{name}.h5", fault, rank, f"checkpoint={name}")
    assert done.returncode == 75, done.stderr
    found = list(read_run(folder / f"{name}.h5").steps["step"])
    assert found == list(range(len(found)))
    assert len(found) == steps or "launcher" in fault
    told = f"stopped after {len(found)} of 40 steps, saved in {name}"
    assert told in done.stderr and "Traceback" not in done.stderr
    session = last_session(folder / f"{name}.h5")
    assert session.reason.startswith(reason) and told in session.reason and session.end
    assert [path.name for path in found_in(folder / name)] == [f"step-{len(found):08d}"]


def test_without_a_folder_nothing_is_saved_and_not_again_is_the_code(folder):
    done = train(folder, "unsaved.h5", "build:interrupt", 0)
    assert done.returncode == 1, done.stderr
    assert "SIGINT on rank 0: stopped after 0 of 40 steps, nothing is saved: next time give checkpoint=" in done.stderr
    assert last_session(folder / "unsaved.h5").end


def test_a_second_interrupt_ends_at_once(folder):
    done = train(folder, "interrupted.h5", "forward:interrupt_twice:9", 0, "steps=100000")
    assert done.returncode not in (0, 1, 75, 124), done.stderr
    assert "interrupted" in done.stderr
    assert read_run(folder / "interrupted.h5").config["depth"] == 2


def test_it_stops_before_the_limit(folder):
    keys = ("log=limit.h5", "steps=1000000", "time_limit=7", "checkpoint=limit")
    done = launch.chimera(2, "train", "small.toml", *keys, cwd=folder)
    assert done.returncode == 75, done.stderr
    assert last_session(folder / "limit.h5").reason.startswith("time_limit=7: stopped after")


def test_a_step_of_no_numbers_stops_the_run(folder):
    done = train(folder, "stopped.h5", "forward:nan:9", 1, "checkpoint=stopped")
    assert done.returncode == 1, done.stderr
    assert "step 2: a loss or gradients of nan or inf, first in the loss, stage 1 on rank 1" in done.stderr
    assert "stopped after 2 of 40 steps" in done.stderr and "Traceback" not in done.stderr
    run = read_run(folder / "stopped.h5")
    assert list(run.steps["step"]) == [0, 1] and run.sessions[-1].end
    (checkpoint,) = found_in(folder / "stopped")
    assert checkpoint.name == "step-00000002"


def test_a_step_of_no_numbers_is_skipped(folder):
    done = train(folder, "skipped.h5", "forward:nan:9", 0, "on_nan=skip", "clip=none", "steps=5")
    assert done.returncode == 0, done.stderr
    assert "what layer 3 makes of micro-batch 0, stage 1 on rank 1; it is skipped" in done.stdout
    assert done.stdout.count("is skipped") == 1 and "3 skipped" in done.stdout
    assert list(read_run(folder / "skipped.h5").steps["skipped"]) == [False, False, True, True, True]


def test_a_stream_of_no_numbers_is_stopped_and_never_saved(folder):
    """Also in its last pass: the weights are spoilt, and so the last checkpoint is that of the pass before."""
    options = ("scheme=pipedream", "tied=false", "eval_every=2", "clip=none", "steps=4")
    saving = ("checkpoint=stream", "checkpoint_every=2", "checkpoint_keep=1")
    done = train(folder, "stream.h5", "forward:nan:17", 1, *options, *saving, "eval_mini_batches=2")
    assert done.returncode == 1, done.stderr
    assert (
        "step 2: nan or inf, first in the loss on rank 1, stage 1, and now in the weights: "
        "stopped after 4 of 4 steps, saved is stream/step-00000002" in done.stderr
    )
    assert [path.name for path in found_in(folder / "stream")] == ["step-00000002"]
