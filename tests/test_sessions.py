"""Going on with a run from the command line: one log, each step once, and nobody's work overwritten."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import launch
import numpy as np
import pytest
import small
import torch

from chimera_mpi import checkpoint, runlog
from chimera_mpi.checkpoint import found_in, open_checkpoint
from chimera_mpi.cli import main
from chimera_mpi.commands._desk import Desk
from chimera_mpi.config import Config, steps_of_stream
from chimera_mpi.data import prepare
from chimera_mpi.errors import RunFailed
from chimera_mpi.models import make_layer
from chimera_mpi.runlog import read_run
from chimera_mpi.tasks import task_of
from chimera_mpi.train import Run

ROOT = Path(__file__).parent.parent
SAVING = {"checkpoint": "checkpoints", "checkpoint_every": 2, "checkpoint_keep": 3, "log": "run.h5"}


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """`chimera-mpi train small.toml KEY=VALUE ...` in this process: the exit code and what it said."""
    small.write(tmp_path, layers=2, precision="fp64", learning_rate=0.01, threads=1, **SAVING)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run(*overrides):
        code = main(["train", "small.toml", *overrides])
        told = capsys.readouterr()
        return code, told.out + told.err

    yield run
    torch.set_num_threads(threads)


def test_a_run_in_two_sessions_is_that_in_one(train):
    assert train("log=one.h5", "checkpoint=one")[0] == 0
    assert train("steps=6", "checkpoint=two", "log=run.h5")[0] == 0
    shorten(Path("two"), 2)
    code, told = train("checkpoint=two", "resume=auto")
    assert code == 0 and "resumed from two/step-00000002, 2 steps done" in told
    one, two = read_run("one.h5"), read_run("run.h5")
    assert list(two.steps["step"]) == list(range(6)) and list(two.evaluations["step"]) == [2, 5]
    assert [session.first_step for session in two.sessions] == [0, 2]
    for column in ("loss", "grad_norm", "learning_rate"):
        assert np.array_equal(one.steps[column], two.steps[column])
    ends = [open_checkpoint(Path(name, "step-00000006")) for name in ("one", "two")]
    assert ends[0].files == ends[1].files
    assert not Path("two/lock").exists()


def shorten(folder, step):
    """As if the run had been killed before its next checkpoints."""
    for path in found_in(folder):
        if int(path.name.removeprefix("step-")) > step:
            path.rename(folder.parent / f"of-later-{path.name}")


def test_steps_that_were_lost_are_logged_once(train):
    """Killed between two checkpoints, gone on with in another layout, to a later end."""
    assert train("checkpoint_keep=9", "steps=4", "minimum_learning_rate=0.01", "warmup_steps=0")[0] == 0
    shorten(Path("checkpoints"), 2)
    constant = ("minimum_learning_rate=0.01", "warmup_steps=0")
    code, told = train("resume=auto", "steps=7", *constant)
    assert code == 2 and "run.h5 has steps up to 3 with steps=4, of which those from 2 on" in told
    assert train("resume=auto", "steps=4", "scheme=gpipe", "micro_batches=2", *constant)[0] == 0
    code, told = train("resume=auto", "steps=7", *constant)
    assert code == 0 and "steps 4 -> 7" in told
    run = read_run("run.h5")
    assert list(run.steps["step"]) == list(range(7))
    assert list(run.steps["session"]) == [0, 0, 0, 0, 2, 2, 2]
    assert [session.first_step for session in run.sessions] == [0, 2, 4]
    assert list(run.steps["warmup"]) == [True, True, False, False, True, True, False]
    assert found_in(Path("checkpoints"))[0].name == "step-00000007"


def test_the_log_is_found_by_itself_and_a_finished_run_is_done(train):
    assert train("log=auto", "steps=2")[0] == 0
    code, told = train("log=auto", "resume=auto", "steps=4")
    assert code == 0
    (log,) = Path("runs").glob("*.h5")
    assert list(read_run(log).steps["step"]) == list(range(4))
    code, told = train("log=auto", "resume=auto", "steps=4")
    assert code == 0 and told == "checkpoints/step-00000004 has all 4 steps: raise steps= to go on\n"
    code, told = train("log=auto", "resume=auto", "steps=3")
    assert code == 2 and "has 4 steps, more than steps=3: set steps=4 or more" in told


@pytest.mark.parametrize(("folder", "key"), [("runs", "log=auto"), ("data", "data=none")])
def test_a_folder_that_cannot_be_made_is_a_line(train, folder, key):
    Path(folder).write_text("in the way")
    code, told = train(key, "steps=1")
    assert code == 2 and f"{folder} cannot be made (File exists)" in told and told.count("\n") == 1


def test_resuming_before_the_first_checkpoint_begins_anew_in_the_same_log(train):
    assert train("checkpoint_every=none", "steps=2")[0] == 0
    shorten(Path("checkpoints"), 0)
    code, told = train("resume=auto", "steps=2")
    assert code == 0 and "resumed" not in told
    run = read_run("run.h5")
    assert list(run.steps["step"]) == [0, 1] and len(run.sessions) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "step-00000006 is there already, and this run does not go on from it: set resume=auto"),
        (("resume=auto", "steps=8", "seed=1"), "step-00000006 is of a run with seed=0, not 1"),
        (("resume=auto", "steps=8", "hidden=32"), "step-00000006 is of a run with hidden=16, not 32"),
        (("resume=auto", "steps=8", "data=other.h5"), "is of a run with train_sha256="),
        (("resume=checkpoints/step-9", "steps=8"), "there is no checkpoint checkpoints/step-9; the last whole one is"),
        (("resume=auto", "steps=8", "log=other.h5"), "other.h5 is an HDF5 file but not a run log"),
        (("resume=auto", "checkpoint=fresh", "log=run.h5", "hidden=32"), "run.h5 is of a run with hidden=16, not 32"),
        (("resume=auto", "checkpoint=fresh", "log=run.h5", "data=other.h5"), "is of a run with validation_sha256="),
        (("checkpoint=none",), "checkpoint_every=2 needs a folder: give checkpoint=FOLDER"),
        (("checkpoint=none", "checkpoint_every=none", "resume=auto"), "resume=auto looks in the folder"),
        (("checkpoint=corpus.h5/x",), "corpus.h5/x cannot be written"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_nothing_touched(train, finished, overrides, message):
    before = snapshot(Path())
    code, told = train("log=fresh.h5", *overrides)
    assert code == 2 and message in told and told.startswith("chimera-mpi: ") and told.count("\n") == 1
    assert snapshot(Path()) == before


@pytest.fixture
def finished(train):
    (Path() / "text.txt").write_text("other words " * 2000)
    prepare(Path("other.h5"), [Path("text.txt")])
    assert train()[0] == 0


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("seen", "resume"), [(2, "auto"), (0, "auto"), (2, "checkpoints/step-00000002")])
def test_what_another_job_has_written_meanwhile_is_gone_on_from(train, monkeypatch, seen, resume):
    """It had the folder when this one chose its checkpoint."""
    assert train("steps=4")[0] == 0
    shorten(Path("checkpoints"), seen)
    take = Desk._take_folder

    def late(self, config, anew):
        for path in Path().glob("of-later-*"):
            path.rename(Path("checkpoints", path.name.removeprefix("of-later-")))
        take(self, config, anew)

    monkeypatch.setattr(Desk, "_take_folder", late)
    code, told = train(f"resume={resume}", "steps=4")
    assert code == 2 and told.count("\n") == 1
    assert "step-00000004 was written after this job had looked what to go on from: start it again" in told
    assert train("resume=auto", "steps=4")[0] == 0
    assert [path.name for path in found_in(Path("checkpoints"))] == ["step-00000004", "step-00000002"]


def test_stopped_at_once_it_names_the_checkpoint_that_it_goes_on_from(train):
    assert train("steps=2")[0] == 0
    code, told = train("resume=auto", "time_limit=0.001")
    assert code == 75 and "stopped after 2 of 6 steps" in told
    assert "checkpoint  checkpoints/step-00000002\n" in told


def test_a_damaged_checkpoint_is_named_and_passed_over(train):
    assert train()[0] == 0
    last = Path("checkpoints/step-00000006")
    (last / "layer-00001.safetensors").write_bytes(b"")
    code, told = train(f"resume={last}", "log=none")
    assert code == 2 and "layer-00001.safetensors is damaged" in told and "try resume=checkpoints/step-00000004" in told
    code, told = train("resume=auto")
    assert (
        code == 0 and "layer-00001.safetensors is damaged" in told and "resumed from checkpoints/step-00000004" in told
    )
    assert (Path("checkpoints") / "step-00000006.superseded").is_dir()
    assert found_in(Path("checkpoints"))[0] == last
    assert list(read_run("run.h5").steps["step"]) == list(range(6))


@pytest.mark.parametrize(
    ("full", "message", "saved", "logged"),
    [
        ("log", "run.h5 cannot be written (No space left on device); its steps up to 1 are safe", [2, 4], [0, 1, 4, 5]),
        ("checkpoint", "step-00000004 cannot be written by rank 0 (No space left on device)", [2], range(6)),
        ("log checkpoint", "step-00000004 cannot be written by rank 0 (No space left on device)", [2], range(6)),
    ],
    ids=["log", "checkpoint", "both"],
)
def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_last_checkpoint(
    train, monkeypatch, full, message, saved, logged
):
    """With exit code 1 and one line. A full log alone keeps no checkpoint from being written."""
    assert train("steps=2")[0] == 0
    folder = Path.cwd()

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run(self):
        for disk in full.split():
            monkeypatch.setattr(*{"log": (runlog, "_put"), "checkpoint": (checkpoint, "_write")}[disk], refuse)
        return run_whole(self)

    run_whole = Run.run
    monkeypatch.setattr(Run, "run", run)
    code, told = train("resume=auto")
    (line,) = (line for line in told.splitlines() if line.startswith("chimera-mpi: "))
    assert code == 1 and message in line
    monkeypatch.undo()
    os.chdir(folder)
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == [f"step-{step:08d}" for step in saved]
    assert train("resume=auto")[0] == 0
    assert list(read_run("run.h5").steps["step"]) == list(logged)


def test_a_log_that_finds_room_again_has_all_steps(train, monkeypatch):
    """What it could not take at once; the run stops all the same."""
    whole, refused = runlog.RunLog.flush, []

    def flush(self, sync=False):
        if sync and not refused:
            refused.append(self)
            raise RunFailed("run.h5 is full")
        whole(self, sync)

    monkeypatch.setattr(runlog.RunLog, "flush", flush)
    code, told = train()
    assert code == 1 and "run.h5 is full: stopped after 3 of 6 steps, saved in checkpoints: go on by" in told
    assert list(read_run("run.h5").steps["step"]) == [0, 1, 2]
    assert found_in(Path("checkpoints"))[0].name == "step-00000003"


def test_the_weights_of_a_checkpoint_are_a_models(train):
    assert train("steps=2", "log=none")[0] == 0
    last = open_checkpoint(Path("checkpoints/step-00000002"))
    model = task_of(Config(**last.facts["config"])).model
    for index in range(len(model.layers)):
        make_layer(model, index, seed=9, dtype=torch.float64).load_state_dict(last.weights(index))


@pytest.mark.timeout(300)
def test_a_kill_during_a_save_costs_nothing_but_time(train, tmp_path):
    """Two ranks; one dies with half a layer on disk. The same command with resume=auto ends as if nothing had been."""
    options = ("train", "small.toml", "scheme=chimera", "depth=2", "resume=auto")
    script = str(ROOT / "tests" / "die_while_saving.py")
    done = launch.run(2, [sys.executable, script, "4", "1", *options], 120, tmp_path)
    assert done.returncode not in (0, 124), done.stderr
    assert [path.name for path in found_in(Path("checkpoints"))] == ["step-00000002"]
    assert Path("checkpoints/step-00000004.part").is_dir()
    done = launch.chimera(2, *options, cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0 and "resumed from checkpoints/step-00000002" in done.stdout, done.stderr
    assert train("log=alone.h5", "checkpoint=alone")[0] == 0
    alone, run = read_run("alone.h5"), read_run("run.h5")
    assert list(run.steps["step"]) == list(range(6)) and len(run.sessions) == 2
    np.testing.assert_allclose(run.steps["loss"], alone.steps["loss"], rtol=1e-9)
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == [f"step-0000000{n}" for n in (2, 4, 6)]


@pytest.mark.parametrize(
    ("steps", "eval_every", "done", "stream"),
    [(35, 6, 5, 5), (20, 10, 0, 10), (20, 10, 5, 5), (20, 10, 19, 1), (7, 3, 0, 1), (35, None, 0, 7)],
)
def test_a_stream_keeps_its_flushes_where_it_can(steps, eval_every, done, stream):
    assert steps_of_stream(Config(steps=steps, eval_every=eval_every), done) == stream
