"""What the doctor says of machines that are made up, of this one alone, and of a job of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import launch
import pytest

from chimera_mpi.cli import main
from chimera_mpi.commands import _findings as findings
from chimera_mpi.commands import _host_checks as checks
from chimera_mpi.commands import _job_checks as together
from chimera_mpi.commands._host import Host, Library, Share
from chimera_mpi.commands._slurm_checks import slurm

ROOT = Path(__file__).parent.parent
MPICH = Library("MPICH Version: 5.0.2", "multiple", 2**28 - 1, 1)
OPEN_MPI = Library("Open MPI v5.0.10, package: Open MPI", "multiple", 2**31 - 1, 1)
HYDRA, ORTE = "HYDRA build details:\n    Version: 5.0.2", "mpirun (Open MPI) 5.0.10"


def answers(table: Mapping[str, str]) -> Callable[..., str]:
    """Programs that print what stands beside the beginning of their command lines, and others that are not there. A
    format of times in their environment stands before these."""

    def ask(command, env=MappingProxyType({})):
        given = " ".join([*(f"{name}={env[name]}" for name in ("SLURM_TIME_FORMAT",) if name in env), *command])
        return next((out for asked, out in table.items() if given.startswith(asked)), "")

    return ask


def a_host(library=MPICH, share=Share(1, 4, 4), programs=MappingProxyType({}), cores=4, **environ) -> Host:
    return Host(library, share, Path("runs"), environ, cores, answers(programs))


def one(found) -> findings.Finding:
    return found if isinstance(found, findings.Finding) else next(iter(found))


# ---- machines that are made up


@pytest.mark.parametrize(
    ("check", "host", "state", "said"),
    [
        (checks.mpi_library, a_host(), "ok", "MPICH Version: 5.0.2"),
        (checks.thread_level, a_host(MPICH._replace(level="serialized")), "warning", "progress=poll"),
        (checks.launcher, a_host(MPICH._replace(size=4), PMI_SIZE="4"), "ok", "4 ranks"),
        (checks.launcher, a_host(PMI_SIZE="4"), "error", "PMI_SIZE=4, but MPI sees 1 rank"),
        (checks.launcher, a_host(OMPI_COMM_WORLD_SIZE="2"), "error", "MPI4PY_MPIABI=openmpi"),
        (checks.launcher, a_host(SLURM_STEP_NUM_TASKS="8"), "error", "srun --mpi=pmi2 for MPICH"),
        (checks.launcher, a_host(), "ok", "1 rank"),
        (checks.mpiexec, a_host(programs={"mpiexec": HYDRA}), "ok", "MPICH"),
        (checks.mpiexec, a_host(programs={"mpiexec": ORTE}), "warning", "MPI4PY_MPIABI=openmpi"),
        (checks.mpiexec, a_host(OPEN_MPI, programs={"mpiexec": ORTE}), "ok", "Open MPI"),
        (checks.mpiexec, a_host(OPEN_MPI, programs={"mpiexec": HYDRA}), "warning", "MPI4PY_MPIABI=mpich"),
        (checks.mpiexec, a_host(), "warning", "none on the PATH"),
        (checks.cores, a_host(share=Share(4, 4, 4)), "ok", "4 ranks of 1 thread on 4 cores"),
        (checks.cores, a_host(share=Share(8, 4, 4)), "warning", "start at most 4 ranks"),
        (checks.cores, a_host(share=Share(4, 4, 4), OMP_NUM_THREADS="4"), "warning", "set OMP_NUM_THREADS=1"),
        (checks.cores, a_host(share=Share(2, 8, 1), cores=8), "warning", "--cpus-per-task=4"),
        (checks.cores, a_host(share=Share(2, 1, 1), cores=8), "warning", "bind them to more cores"),
        (checks.cores, a_host(share=Share(1, 2, 2), cores=8), "ok", "of which it has 8"),
        (checks.waiting, a_host(share=Share(1, 2, 2, "waits spin 50 us")), "ok", "waits spin 50 us"),
        (checks.timer, a_host(), "ok", "us late"),
    ],
)
def test_a_check_says_what_it_finds_and_what_to_do(check, host, state, said):
    found = one(check(host))
    assert found.state == state
    assert said in found.what + found.remedy
    assert bool(found.remedy) == (state != "ok")


def test_without_mpi_nothing_is_said_of_it():
    without = a_host(None)
    of_mpi = (checks.mpi_library, checks.thread_level, checks.largest_tag, checks.launcher)
    assert [check(without) for check in of_mpi] == [None] * 4
    assert checks.mpiexec(without) is None
    assert checks.mpiexec(a_host(PMI_SIZE="2")) is None  # the ranks are there: how others are started matters no more


def test_memory_that_ranks_share(tmp_path):
    there = Host(MPICH, Share(1, 1, 1), tmp_path, shared_memory=tmp_path)
    assert "free in" in checks.shared_memory(there).what
    assert (
        "by messages" in checks.shared_memory(Host(MPICH, Share(1, 1, 1), tmp_path, shared_memory=tmp_path / "no")).what
    )


def test_what_killed_jobs_left_in_memory_that_ranks_share(tmp_path, monkeypatch):
    shared, process = tmp_path / "shm", tmp_path / "proc" / "7"
    shared.mkdir()
    process.mkdir(parents=True)
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "sm_segment.node.0", "another"):
        (shared / name).write_bytes(bytes(1 << 20))
    (process / "maps").write_text(f"7f0000000000-7f0000100000 rw-s 00000000 00:1 2 {shared}/mpich_shm_2_0\n")
    host = Host(MPICH, Share(1, 1, 1), tmp_path, shared_memory=shared, processes=process.parent)
    found = checks.shared_memory(host)
    assert found.state == "ok"
    assert found.what.endswith("2.1 MB in 2 files of MPI jobs that were killed")
    monkeypatch.setattr(checks, "FEW_SHARED_BYTES", 1 << 20)
    found = checks.shared_memory(host)
    assert found.state == "warning"
    assert found.remedy.endswith(f"cd {shared} && rm -f mpich_shm_* sm_segment.* vader_segment.*")


@pytest.mark.parametrize(
    ("free", "states"), [(1 << 40, "ok ok"), (1 << 27, "warning warning"), (1 << 10, "error warning")]
)
def test_room(free, states, tmp_path, monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: type("Room", (), {"free": free}))
    host = Host(MPICH, Share(1, 1, 1), tmp_path, shared_memory=tmp_path)
    assert f"{checks.disk_room(host).state} {checks.shared_memory(host).state}" == states


def test_packages_are_held_against_what_is_asked_for():
    wanted = ["torch<3,>=2.9", 'tomli>=2; python_version < "3.0"', 'tokenizers>=0.21; extra == "hf"', "h5py>=3.12"]
    good = {"torch": "2.13.0+cpu", "h5py": "3.16.0"}
    assert list(checks.mismatches(wanted, good)) == []
    assert list(checks.mismatches(wanted, {**good, "tokenizers": "0.19"})) == [
        (False, "tokenizers is 0.19, not >=0.21", "tokenizers>=0.21")
    ]
    assert list(checks.mismatches(wanted, {"torch": "2.1"})) == [
        (True, "torch is 2.1, not <3,>=2.9", "torch<3,>=2.9"),
        (True, "h5py is not there", "h5py>=3.12"),
    ]


def test_file_locks_are_really_tried(tmp_path, monkeypatch):
    host = Host(MPICH, Share(1, 1, 1), tmp_path / "runs")
    assert (checks.file_locks(host).state, list(tmp_path.iterdir())) == ("ok", [])
    off = Host(MPICH, Share(1, 1, 1), tmp_path, {"HDF5_USE_FILE_LOCKING": "FALSE"})
    assert checks.file_locks(off).state == "warning"

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    found = checks.file_locks(host)
    assert found.state == "error" and "HDF5_USE_FILE_LOCKING=FALSE" in found.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_takes_no_files_is_named(tmp_path, monkeypatch):
    """Not even the question whether there is one to remove."""

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    host = Host(MPICH, Share(1, 1, 1), tmp_path)
    monkeypatch.setattr("os.open", refused)
    monkeypatch.setattr("os.unlink", refused)
    found = checks.file_locks(host)
    assert found.state == "error" and "(Read-only file system)" in found.what
    assert "give another log=FILE" in found.remedy


def test_a_name_that_is_too_long_is_looked_for_above(tmp_path):
    assert checks.existing(tmp_path / ("x" * 300) / "runs") == tmp_path


# ---- Slurm

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_ID": "0"}
SQUEUE = "SLURM_TIME_FORMAT=standard squeue"  # whatever the user's own is
CALM = {
    SQUEUE: "2999-01-01T00:00:00",
    "scontrol write": "#!/bin/bash\n#SBATCH --signal=B:USR1@300\n",
    "scontrol show job": "JobId=7 Requeue=1",
}


@pytest.fixture
def examined(tmp_path):
    """What is found of a job; `srun` are the options of a command of it, `of` the job that this says it is of."""

    def examine(library=MPICH._replace(size=4), programs=MappingProxyType({}), srun="-K1", of="7", **environ):
        process = tmp_path / "42"
        process.mkdir()
        for name, text in ("comm", "srun\n"), ("environ", f"A=b\0SLURM_JOB_ID={of}\0"):
            (process / name).write_text(text)
        (process / "cmdline").write_text("\0".join(["srun", "--mpi=pmi2", *srun.split(), "chimera-mpi", "doctor", ""]))
        host = a_host(library, programs={**CALM, **programs}, **JOB, **environ)
        return {found.name: found for found in slurm(replace(host, processes=tmp_path))}

    return examine


def test_a_job_as_it_should_be(examined):
    found = examined(SLURM_MPI_TYPE="pmi2")
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "job 7, 4 tasks on n[1-2], --mpi=pmi2" in found["Slurm"].what
    assert "B:USR1@300" in found["Slurm requeue"].what
    assert not list(slurm(a_host()))


@pytest.mark.parametrize(
    ("name", "state", "said", "given"),
    [
        ("Slurm", "error", "srun --mpi=pmix", {"library": OPEN_MPI, "SLURM_MPI_TYPE": "pmi2"}),
        ("Slurm", "error", "srun --mpi=pmi2", {"library": MPICH, "SLURM_MPI_TYPE": "none"}),
        ("Slurm", "ok", "--mpi=none", {"SLURM_MPI_TYPE": "none"}),  # mpiexec within the job
        ("Slurm deaths", "ok", "srun ends all", {"srun": "--kill-on-bad-exit=1"}),
        ("Slurm deaths", "ok", "srun ends all", {"srun": "--kill-on-bad-exit -N 2"}),
        ("Slurm deaths", "warning", "--kill-on-bad-exit=1", {"srun": "-N 2"}),
        ("Slurm deaths", "warning", "--kill-on-bad-exit=1", {"srun": "--kill-on-bad-exit=0"}),
        ("Slurm deaths", "warning", "--kill-on-bad-exit=1", {"of": "8"}),
        ("Slurm deaths", "ok", "SLURM_KILL_BAD_EXIT", {"srun": "", "SLURM_KILL_BAD_EXIT": "1"}),
        ("Slurm deaths", "ok", "this cluster", {"srun": "", "programs": {"scontrol show config": "KillOnBadExit = 1"}}),
        ("Slurm limit", "ok", "none", {"programs": {SQUEUE: "NONE"}}),
        ("Slurm limit", "warning", "give seconds", {"programs": {SQUEUE: ""}}),
        ("Slurm requeue", "warning", "sbatch --requeue", {"programs": {"scontrol show job": "Requeue=0"}}),
        ("Slurm requeue", "ok", "no --signal", {"programs": {"scontrol write": "#!/bin/bash"}}),
    ],
)
def test_a_job_as_it_should_not_be(name, state, said, given, examined):
    found = examined(**given)[name]
    assert found.state == state
    assert said in found.what + found.remedy


# ---- ranks together


def who(rank: int) -> str:
    return f"rank {rank} on n{rank}"


def test_who_differs_is_named():
    rows = [{"torch": "2.13.0", "cores": "4"}] * 3 + [{"torch": "2.9.1", "cores": "4"}]
    assert list(together.outliers(rows)) == [("torch", 3, "2.9.1", "2.13.0")]
    assert list(together.outliers(rows[:3])) == []


def test_clocks_apart():
    assert together.judge_clocks([0, 0.01, -0.3], who).state == "ok"
    found = together.judge_clocks([0, 0.01, -3600.0], who)
    assert found.state == "warning" and "rank 2 on n2 is -3600.0 s" in found.what


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        (["locked", "locked"], "ok", "all nodes see"),
        (["locked", "free"], "warning", "-o flock"),
        (["locked", "nothing"], "error", "rank 1 on n1 does not see"),
    ],
)
def test_a_folder_of_several_nodes(seen, state, said):
    found = together.judge_folder(Path("/scratch"), seen, who)
    assert found.state == state
    assert said in found.what + found.remedy


def test_what_another_node_sees_of_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "SEEN_WITHIN_S", 0.0)
    lock = together._locked(tmp_path)
    assert together._seen(lock.path) == "locked"
    lock.release()
    assert together._seen(lock.path) == "nothing"
    lock.path.touch()
    assert together._seen(lock.path) == "free"


@pytest.mark.parametrize(
    ("share", "thread", "state"), [(0.9, False, "ok"), (0.1, False, "warning"), (0.1, True, "warning")]
)
def test_overlap_is_judged(share, thread, state):
    found = together.judge_overlap("sum over 2 ranks", 1e-3, share, thread)
    assert found.state == state
    assert ("progress=thread" in found.remedy) == (state == "warning" and not thread)
    assert together.judge_overlap("sum", 1e-3, share, thread, by_ranks=True).state == "ok"


# ---- the command


def test_lines_and_their_sum():
    told = findings.lines([findings.ok("a", "fine"), findings.warning("long", "odd", "do this")])
    assert told == [
        "ok       a     fine",
        "warning  long  odd",
        "               -> do this",
        "1 ok, 1 to look at, 0 wrong",
    ]
    assert findings.worst([]) == "ok"
    assert findings.worst([findings.error("a", "b", "c"), findings.ok("a", "b")]) == "error"


def test_a_machine_without_mpi(tmp_path):
    """The library that mpi4py is told to load is not there."""
    done = subprocess.run(
        [sys.executable, "-m", "chimera_mpi", "doctor"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("error    MPI library    cannot be loaded: ")
    assert "-> pip install 'chimera-mpi[mpich]'" in done.stdout
    assert "file locks" in done.stdout and not done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_torch(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--log", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("error    torch          cannot be loaded: import of torch halted")
    assert main(["doctor", "--parity"]) == 2
    assert "torch cannot be loaded: " in capsys.readouterr().err


def test_keys_are_for_parity(capsys):
    assert main(["doctor", "scheme=chimera"]) == 2
    assert "scheme=chimera is for --parity" in capsys.readouterr().err


def test_two_ranks(tmp_path):
    done = launch.chimera(2, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert told["worst"] in ("ok", "warning")
    assert {
        *("MPI library", "thread level", "largest tag", "launcher", "packages", "cores", "waiting", "timer"),
        *(
            "shared memory",
            "file locks",
            "disk room",
            "devices",
            "ranks alike",
            "clocks",
            "ring",
            "all-reduce",
            "overlap",
        ),
    } <= found.keys()
    assert found["launcher"]["what"] == "2 ranks"
    assert found["ranks alike"]["what"] == "2 ranks on 1 node: one software, as many cores"
    assert found["ring"]["what"].startswith("right") and found["all-reduce"]["what"].startswith("right")
    assert list(tmp_path.iterdir()) == []
