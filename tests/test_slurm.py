"""Slurm jobs: their text, and what becomes of them on a private Slurm of four nodes.

Most jobs here run `stand_in.sh` in the place of `chimera-mpi train`: what is tried is the jobs' own part in it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import small

sys.path.insert(0, str(Path(__file__).parent))
from cluster import slurm as private
from cluster.place import SCRIPTS, Place, wait_for

from chimera_mpi.cli import main
from chimera_mpi.commands import slurm
from chimera_mpi.commands._ranks import refuse_singletons
from chimera_mpi.commands.slurm import Settings, What, job_script
from chimera_mpi.config import Config
from chimera_mpi.errors import InputError
from chimera_mpi.runlog import read_run

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHELL = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh")), *sorted(SCRIPTS.iterdir())]

# ---- the text

BIG = Settings(
    config="gpt2-paper.toml",
    keys=("scheme=chimera", "depth=16", "data=my corpus.h5"),
    name="paper",
    nodes=64,
    ranks_per_node=4,
    gpus_per_node=4,
    cpus_per_rank=16,
    time="2-00:00:00",
    warning_s=600,
    env="site/env.sh",
    options=("partition=gpu", "account=ml"),
)
JOBS: tuple[What, ...] = ("train", "plan_and_train", "calibrate")


@pytest.mark.parametrize("what", JOBS)
def test_the_scripts_are_what_the_command_writes(what):
    assert (SCRIPTS / f"{what}.sbatch").read_text() == job_script(Settings(what=what))


def test_a_large_job():
    assert (GOLDEN / "large.sbatch").read_text() == job_script(BIG)


def test_the_command_prints_the_job(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["slurm", "gpt-tiny", "--nodes", "2", "depth=4", "--gpus-per-node", "4", "scheme=chimera"]) == 0
    made = Settings(nodes=2, ranks_per_node=4, gpus_per_node=4, keys=("depth=4", "scheme=chimera"))
    assert capsys.readouterr().out == job_script(made)


PLANNED = ["gpt-tiny", "--job", "plan_and_train"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-tiny", "--nodes", "3", "scheme=chimera", "depth=4"], "start 4 ranks"),
        (["gpt-tiny", "--nodes", "5", "scheme=chimera", "depth=5"], "chimera needs an even depth, not 5"),
        (["PLAN", "--nodes", "2", "scheme=chimera"], "plan.toml: give chunks=none as well\n"),
        (["gpt-tiny", "scheme=1f1b", "chunks=2"], "chunks=2 is no option of scheme=1f1b: leave it out\n"),
        (["no.toml"], "neither a preset nor a file"),
        (["gpt-tiny", "dept=4"], "unknown key 'dept'"),
        (["gpt-tiny", "--env", "no.sh"], "there is no no.sh"),
        (["gpt-tiny", "--time", "1h"], "time '1h' is none of Slurm's"),
        (["gpt-tiny", "--name", "a b"], "name 'a b' has characters that a shell reads"),
        (["gpt-tiny", "--option", "a b"], "'a b' is no option of sbatch"),
        (["gpt-tiny", "--nodes", "2", "-x"], "unrecognized arguments: -x"),
        (["gpt-tiny", "checkpoint=none"], "resume=auto looks in the folder for checkpoints: give checkpoint=FOLDER"),
        (["gpt-tiny", "layers=1", "depth=4", "--nodes", "4"], "the model has 3: try depth = 1, 2\n"),
        (["gpt-tiny", "partition=[3,2]", "depth=3", "--nodes", "3"], "does not cut 10 layers into 3 stages"),
        (["gpt-tiny", "mini_batch_size=1", "--nodes", "2"], "1 samples does not fill 8 micro-batches"),
        (["gpt-tiny", "scheme=pipedream", "depth=2", "tied=true", "--nodes", "2"], "set tied=false"),
        ([*PLANNED, "--nodes", "4"], "gpt-tiny has no mini_batch_size: give --mini-batch or mini_batch_size="),
        ([*PLANNED, "mini_batch_size=8", "micro_batches=2"], "micro_batches is what plan chooses"),
        ([*PLANNED, "mini_batch_size=8", "scheme=pipedream"], "or take another scheme"),
        ([*PLANNED, "mini_batch_size=8", "scheme=nope"], "unknown scheme 'nope'"),
        ([*PLANNED, "mini_batch_size=8", "checkpoint=none"], "resume=auto looks in the folder for checkpoints"),
        ([*PLANNED, "mini_batch_size=8", "depth=3", "--nodes", "4"], "depth 3 does not divide the 4 MPI ranks"),
        (["gpt-tiny", "--option", "time=0:01:00"], "would go over --time, which the job is made for: give --time"),
        (["gpt-tiny", "--option", "nodes=5"], "would go over --nodes"),
    ],
)
def test_what_would_fail_in_the_job_is_refused_before(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(ROOT)
    plan = tmp_path / "plan.toml"
    plan.write_text('scheme = "interleaved"\ndepth = 2\nchunks = 2\n')
    assert main(["slurm", *(str(plan) if word == "PLAN" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_a_job_is_written_without_torch_and_mpi():
    words = ["slurm", "gpt-tiny", "scheme=chimera", "depth=2", "--nodes", "2"]
    run = f"import sys; from chimera_mpi.cli import main; main({words!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "mpi4py"} & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("size", "environment", "refused"),
    [
        (1, {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4, but MPI sees 1 rank"),
        (2, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS=4, but MPI sees 2 ranks"),
        (4, {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, None),  # mpiexec, which srun helps to reach the nodes
        (2, {"SLURM_NTASKS": "4", "PMI_SIZE": "2"}, None),
        (2, {"PMI_SIZE": "4"}, "PMI_SIZE=4, but MPI sees 2 ranks"),
        (1, {"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, but MPI sees 1 rank"),
        (2, {"SLURM_NTASKS": "4"}, None),  # an MPI whose launcher leaves no trace
        (1, {}, None),
    ],
)
def test_launcher_and_mpi_must_agree(size, environment, refused):
    if refused is None:
        refuse_singletons(size, environment)
    else:
        with pytest.raises(InputError, match=refused):
            refuse_singletons(size, environment)


@pytest.mark.skipif(shutil.which("shellcheck", path=os.path.dirname(sys.executable)) is None, reason="no shellcheck")
def test_shellcheck_has_nothing_to_say(tmp_path):
    made = tmp_path / "large.sbatch"
    made.write_text(job_script(BIG))
    command = [shutil.which("shellcheck", path=os.path.dirname(sys.executable)), "-x", *map(str, SHELL), str(made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300), ("5:30", 360), ("0:30", 60), ("1:00:00", 3600), ("2-0", 172_800), ("1-12:30", 131_400),
        ("1-0:0:1", 86_460), ("0", 0),
    ],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert slurm._seconds(time) == seconds


def test_a_warning_at_the_start_is_refused_where_there_is_one():
    for limit in ("6", "0:05:30", "0-0:05"):
        with pytest.raises(InputError, match=f"300 s before the end of --time {limit}, up to 60 s early.*--warning-s"):
            Settings(time=limit)
        assert Settings(time=limit, what="calibrate") and Settings(time=limit, warning_s=60)
    assert Settings(time="0") and Settings(time="7")  # no limit, and one that leaves a minute
    with pytest.raises(InputError, match="Slurm warns 65535 s before the end at most, not 65536"):
        Settings(time="2-0", warning_s=65_536)


# ---- a job by itself, beside programs that stand in for Slurm's

PROGRAMS = {
    "srun": """\
echo "$*" >>run/called
trap 'exit 75' USR1
touch run/up
for _ in {1..600}; do
    $ACT
    SLEEP 0.02
done""",
    "squeue": """\
echo >>run/asked
[ "$(wc -l <run/asked)" -gt "${BUSY:-0}" ] || exit
echo "${STATE:-RUNNING None}" """,
    "scontrol": """\
echo "$*" >>run/controlled
[ "$(wc -l <run/controlled)" -gt "${REFUSED:-0}" ]""",
    "chimera-mpi": 'exit "${PLAN:-0}"',
    "sleep": 'echo "$1" >>run/slept; [ "$1" = 5 ] || SLEEP 0.3',
}


@pytest.fixture
def alone(tmp_path):
    """Starts the script of a job in a folder."""
    for name in ("bin", "run"):
        (tmp_path / name).mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text.replace('SLEEP', str(shutil.which('sleep')))}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "env.sh").write_text('launcher=(srun)\nOMP_NUM_THREADS=1\n[ -z "$EARLY" ] || kill -"$EARLY" $$\n')
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CHIMERA_ENV": "env.sh", "RUN": "run", "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n1", "ACT": ":", "EARLY": "",
    }  # fmt: skip

    def start(script="train.sbatch", **more):
        return subprocess.Popen(
            ["bash", SCRIPTS / script, "depth=2"], cwd=tmp_path, env={**environment, **more},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


def written(folder, name):
    path = folder / "run" / name
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("given", "code", "controlled", "slept"),
    [
        ({"ACT": "exit 0"}, 0, 0, 0),
        ({"ACT": "exit 1"}, 1, 0, 0),
        ({"ACT": "exit 138"}, 138, 0, 0),  # nobody has warned
        ({"ACT": "exit 75"}, 75, 1, 0),
        ({"ACT": "exit 75", "STATE": "COMPLETING TimeLimit"}, 75, 1, 0),
        ({"ACT": "exit 75", "STATE": "CANCELLED None"}, 75, 0, 0),
        ({"ACT": "exit 75", "BUSY": "3"}, 75, 1, 3),
        ({"ACT": "exit 75", "REFUSED": "1"}, 75, 2, 1),
        ({"ACT": "exit 75", "BUSY": "99"}, 75, 0, 5),
        ({"EARLY": "USR1"}, 75, 1, 0),
        ({"EARLY": "TERM"}, 75, 1, 0),
    ],
    ids=lambda given: " ".join(given.values()) if isinstance(given, dict) else None,
)
def test_a_job_queues_itself_again_after_75_unless_it_is_cancelled(alone, tmp_path, given, code, controlled, slept):
    job = alone(**given)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == code, said
    assert written(tmp_path, "controlled") == ["requeue 7"] * controlled
    assert written(tmp_path, "slept") == ["1", *["5"] * slept]
    assert written(tmp_path, "status") == [str(code)]


@pytest.mark.parametrize(("given", "code"), [({"ACT": "exit 3"}, 3), ({"ACT": "exit 0", "PLAN": "2"}, 2)])
def test_a_calibration_or_a_plan_that_fails_is_the_jobs_status(alone, tmp_path, given, code):
    job = alone("plan_and_train.sbatch", **given)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == code and written(tmp_path, "status") == [str(code)], said
    assert len(written(tmp_path, "called")) == 1  # calibrate, and no train


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_is_handed_to_the_ranks(alone, tmp_path, number):
    job = alone()
    wait_for((tmp_path / "run" / "up").exists, 60)
    job.send_signal(number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 75 and written(tmp_path, "controlled") == ["requeue 7"], said


def test_a_task_of_an_array_has_the_keys_of_its_line(alone, tmp_path):
    (tmp_path / "run" / "points").write_text("depth=1\n\ndepth=4 steps=3")  # no newline at its end
    for task, keys in (("1", "depth=1 "), ("2", ""), ("3", "depth=4 steps=3 ")):
        job = alone(ACT="exit 75", SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID=task)
        said, _ = job.communicate(timeout=60)
        assert job.returncode == 75, said
        assert written(tmp_path, "called")[-1].endswith(f"time_limit=auto {keys}depth=2")
        assert written(tmp_path, "controlled")[-1] == f"requeue 6_{task}"
        assert written(tmp_path, f"{task}/status") == ["75"]
    job = alone(SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="4")
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 2 and "run/points has no line 4 with the keys of this task" in said


# ---- jobs

needs_slurm = pytest.mark.skipif(bool(private.why_not()), reason=str(private.why_not()))
STOPPING = {"checkpoint", "resume", "time_limit"}
needs_stopping = pytest.mark.skipif(
    not Config.model_fields.keys() >= STOPPING, reason=f"train lacks {', '.join(sorted(STOPPING))}"
)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with private.Slurm(tmp_path_factory.mktemp("slurm"), nodes=5, cpus=2) as slurm:
        yield slurm


@pytest.fixture
def place(cluster, tmp_path):
    tmp_path.chmod(0o755)
    return Place(cluster, tmp_path)


@pytest.fixture
def fake(place):
    place.use(Path(__file__).parent / "cluster" / "stand_in.sh")
    return place


def starts(run: Path) -> list[str]:
    """What each rank of each start was called with."""
    return sorted((run / "starts").read_text().splitlines())


@needs_slurm
def test_a_job_starts_a_rank_on_each_node_and_says_how(fake):
    job = fake.submit("--nodes=4", "--output=out", "scheme=chimera", "depth=4", RUN="run")
    ended = fake.cluster.wait(job, 60)
    said = (fake.folder / "out").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    words = (
        "train gpt-tiny log=run/log.h5 checkpoint=run/checkpoints resume=auto time_limit=auto scheme=chimera depth=4"
    )
    assert starts(fake.folder / "run") == [f"start 0 rank {rank} threads 2: {words}" for rank in range(4)]
    assert f"job {job}, start 1, on n[1-4]: 4 ranks, 2 threads each, by srun --mpi=pmi2 --kill-on-bad-exit=1" in said
    assert (fake.folder / "run" / "status").read_text() == "0\n"


@needs_slurm
@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_is_the_jobs_and_final(fake, code):
    job = fake.submit("--nodes=2", "--output=out", RUN="run", ACT=f"exit {code}")
    ended = fake.cluster.wait(job, 60)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", f"{code}:0", "0")
    assert (fake.folder / "run" / "status").read_text() == f"{code}\n"


@needs_slurm
def test_a_killed_rank_ends_the_job(fake):
    job = fake.submit("--nodes=2", "--output=out", RUN="run", ACT="wait")
    pid = int(fake.await_file("run/up-1").read_text())
    os.kill(pid, signal.SIGKILL)
    ended = fake.cluster.wait(job, 30)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert ended["ExitCode"] != "0:0"


@needs_slurm
def test_ranks_that_leave_one_after_the_other_keep_their_exit_code(cluster):
    leaving = """
import atexit, os, sys, time
from chimera_mpi.cli import main
atexit.register(time.sleep, int(os.environ["SLURM_PROCID"]))
main(["--version"])
sys.exit(75)
"""
    command = ["srun", "--ntasks=3", "--kill-on-bad-exit=1", sys.executable, "-c", leaving]
    assert cluster.run(*command, PYTHONPATH=str(ROOT)).returncode == 75


@needs_slurm
def test_warned_it_stops_and_goes_on_in_the_same_folder(fake):
    """Ranks leave at different moments, the first of them with 75."""
    job = fake.submit("--nodes=4", "--output=out", RUN="run", ACT="wait")
    for rank in range(4):
        fake.await_file(f"run/up-{rank}")
    fake.cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does it before the time limit
    fake.cluster.wait(job, 30, "PENDING")
    assert (fake.folder / "run" / "status").read_text() == "75\n"
    fake.cluster.start_now(job)
    ended = fake.cluster.wait(job, 60)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert [line[:14] for line in starts(fake.folder / "run")] == [
        f"start {start} rank {rank}" for start in range(2) for rank in range(4)
    ]
    said = (fake.folder / "out").read_text()
    assert "start 1, on" in said and "start 2, on" in said


@needs_slurm
def test_cancelled_it_stays_away(fake):
    job = fake.submit("--nodes=2", "--output=out", RUN="run", ACT="wait")
    fake.await_file("run/up-1")
    fake.cluster.run("scancel", job)
    fake.cluster.wait(job, 30)
    time.sleep(1)
    assert fake.cluster.job(job)["JobState"] == "CANCELLED"


@needs_slurm
def test_preempted_it_comes_back(fake):
    job = fake.submit("--nodes=4", "--output=out", RUN="run", ACT="wait")
    fake.await_file("run/up-3")
    urgent = fake.submit("--partition=urgent", "--nodes=4", "--output=urgent.out", RUN="urgent")
    assert fake.cluster.wait(urgent, 60)["JobState"] == "COMPLETED"
    fake.cluster.wait(job, 30, "PENDING", "RUNNING")
    fake.cluster.start_now(job)
    ended = fake.cluster.wait(job, 60)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert (fake.folder / "run" / "status").read_text() == "0\n"


@needs_slurm
def test_a_plan_is_made_once_and_followed(fake):
    for run in ("first", "second"):
        job = fake.submit(
            "--nodes=2", f"--output={run}.out", "precision=bf16",
            script=SCRIPTS / "plan_and_train.sbatch", RUN=run, MACHINE="here.toml",
        )  # fmt: skip
        assert fake.cluster.wait(job, 60)["JobState"] == "COMPLETED", (fake.folder / f"{run}.out").read_text()
        assert all(f"train {run}/plan.toml" in line and "precision=bf16" in line for line in starts(fake.folder / run))
    calibrated = sorted((fake.folder / "calibrate.calls").read_text().splitlines())
    assert calibrated == [f"rank {rank}: calibrate gpt-tiny precision=bf16 -o here.toml" for rank in range(2)]
    planned = (fake.folder / "plan.calls").read_text().splitlines()
    assert [line.split(": ")[1] for line in planned] == [
        f"plan gpt-tiny precision=bf16 --machine here.toml --workers 2 -o {run}/plan.toml"
        for run in ("first", "second")
    ]


SCALING = {
    "STUDY": "study", "NODES": "1 2", "SCALING": "weak", "SCHEMES": "1f1b gpipe chimera", "DEPTHS": "2",
    "MICRO_BATCHES": "2 4", "CONFIG": "gpt-tiny",
}  # fmt: skip


@needs_slurm
def test_a_study_is_an_array_of_points_and_resubmits_what_failed(fake):
    scaling = str(SCRIPTS / "scaling.sh")
    before = sorted(fake.folder.rglob("*"))
    planned = fake.run(scaling, "--dry-run", **SCALING)
    assert planned.count("to submit") == 6 and planned.count("left out") == 6
    assert "--array=1,2,3,4,5,6 --nodes=2 " in planned
    assert sorted(fake.folder.rglob("*")) == before

    told = fake.run(scaling, **SCALING, FAIL="scheme=gpipe")
    jobs = (fake.folder / "study" / "2-nodes" / "jobs").read_text().split()
    assert len(jobs) == 1 and f"submitted  job {jobs[0]}: 6 points on 2 nodes each" in told
    assert "to submit" not in fake.run(scaling, "--dry-run", **{**SCALING, "SCHEMES": "1f1b"})
    _all_ended(fake, jobs)
    points = (fake.folder / "study" / "2-nodes" / "points").read_text().splitlines()
    assert len(points) == 6
    for number, point in enumerate(points, 1):
        folder = fake.folder / "study" / "2-nodes" / str(number)
        assert len(starts(folder)) == 2 and all(f" {point}" in line for line in starts(folder))
        assert "start 1, on" in (folder / "output").read_text()
        assert (folder / "status").read_text() == ("1\n" if "gpipe" in point else "0\n")

    again = fake.run(scaling, **{**SCALING, "MICRO_BATCHES": "2 4 8"})
    assert (again.count("done"), again.count("to submit")) == (4, 5)
    _all_ended(fake, (fake.folder / "study" / "2-nodes" / "jobs").read_text().split()[1:])
    assert fake.run(scaling, "--dry-run", **SCALING).count("done") == 6


def _all_ended(place, jobs):
    for job in jobs:
        wait_for(lambda job=job: not place.cluster.run("squeue", "-h", "-j", job).stdout, 120)


# ---- real runs

STEPS = 100
KEYS = {"scheme": "chimera", "depth": 4, "micro_batches": 4, "steps": STEPS, "eval_every": 50, "spin_s": 5e-5}
BITS = ("step", "loss", "grad_norm", "learning_rate", "samples")


@pytest.fixture(scope="module")
def real(cluster, tmp_path_factory):
    place = Place(cluster, tmp_path_factory.mktemp("real"))
    place.environment |= {"CONFIG": "small.toml", "THREADS": "1"}
    place.use(None)
    small.write(place.folder, **KEYS)
    return place


@pytest.fixture(scope="module")
def straight(real):
    """The log of a run on four nodes that nothing has stopped, and its last checkpoint."""
    job = real.submit("--nodes=4", "--output=straight.out", "checkpoint_every=10", RUN="straight")
    ended = real.cluster.wait(job, 120)
    assert ended["JobState"] == "COMPLETED", (real.folder / "straight.out").read_text()
    return read_run(real.folder / "straight" / "log.h5"), last_checkpoint(real.folder / "straight")


def last_checkpoint(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob(f"checkpoints/step-*{STEPS}/*.safetensors")}


@needs_slurm
def test_a_launcher_of_another_mpi_is_refused(real):
    job = real.submit("--nodes=2", "--output=alone.out", "depth=2", RUN="alone", MPI_TYPE="none")
    ended = real.cluster.wait(job, 60)
    said = (real.folder / "alone.out").read_text()
    assert ended["JobState"] == "FAILED", said  # the code is 2, or that of the signal which ends the slower one
    assert "SLURM_STEP_NUM_TASKS=2, but MPI sees 1 rank" in said and "srun --mpi=pmi2" in said
    assert [path.name for path in (real.folder / "alone").iterdir()] == ["status"]


@needs_slurm
@needs_stopping
def test_a_run_on_four_nodes(real, straight):
    log, checkpoint = straight
    assert list(log.steps["step"]) == list(range(STEPS)) and len(log.sessions) == 1
    assert json.loads(log.attributes["hosts"]) == ["n1", "n2", "n3", "n4"]
    assert checkpoint


@needs_slurm
@needs_stopping
def test_stopped_and_queued_again_it_ends_with_the_same_bits(real, straight):
    job = real.submit("--nodes=4", "--output=run.out", "checkpoint_every=10", RUN="run")
    wait_for(lambda: any((real.folder / "run" / "checkpoints").glob("step-*")), 60)
    real.cluster.run("scancel", "--batch", "--signal=USR1", job)
    real.cluster.wait(job, 60, "PENDING")
    real.cluster.start_now(job)
    ended = real.cluster.wait(job, 120)
    said = (real.folder / "run.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    log, checkpoint = read_run(real.folder / "run" / "log.h5"), last_checkpoint(real.folder / "run")
    assert len(log.sessions) == 2
    for column in BITS:
        np.testing.assert_array_equal(log.steps[column], straight[0].steps[column])
    assert checkpoint == straight[1]


@needs_slurm
@needs_stopping
def test_of_two_jobs_in_one_folder_the_second_is_refused(real):
    alone = ("--nodes=1", "depth=1", "scheme=gpipe", "steps=1000000")
    first = real.submit(*alone, "--output=first.out", RUN="shared")
    real.await_file("shared/log.h5")
    second = real.submit(*alone, "--output=second.out", RUN="shared")
    refused = real.cluster.wait(second, 60)
    real.cluster.run("scancel", first)
    assert (refused["JobState"], refused["ExitCode"]) == ("FAILED", "2:0"), (real.folder / "second.out").read_text()
    assert real.cluster.wait(first, 30)["JobState"] == "CANCELLED"
    assert len(read_run(real.folder / "shared" / "log.h5").sessions) == 1
