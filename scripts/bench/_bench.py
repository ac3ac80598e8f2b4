"""What the benchmarks share: launching ranks of ours and of the peer, medians, tables, JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).with_name("peer.py")


@cache
def mpiexec() -> tuple[str, ...]:
    """The launcher that belongs to this environment's MPI, allowed to put more ranks than cores."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        raise SystemExit("no mpiexec on the PATH: pip install 'chimera-mpi[mpich]'")
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    return (launcher, "--oversubscribe", "--bind-to", "none") if is_open_mpi else (launcher,)


def environment(**extra: str) -> dict[str, str]:
    """One thread a rank, and this checkout's package."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        **extra,
    }


def run_ours(ranks: int, *arguments: str) -> str:
    """The output of `mpiexec -n RANKS python ARGUMENTS`; ends this process if that fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started([[*mpiexec(), "-n", str(ranks), sys.executable, *arguments]], [{}], **pipes) as (job,):
        out, err = job.communicate()
    if job.returncode:
        raise SystemExit(f"{' '.join(arguments)} on {ranks} ranks failed:\n{out}{err}")
    return out


def emulate(ranks: int, *options: object) -> dict[str, Any]:
    """What `chimera-mpi bench emulate` finds on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        run_ours(ranks, "-m", "chimera_mpi", "bench", "emulate", *map(str, options), "--json", str(found))
        return json.loads(found.read_text())


def run_peer(ranks: int, **what: Any) -> dict[str, Any]:
    """What `peer.py` finds on so many ranks, started as torchrun would; ends this process if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PEER), json.dumps({**what, "folder": folder})]
        extras = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(ranks)]
        log = Path(folder) / "log"
        with log.open("w") as said, started([command] * ranks, extras, stdout=said, stderr=said) as jobs:
            while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
                time.sleep(0.1)
            if any(job.poll() for job in jobs):
                raise SystemExit(f"a rank of the peer failed:\n{log.read_text()}")
        return json.loads((Path(folder) / "found.json").read_text())


@contextmanager
def started(
    commands: Sequence[Sequence[str]], extras: Sequence[dict[str, str]], **streams: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes, and none of them left behind: not after an error, and not when this one is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    jobs = [
        subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, env=environment(**extra), **streams)
        for command, extra in zip(commands, extras, strict=True)
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.terminate()  # MPI's launchers take their ranks along


def spread(numbers: Sequence[float]) -> float:
    """Longest less shortest, over the median."""
    return (max(numbers) - min(numbers)) / median(numbers)


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column holds names."""
    print(title)
    table = Table(box=box.SIMPLE_HEAD)
    for column, head in enumerate(heads):
        table.add_column(head, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def save(path: Path | None, found: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
