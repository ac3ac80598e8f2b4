"""The run log: what is in it, who may write it, and that no moment of its life leaves it unreadable."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from chimera_mpi import lock, runlog
from chimera_mpi.errors import InputError, RunFailed
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.runlog import (
    EVALUATIONS,
    SPAN,
    STEPS,
    WORKERS,
    RunLog,
    StepRow,
    array_spans,
    locks_wanted,
    read_run,
    spans_array,
)
from chimera_mpi.schedule import build

ATTRIBUTES = {"config": json.dumps({"model": "gpt-tiny", "depth": 4}), "mpi": "MPICH 5.0.2", "slurm_job_id": 17}
ALWAYS = 0.0  # flush_every_s: a burst a step
NEVER = 1e9


def row(step: int) -> StepRow:
    """A step whose every figure follows from its number (or an array of them)."""
    return StepRow(step, 4 - 1e-3 * step, 0.1 * step, 1e-4 * step, 0.5, 8, 8 * (step + 1), 1e9, 0.25, step < 3)


def workers(step: int, ranks: int) -> np.ndarray:
    return step + np.arange(ranks)[:, None] + np.arange(len(WORKERS)) / 8


def write(log: RunLog, first: int, last: int, ranks: int = 2) -> None:
    for step in range(first, last + 1):
        log.step(row(step), workers(step, ranks))


def assert_whole(path: Path, ranks: int = 2, locking: bool | None = None) -> int:
    """Plain h5py reads every column, each an exact prefix of the run; the number of rows that all have."""
    with h5py.File(path, "r", locking=locking) as file:
        tables = {name: file[name][:] for name in ("steps/" + column.name for column in STEPS)}
        tables |= {f"workers/{column.name}": file["workers"][column.name][:] for column in WORKERS}
        rows = min(map(len, tables.values()))
    steps = np.arange(rows)
    wanted = row(steps)
    assert np.array_equal(tables["steps/step"][:rows], steps)
    for name in ("loss", "grad_norm", "learning_rate", "samples", "tokens"):
        assert np.array_equal(tables[f"steps/{name}"][:rows], np.broadcast_to(getattr(wanted, name), rows)), name
    assert np.array_equal(tables["steps/tokens_per_s"][:rows], 16.0 * (steps + 1))
    for i, column in enumerate(WORKERS):
        expected = steps[:, None] + np.arange(ranks) + i / 8
        assert np.array_equal(tables[f"workers/{column.name}"][:rows, :ranks], expected), column.name
    return rows


def one_line(caught: pytest.ExceptionInfo) -> str:
    text = str(caught.value)
    assert text and "\n" not in text
    return text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


@pytest.fixture
def timeline():
    return simulate(build("chimera", depth=4, micro_batches=4), Costs(forward_s=1.25, backward_s=2.5))


# ------------------------------------------------------------------------------------------- contents


def test_what_goes_in_comes_out(path, timeline):
    with RunLog.create(path, ATTRIBUTES, 2) as log:
        assert log.last_step == -1
        log.plan(timeline.spans)
        for step in range(5):
            if step == 3:
                log.spans(step, 0, timeline.spans)
                log.spans(step, 1, timeline.spans[:7])
            assert log.step(row(step), workers(step, 2))
        assert log.evaluation(4, 3.5, 1000)
    run = read_run(path)
    assert run.config == {"model": "gpt-tiny", "depth": 4}
    assert ATTRIBUTES.items() <= run.attributes.items()
    assert run.steps["samples_per_s"].tolist() == [16.0] * 5
    assert run.steps["flops_per_s"].tolist() == [2e9] * 5
    assert run.steps["warmup"].tolist() == [True, True, True, False, False]
    assert run.workers["wait_s"].tolist() == [[step + 0.125, step + 1.125] for step in range(5)]
    assert {name: values.tolist() for name, values in run.evaluations.items()} == {
        "step": [4], "loss": [3.5], "tokens": [1000]
    }  # fmt: skip
    assert run.sampled_steps == (3,)
    assert run.spans(3) == timeline.spans
    assert run.spans(3, replica=1) == timeline.spans[:7]
    assert run.timeline(3, timeline.schedule) == timeline
    assert run.planned() == run.planned(2) == timeline.spans
    assert run.planned(99) == ()
    [session] = run.sessions
    assert (session.first_step, session.ranks, session.reason) == (0, 2, "done")
    assert session.attributes == ATTRIBUTES
    assert session.start <= session.end
    with pytest.raises(InputError, match="no spans of step 2, replica 0: sampled are 3"):
        run.timeline(2, timeline.schedule)
    assert assert_whole(path) == 5


def test_spans_are_rows_and_back(timeline):
    rows = spans_array(7, 1, timeline.spans)
    assert rows.dtype == SPAN
    assert set(rows["step"]) == {7} and set(rows["replica"]) == {1}
    assert array_spans(rows) == timeline.spans
    assert array_spans(spans_array(0, 0, [])) == ()


def test_a_run_without_steps(path):
    RunLog.create(path, {}, 1).close("nothing to do")
    run = read_run(path)
    assert (run.config, run.sampled_steps, run.planned(), len(run.steps["loss"])) == ({}, (), (), 0)
    assert run.sessions[0].reason == "nothing to do"
    assert run.sessions[0].first_step == -1


def test_a_step_of_no_time_has_no_rate(path):
    with RunLog.create(path, {}, 1) as log:
        log.step(row(0)._replace(seconds=0), workers(0, 1))
    assert np.isnan(read_run(path).steps["samples_per_s"][0])


def test_an_error_ends_the_session_with_its_name(path):
    with pytest.raises(ZeroDivisionError), RunLog.create(path, {}, 1):
        _ = 1 / 0
    assert read_run(path).sessions[0].reason == "ZeroDivisionError: division by zero"


def test_attributes_may_be_long(path):
    config = json.dumps({"hosts": [f"node{i:05}" for i in range(20000)]})
    reason = "ü" * 200
    RunLog.create(path, {"config": config}, 1).close(reason)
    run = read_run(path)
    assert len(run.config["hosts"]) == 20000
    assert run.sessions[0].reason == "ü" * 64  # 128 bytes


def test_figures_of_another_number_of_ranks_are_our_mistake(path):
    with RunLog.create(path, {}, 2) as log, pytest.raises(ValueError, match=r"\(3, 5\), not \(2, 5\)"):
        log.step(row(0), workers(0, 3))


def test_the_layout_is_the_contract(path, timeline):
    with RunLog.create(path, ATTRIBUTES, 2) as log:
        log.spans(0, 0, timeline.spans)
        write(log, 0, 3)
        log.evaluation(3, 1.0, 10)
    with h5py.File(path, "r") as file:
        assert file.attrs["schema"] == runlog.SCHEMA
        assert file.attrs["config"] == ATTRIBUTES["config"]
        for group, columns in (("steps", STEPS), ("workers", WORKERS), ("evaluations", EVALUATIONS)):
            assert set(file[group]) == {column.name for column in columns} | (
                {"step", "rank"} if group == "workers" else set()
            )
            for column in columns:
                table = file[group][column.name]
                assert table.attrs["units"] == column.units
                assert table.chunks and set(table.maxshape) == {None}
                assert table.is_scale or table.dims[0][0] == file[group]["step"]
        assert file["workers/wait_s"].shape == (4, 2)
        assert file["workers/wait_s"].dims[1][0][:].tolist() == [0, 1]
        assert file["spans"].dtype == file["plan/spans"].dtype == SPAN
        assert len(file["spans"]) == len(timeline.spans)
        assert len(file["sessions"]) == 1


@pytest.mark.skipif(not shutil.which("h5dump"), reason="no h5dump")
def test_h5dump_reads_it(path, timeline):
    with RunLog.create(path, ATTRIBUTES, 2, ALWAYS) as log:
        log.spans(0, 0, timeline.spans)
        write(log, 0, 9)
        dump = subprocess.run(["h5dump", path], capture_output=True, text=True)  # while it is written
        assert dump.returncode == 0, dump.stderr
        assert '"F"' in dump.stdout and "gpt-tiny" in dump.stdout and "DIMENSION_LIST" in dump.stdout


def test_xarray_reads_it(path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    with RunLog.create(path, ATTRIBUTES, 2, ALWAYS) as log:
        write(log, 0, 9)
        steps = xarray.open_dataset(path, group="steps", engine="h5netcdf")
        assert steps.loss.sel(step=3).item() == row(3).loss
        of_ranks = xarray.open_dataset(path, group="workers", engine="h5netcdf")
        assert of_ranks.wait_s.sel(step=3, rank=1).item() == workers(3, 2)[1, 1]


# ------------------------------------------------------------------------------------------- refusals


@contextmanager
def raising(monkeypatch, module, name: str, code: int):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        yield


@contextmanager
def file_size_limit(limit_bytes: int):
    """A disk that is full: no file may grow beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_create_never_touches_what_exists(path):
    path.write_bytes(b"precious")
    with pytest.raises(InputError) as caught:
        RunLog.create(path, {}, 1)
    assert "run.h5 exists" in one_line(caught)
    assert path.read_bytes() == b"precious"
    assert os.listdir(path.parent) == ["run.h5"]


def test_create_never_replaces_what_comes_to_exist(path, monkeypatch):
    lay_out = runlog._lay_out
    monkeypatch.setattr(runlog, "_lay_out", lambda *given: (lay_out(*given), path.write_bytes(b"precious")))
    with pytest.raises(InputError, match="exists"):
        RunLog.create(path, {}, 1)
    assert path.read_bytes() == b"precious"
    assert os.listdir(path.parent) == ["run.h5"]


def test_a_draft_of_a_killed_start_is_in_nobodys_way(path):
    with RunLog.create(path, {}, 2) as log:
        write(log, 0, 3)
    moved = path.with_name("moved.h5")
    os.link(path, path.with_name("run.h5.new"))  # killed between its two names
    path.rename(moved)
    RunLog.create(path, {}, 2).close()
    assert assert_whole(moved) == 4
    assert sorted(os.listdir(path.parent)) == ["moved.h5", "run.h5"]


def test_a_link_that_leads_nowhere_is_something(path):
    path.symlink_to(path.parent / "elsewhere.h5")
    with pytest.raises(InputError, match="exists"):
        RunLog.create(path, {}, 1)


def test_the_folder_is_missing(tmp_path):
    with pytest.raises(InputError) as caught:
        RunLog.create(tmp_path / "no" / "run.h5", {}, 1)
    assert f"is {tmp_path / 'no'} a folder?" in one_line(caught)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a folder"):
        RunLog.create(tmp_path / "file" / "run.h5", {}, 1)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_the_folder_is_not_ours(path, monkeypatch, code):
    with raising(monkeypatch, runlog.os, "open", code), pytest.raises(InputError) as caught:
        RunLog.create(path, {}, 1)
    assert "ask for the right to write in" in one_line(caught)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_no_locks_are_told_at_the_start_with_the_way_out(path, monkeypatch, code):
    with raising(monkeypatch, lock.fcntl, "flock", code):
        with pytest.raises(InputError) as caught:
            RunLog.create(path, {}, 1)
        assert "HDF5_USE_FILE_LOCKING=FALSE" in one_line(caught)
        assert os.listdir(path.parent) == []
        with RunLog.create(path, {}, 2, locking=False) as log:
            write(log, 0, 3)
        with pytest.raises(InputError, match="HDF5_USE_FILE_LOCKING"):
            RunLog.append(path, {}, 2)
        with RunLog.append(path, {}, 2, locking=False) as log:
            write(log, 4, 5)
    assert assert_whole(path) == 6


def test_a_log_is_one_by_all_its_names(path):
    other = path.parent / "elsewhere" / "latest.h5"
    other.parent.mkdir()
    other.symlink_to(path)
    with RunLog.create(path, {}, 2) as log:
        write(log, 0, 3)
        with pytest.raises(InputError, match=r"latest.h5 is being written by process \d+"):
            RunLog.append(other, {}, 2)
    with RunLog.append(other, {}, 2) as log:
        write(log, 3, 5)
        with pytest.raises(InputError, match=r"run.h5 is being written by process \d+"):
            RunLog.append(path, {}, 2)
    other.unlink()
    other.hardlink_to(path)
    for name in (path, other):
        with pytest.raises(InputError) as caught:
            RunLog.append(name, {}, 2)
        assert f"{name} has 2 names" in one_line(caught)
    other.rename(path.with_name("run.h5.new"))  # as of one who was killed just when he had made it
    RunLog.append(path, {}, 2).close()
    assert assert_whole(path) == 6 and sorted(os.listdir(path.parent)) == ["elsewhere", "run.h5"]


def test_a_lock_on_a_file_that_has_lost_its_name_is_none(tmp_path, monkeypatch):
    """Though it has links: over NFS a file that another node removes keeps its number of them."""
    path, granted = tmp_path / "lock", lock.fcntl.flock

    def late(descriptor, how):
        monkeypatch.undo()
        granted(descriptor, how)
        path.rename(tmp_path / "gone")

    monkeypatch.setattr(lock.fcntl, "flock", late)
    held = lock.Lock(path)
    with pytest.raises(BlockingIOError):
        lock.Lock(path)
    held.release()
    assert os.listdir(tmp_path) == ["gone"]


def test_the_variable_that_hdf5_reads():
    assert locks_wanted({}) and locks_wanted({"HDF5_USE_FILE_LOCKING": "BEST_EFFORT"})
    assert not locks_wanted({"HDF5_USE_FILE_LOCKING": "FALSE"}) and not locks_wanted({"HDF5_USE_FILE_LOCKING": "0"})


def test_a_file_system_without_links(path, monkeypatch):
    with raising(monkeypatch, runlog.os, "link", errno.EPERM):
        RunLog.create(path, {}, 1).close()
    assert os.listdir(path.parent) == ["run.h5"]
    read_run(path)


def test_a_full_disk_at_the_start(path):
    with file_size_limit(10_000), pytest.raises(InputError) as caught:
        RunLog.create(path, {}, 1)
    assert "free some space" in one_line(caught)
    assert os.listdir(path.parent) == []


def test_a_full_disk_on_the_way_leaves_the_log_whole(path, monkeypatch):
    monkeypatch.setattr(runlog, "CHUNK_ROWS", 16)
    log = RunLog.create(path, {}, 2, ALWAYS)
    write(log, 0, 10)
    with file_size_limit(path.stat().st_size + 1000):
        with pytest.raises(RunFailed) as caught:
            write(log, 11, 100_000)
        safe = int(one_line(caught).split("steps up to ")[1].split()[0])
        assert "free some space" in str(caught.value)
        assert assert_whole(path) == safe + 1
        with pytest.raises(RunFailed):
            log.close()
    assert assert_whole(path) == safe + 1
    with RunLog.append(path, {}, 2) as log:
        assert log.last_step == safe
        write(log, safe - 5, safe + 20)
    assert assert_whole(path) == safe + 21


def test_a_disk_that_was_full_and_is_no_more(path):
    log = RunLog.create(path, {}, 2, NEVER)
    write(log, 0, 5000)
    with file_size_limit(path.stat().st_size), pytest.raises(RunFailed):
        log.flush()
    assert assert_whole(path) == 0
    write(log, 5001, 5005)
    log.close()
    assert assert_whole(path) == 5006


def test_a_log_that_another_program_empties_is_noticed(path):
    log = RunLog.create(path, {}, 2, ALWAYS)
    os.truncate(path, 0)
    with pytest.raises(RunFailed, match="another program has cut it short"):
        write(log, 0, 0)
    with pytest.raises(RunFailed):
        log.close()
    assert path.stat().st_size == 0


def broken_files(folder: Path):
    whole = folder / "whole.h5"
    with RunLog.create(whole, ATTRIBUTES, 2) as log:
        write(log, 0, 99)
    image = whole.read_bytes()
    yield folder / "missing.h5", "cannot be read .*No such file"
    yield folder, "cannot be read .*directory"
    for name, content, match in [
        ("empty", b"", "is empty"),
        ("noise", random.Random(1).randbytes(5000), "not an HDF5 file"),
        ("half", image[: len(image) // 2], "cut short or damaged .*truncated"),
        ("short by one", image[:-1], "cut short or damaged .*truncated"),
        ("zeroed", image[:96] + bytes(len(image) - 96), "cut short or damaged"),
    ]:
        (folder / name).write_bytes(content)
        yield folder / name, match
    foreign = folder / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file.attrs["schema"] = 1
    yield foreign, "not a run log"
    for schema, match in (3, "schema 3 and this version knows up to 2"), (1, "schema 1, .* this version reads 2"):
        other = folder / f"schema-{schema}.h5"
        shutil.copy(whole, other)
        with h5py.File(other, "r+") as file:
            file.attrs["schema"] = schema
        yield other, match
    partial = folder / "partial.h5"
    shutil.copy(whole, partial)
    with h5py.File(partial, "r+") as file:
        del file["steps/loss"]
    yield partial, "cut short or damaged .*loss"


def test_broken_files_are_refused_by_name_and_left_alone(tmp_path):
    for broken, match in broken_files(tmp_path):
        before = broken.read_bytes() if broken.is_file() else None
        with pytest.raises(InputError, match=match) as caught:
            read_run(broken)
        assert broken.name in one_line(caught)
        with pytest.raises(InputError, match=match):
            RunLog.append(broken, {}, 2)
        assert (broken.read_bytes() if broken.is_file() else None) == before
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".lock", ".new"))]


def test_a_log_cut_anywhere_is_refused(path, tmp_path):
    with RunLog.create(path, ATTRIBUTES, 2) as log:
        write(log, 0, 99)
    image, cut = path.read_bytes(), tmp_path / "cut.h5"
    for length in range(0, len(image), 1000):
        cut.write_bytes(image[:length])
        with pytest.raises(InputError) as caught:
            read_run(cut)
        one_line(caught)


# ------------------------------------------------------------------------------------------- one writer, many readers


OTHER = """
import sys
from chimera_mpi.errors import InputError
from chimera_mpi.runlog import RunLog
try:
    RunLog.append({!r}, {{}}, 2).close()
except InputError as error:
    print(error)
assert not {{"torch", "mpi4py"}} & set(sys.modules)
"""[1:]


def other_process(path: Path) -> str:
    """What a second program is told that wants to go on with the log."""
    return subprocess.run(
        [sys.executable, "-c", OTHER.format(str(path))], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_two_writers_are_refused(path):
    with RunLog.create(path, {}, 2, ALWAYS) as log:
        write(log, 0, 3)
        read_run(path)  # opens and closes the file in this process: must not lose the lock
        owner = f"process {os.getpid()} on {os.uname().nodename}"
        assert other_process(path) == f"{path} is being written by {owner}: wait for its end, or give another log=FILE"
        with pytest.raises(InputError, match="being written"):
            RunLog.append(path, {}, 2)
        with pytest.raises(InputError, match="exists"):
            RunLog.create(path, {}, 2)
        for mode in ("a", "r+"):
            with pytest.raises(OSError):
                h5py.File(path, mode)
        write(log, 4, 6)
    assert os.listdir(path.parent) == ["run.h5"]
    assert assert_whole(path) == 7
    assert other_process(path) == ""
    assert len(read_run(path).sessions) == 2


def test_a_deleted_log_does_not_free_its_name(path):
    with RunLog.create(path, {}, 1):
        path.unlink()
        with pytest.raises(InputError, match="being written"):
            RunLog.create(path, {}, 1)
    RunLog.create(path, {}, 1).close()


def test_a_reader_stops_no_writer(path):
    with RunLog.create(path, {}, 2) as log:
        write(log, 0, 3)
    with h5py.File(path, "r") as reader, RunLog.append(path, {}, 2, ALWAYS) as log:
        write(log, 4, 6)
        assert reader["steps/loss"][0] == row(0).loss
        assert assert_whole(path) == 7


def test_plain_readers_read_all_the_time(path):
    """Whole at each of many looks while another process writes a burst a step and takes new space all the time."""
    writer = subprocess.Popen([sys.executable, __file__, "write", str(path), "250"])
    looks, seen = 0, [0]
    while writer.poll() is None:
        if path.exists():
            seen.append(assert_whole(path))
            with h5py.File(path, "r") as file:  # kept open over several bursts
                rows = len(file["steps/loss"])
                for name in ("steps/loss", "workers/wait_s", "steps/session"):
                    assert len(file[name][:rows]) == rows
                    time.sleep(0.001)
            assert len(read_run(path).steps["loss"]) >= seen[-1]
            looks += 1
    assert writer.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
    print(f"{looks} looks, {len(set(seen))} lengths")
    assert assert_whole(path) == 250


# ------------------------------------------------------------------------------------------- resuming


def columns_of(path: Path) -> dict[str, np.ndarray]:
    run = read_run(path)
    return run.steps | run.workers


def test_resumed_steps_are_there_once_and_old_rows_untouched(path, timeline):
    with RunLog.create(path, ATTRIBUTES, 2) as log:
        log.plan(timeline.spans)
        for step in range(8):
            log.spans(step, 0, timeline.spans)
            log.step(row(step), workers(step, 2))
        log.evaluation(5, 2.0, 10)
    before = columns_of(path)
    with RunLog.append(path, {"slurm_job_id": 18}, 2) as log:
        assert log.last_step == 7
        log.plan(timeline.spans[:5])
        for step in range(4, 12):
            log.spans(step, 0, timeline.spans)
            assert log.step(row(step), workers(step, 2) + (step < 8)) is (step > 7)
        assert not log.evaluation(5, 9.0, 10)
        assert log.evaluation(10, 1.0, 10)
    run = read_run(path)
    assert assert_whole(path) == 12
    after = columns_of(path)
    assert all(np.array_equal(after[name][:8], values) for name, values in before.items())
    assert run.steps["session"].tolist() == [0] * 8 + [1] * 4
    assert run.sampled_steps == tuple(range(12))
    assert all(run.spans(step) == timeline.spans for step in range(12))
    assert run.evaluations["step"].tolist() == [5, 10]
    assert run.evaluations["loss"].tolist() == [2.0, 1.0]
    assert run.planned(7) == timeline.spans
    assert run.planned(8) == run.planned() == timeline.spans[:5]
    assert [session.first_step for session in run.sessions] == [0, 4]
    assert run.sessions[1].attributes == {"slurm_job_id": 18}
    assert run.attributes["slurm_job_id"] == 17


def test_a_session_may_follow_another_in_the_same_process(tmp_path):
    """As when ranks have died and the others go on, fewer or, with some that stood by, more."""
    path = tmp_path / "run.h5"
    with RunLog.create(path, ATTRIBUTES, 2, NEVER) as log:
        write(log, 0, 2)
        log.go_on("rank 1 died", {"death": "rank 1 died"}, 1)
        write(log, 2, 4, ranks=1)
        log.go_on("rank 0 died", {}, 3)
        log.step(row(5), workers(5, 3))
    run = read_run(path)
    assert [(s.reason, s.first_step, s.ranks) for s in run.sessions] == [
        ("rank 1 died", 0, 2), ("rank 0 died", 2, 1), ("done", 5, 3),
    ]  # fmt: skip
    assert run.sessions[1].attributes == {"death": "rank 1 died"}
    assert run.steps["session"].tolist() == [0, 0, 0, 1, 1, 2]
    assert np.isnan(run.workers["wait_s"]).tolist() == [[False, False, True]] * 3 + [[False, True, True]] * 2 + [
        [False] * 3
    ]


@pytest.mark.parametrize("writer", ["lives", "has died"])
def test_the_steps_that_a_session_lacks_are_still_its_own(tmp_path, writer):
    path, rows = tmp_path / "run.h5", [row(step) for step in range(4)]
    log = RunLog.create(path, ATTRIBUTES, 2, NEVER)
    write(log, 0, 1)
    log.flush()
    if writer == "lives":
        write(log, 2, 2)
        log.go_on("rank 1 died", {}, 1, before=rows)
    else:
        log._abandon()
        log = RunLog.append(path, {}, 1, before=rows)
    log.close("rank 0 died")
    with RunLog.append(path, {}, 1, before=rows) as log:
        write(log, 4, 4, ranks=1)
    run = read_run(path)
    assert run.steps["step"].tolist() == [0, 1, 2, 3, 4]
    assert run.steps["session"].tolist() == [0, 0, 0, 0, 2]
    assert run.steps["loss"].tolist() == [row(step).loss for step in range(5)]
    assert [session.first_step for session in run.sessions] == [0, -1, 4]
    assert np.isnan(run.workers["wait_s"][3]).all()


def test_a_run_resumed_on_more_and_on_fewer_ranks(path):
    for ranks, last in ((2, 3), (5, 7), (1, 9)):
        opened = RunLog.append(path, {}, ranks) if path.exists() else RunLog.create(path, {}, ranks)
        with opened as log:
            write(log, log.last_step + 1, last, ranks)
    run = read_run(path)
    there = np.isfinite(run.workers["wait_s"]).sum(axis=1)
    assert there.tolist() == [2] * 4 + [5] * 4 + [1] * 2
    assert [session.ranks for session in run.sessions] == [2, 5, 1]
    assert assert_whole(path, ranks=1) == 10
    with h5py.File(path, "r") as file:
        assert file["workers/rank"][:].tolist() == [0, 1, 2, 3, 4]


def test_many_sessions(path):
    RunLog.create(path, {}, 2).close()
    for session in range(12):
        with RunLog.append(path, {"restart": session, "config": "x" * 500}, 2) as log:
            write(log, log.last_step + 1, log.last_step + 3)
    run = read_run(path)
    assert [session.attributes["restart"] for session in run.sessions[1:]] == list(range(12))
    assert assert_whole(path) == 36


# ------------------------------------------------------------------------------------------- bursts


def test_rows_wait_for_the_interval_and_no_longer(path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(runlog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    on_disk = []
    with RunLog.create(path, {}, 2, flush_every_s=2) as log:
        for step in range(8):
            clock.now += 0.5
            write(log, step, step)  # row.seconds is 0.5: the fourth would end at the limit
            on_disk.append(assert_whole(path))
    assert on_disk == [0, 0, 3, 3, 3, 6, 6, 6]


def test_every_prefix_of_a_burst_is_a_whole_log(path, tmp_path, monkeypatch, timeline):
    """New chunks, index nodes that split, a resumed session, the end: after each write h5py reads the old rows."""
    monkeypatch.setattr(runlog, "CHUNK_ROWS", 8)
    monkeypatch.setattr(runlog._Bursts, "LEAD_BYTES", 1 << 14)
    writes: list[tuple[int, bytes]] = []
    put = runlog._put
    monkeypatch.setattr(runlog, "_put", lambda fd, at, data: (writes.append((at, data)), put(fd, at, data)))
    stopped, last, splits, prefixes = tmp_path / "stopped.h5", -1, 0, 0
    log = RunLog.create(path, ATTRIBUTES, 2, NEVER)
    for chunks in (1, 1.5, 64, 65, 120, 121, 122):  # a node of the index holds 64; 122 split a leaf
        old, rows = path.read_bytes(), last + 1
        writes.clear()
        last = int(8 * chunks) - 1
        write(log, rows, last)
        log.spans(last, 0, timeline.spans)
        log.flush()
        split = sum(data[:4] == b"TREE" for _, data in writes) > 2 * len(log._tables)
        splits += split
        if last < 12 or (split and last - rows < 8):
            prefixes += assert_prefixes(old, writes[:], stopped, rows, last + 1)
    assert splits >= 2
    old = path.read_bytes()
    writes.clear()
    write(log, last + 1, last + 3)
    log.close()
    prefixes += assert_prefixes(old, writes[:], stopped, last + 1, last + 4)
    old = path.read_bytes()
    writes.clear()
    RunLog.append(path, ATTRIBUTES, 2).close()
    prefixes += assert_prefixes(old, writes[:], stopped, last + 4, last + 4)
    print(f"{prefixes} prefixes")


def assert_prefixes(old: bytes, writes: list[tuple[int, bytes]], stopped: Path, at_least: int, at_most: int) -> int:
    """Stop after each of the writes; read, and now and then go on."""
    longest = max(len(old), *(at + len(data) for at, data in writes)) + 2 * runlog._Bursts.LEAD_BYTES
    image = bytearray(old)
    announced = [at for at, _ in writes].index(40)
    for done, (at, data) in enumerate(writes):
        if at == 40:  # the file is made longer before it says so
            image += bytes(longest - len(image))
        image += bytes(max(0, at + len(data) - len(image)))
        image[at : at + len(data)] = data
        if done < announced - 1 and done % 10:
            continue  # in new space, all alike
        stopped.write_bytes(image)
        assert at_least <= assert_whole(stopped) <= at_most
        if done % 25 == 0:
            with RunLog.append(stopped, {}, 2) as log:
                assert log.last_step >= at_least - 1
                write(log, max(at_least - 3, 0), at_most + 40)
            assert assert_whole(stopped) == at_most + 41
            assert len(read_run(stopped).steps["loss"]) == at_most + 41
    return len(writes)


def test_killed_at_random_moments(tmp_path):
    """kill -9: read by plain h5py, what was flushed is there, resumed with every step once."""
    killed = subprocess.run(
        [sys.executable, __file__, "kill", str(tmp_path), "20"], capture_output=True, text=True, check=True
    ).stdout
    lines = [json.loads(line) for line in killed.splitlines()]
    assert len(lines) == 20
    lost = []
    for line in lines:
        path = Path(line["path"])
        if not path.exists():
            assert line["flushed"] == -1
            RunLog.create(path, ATTRIBUTES, 2).close()
        rows = assert_whole(path)
        assert rows - 1 >= line["flushed"], "flushed rows are gone"
        lost.append(line["done"] + 1 - rows)
        before = {name: values[:rows] for name, values in columns_of(path).items()}
        with RunLog.append(path, ATTRIBUTES, 2) as log:
            assert log.last_step == rows - 1
            write(log, max(rows - 7, 0), rows + 30)
        assert assert_whole(path) == rows + 31
        after = columns_of(path)
        assert all(np.array_equal(after[name][:rows], values) for name, values in before.items())
        assert [session.reason for session in read_run(path).sessions][-1] == "done"
        assert os.listdir(path.parent) == [path.name]
    print("steps lost:", lost)


# ------------------------------------------------------------------------------------------- size and speed


@pytest.mark.parametrize(("ranks", "steps", "limit_bytes"), [(1, 100_000, 10e6), (4, 20_000, 3e6)])
def test_a_hundred_thousand_steps_are_small(path, ranks, steps, limit_bytes):
    of_workers, began = workers(0, ranks), time.process_time()
    with RunLog.create(path, ATTRIBUTES, ranks, NEVER) as log:
        for step in range(steps):
            log.step(row(step), of_workers)
            if step % 400 == 399:
                log.flush()
    seconds = time.process_time() - began
    print(f"{ranks} ranks: {path.stat().st_size / 1e6:.2f} MB, {seconds / steps * 1e6:.1f} us a step, bursts included")
    assert path.stat().st_size < limit_bytes


# ------------------------------------------------------------------------------------------- other processes


def write_many(path: Path, steps: int) -> None:
    runlog.CHUNK_ROWS = 8  # new space every few steps, below the first split of an index
    timeline = simulate(build("gpipe", depth=4, micro_batches=8), Costs())
    with RunLog.create(path, ATTRIBUTES, 2, ALWAYS) as log:
        for step in range(steps):
            log.spans(step, 0, timeline.spans[:1])
            log.step(row(step), workers(step, 2))


def kill_many(folder: Path, times: int) -> None:
    """Start writers and kill them, each at a moment of its own; a line of JSON for each."""
    rng = random.Random(7)
    for number in range(times):
        path = folder / str(number) / "run.h5"
        path.parent.mkdir()
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            write_and_tell(path, writer)
        os.close(writer)
        time.sleep(rng.uniform(0, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reader, "rb") as told:
            [done, flushed] = [[-1, -1], *np.frombuffer(told.read(), "i4").reshape(-1, 2).tolist()][-1]
        print(json.dumps({"path": str(path), "done": done, "flushed": flushed}), flush=True)


def write_and_tell(path: Path, pipe: int) -> None:
    with suppress(BaseException):
        runlog.CHUNK_ROWS = 8
        with RunLog.create(path, ATTRIBUTES, 2, 0.55) as log:  # a step says that it takes 0.5 s: a burst every 50 ms
            for step in range(100_000):
                log.step(row(step), workers(step, 2))
                os.write(pipe, np.array([step, log._on_disk], "i4").tobytes())
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_many(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        kill_many(Path(sys.argv[2]), int(sys.argv[3]))
