"""The Slurm job around a process: what Slurm's own programs and variables tell of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..errors import InputError
from ..stopping import slurm_end, slurm_job
from ._findings import Finding, error, from_message, ok, warning
from ._host import Host

PMI_OF = {"Open MPI": ("pmix",), "MPICH": ("pmi2", "pmi1", "pmix", "cray_shasta")}  # srun --mpi= that can start them


def slurm(host: Host) -> Iterator[Finding]:
    """Nothing outside of a job."""
    job = slurm_job(host.environ)
    if job is None:
        return
    yield _start(host, job)
    yield _end(host, job)
    yield _deaths(host, job)
    yield _requeue(host, job)


def _start(host: Host, job: str) -> Finding:
    tasks, nodes = host.environ.get("SLURM_NTASKS", "?"), host.environ.get("SLURM_JOB_NODELIST", "?")
    kind = host.environ.get("SLURM_MPI_TYPE", "")
    told = f"job {job}, {tasks} tasks on {nodes}" + (f", --mpi={kind}" if kind else "")
    is_alone = host.library and host.library.size == 1 and tasks != "1"
    if kind and is_alone and host.family and not kind.startswith(PMI_OF[host.family]):
        remedy = f"srun --mpi={PMI_OF[host.family][0]} (srun --mpi=list shows what there is)"
        return error("Slurm", f"{told}, which does not start {host.family}", remedy)
    return ok("Slurm", told)


def _end(host: Host, job: str) -> Finding:
    try:
        end = slurm_end(job, host.environ, _as_run(host.ask))
    except InputError as untold:
        return from_message("Slurm limit", "warning", str(untold).replace("time_limit=auto: ", "", 1))
    if end is None:
        return ok("Slurm limit", "none")
    left_s = (end - datetime.now()).total_seconds()
    return ok("Slurm limit", f"in {left_s / 60:.0f} minutes: time_limit=auto checkpoint=FOLDER stops before it")


def _as_run(ask: Callable[..., str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: Sequence[str], env: Mapping[str, str], **how: object) -> subprocess.CompletedProcess[str]:
        answer = ask(command, env)
        return subprocess.CompletedProcess(command, int(not answer), answer, "no answer")

    return run


def _deaths(host: Host, job: str) -> Finding:
    """Whether a rank that dies takes the others along."""
    if any(re.search(r"\0(-K|--kill-on-bad-exit)(=?1)?\0", command) for command in _sruns(host.processes, job)):
        return ok("Slurm deaths", "srun ends all ranks when one dies")
    if host.environ.get("SLURM_KILL_BAD_EXIT") == "1":
        return ok("Slurm deaths", "SLURM_KILL_BAD_EXIT=1 ends all ranks when one dies")
    if re.search(r"KillOnBadExit\s*=\s*1", host.ask(["scontrol", "show", "config"])):
        return ok("Slurm deaths", "this cluster ends all ranks when one dies")
    remedy = "srun --kill-on-bad-exit=1, or export SLURM_KILL_BAD_EXIT=1"
    return warning("Slurm deaths", "a rank that is killed may leave the others waiting", remedy)


def _sruns(processes: Path, job: str) -> Iterator[str]:
    """The command lines of this job's srun, words between NULs, where it runs on this node."""
    number = job.partition("_")[0]
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "comm").read_text().strip() == "srun":
                environ = (process / "environ").read_text(errors="replace").split("\0")
                if {f"SLURM_JOB_ID={number}", f"SLURM_ARRAY_JOB_ID={number}"} & set(environ):
                    yield (process / "cmdline").read_text(errors="replace")


def _requeue(host: Host, job: str) -> Finding:
    """Whether the job is told before it ends, and comes back."""
    script, shown = (
        host.ask(["scontrol", "write", "batch_script", job, "-"]),
        host.ask(["scontrol", "show", "job", job]),
    )
    asked = re.search(r"^#SBATCH\s+--signal[= ](\S+)", script, re.MULTILINE)
    signal = f"--signal={asked[1]}" if asked else "no --signal in its script"
    if "Requeue=0" in shown:
        return warning("Slurm requeue", f"no, {signal}", "sbatch --requeue, so that it can go on after preemption")
    return ok("Slurm requeue", f"{'yes' if shown else 'not told'}, {signal}")
