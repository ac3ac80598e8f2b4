"""How tests start MPI jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path


@cache
def mpiexec() -> tuple[str, ...]:
    """The launcher that belongs to the MPI of this environment, with what it needs to put more ranks than cores."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    launcher = shutil.which("mpiexec", path=path)
    assert launcher, "no mpiexec on the PATH: pip install 'chimera-mpi[mpich]'"
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    return (launcher, "--oversubscribe", "--bind-to", "none") if is_open_mpi else (launcher,)


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """One thread a rank; Open MPI may run as root, as it must in containers."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **extra,
    }


def run(
    ranks: int,
    command: Sequence[str],
    timeout_s: float,
    cwd: Path | None = None,
    options: Sequence[str] = (),
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command on `ranks` ranks, its output captured; kill the whole job at the time limit. `options` are the
    launcher's."""
    job = subprocess.Popen(
        [*mpiexec(), *options, "-n", str(ranks), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env=environment(extra),
    )
    try:
        out, err = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # hydra and Open MPI's launcher take their ranks along
        out, err = job.communicate()
        err += f"\nstill running after {timeout_s} s: killed\n"
        return subprocess.CompletedProcess(job.args, 124, out, err)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def chimera(ranks: int, *arguments: str, timeout_s: float = 90, cwd: Path | None = None, **extra: str):
    """`mpirun -n RANKS chimera-mpi ARGUMENTS`."""
    return run(ranks, [sys.executable, "-m", "chimera_mpi", *arguments], timeout_s, cwd, **extra)
