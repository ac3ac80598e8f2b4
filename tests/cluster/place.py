"""A folder on a private Slurm from which jobs of `scripts/slurm/` are submitted."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.slurm import Slurm

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still not {condition} after {timeout_s} s"
        time.sleep(0.05)


class Place:
    """A folder that jobs are submitted in, with the environment that env.sh is to find."""

    def __init__(self, cluster: Slurm, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.environment = {"CHIMERA_ENV": str(SCRIPTS / "env.sh"), "VENV": str(folder / "venv")}
        (folder / "venv" / "bin").mkdir(parents=True)

    def use(self, program: Path | None) -> None:
        """`program` is called in the place of chimera-mpi; None: this environment's chimera-mpi."""
        bin = self.folder / "venv" / "bin"
        (bin / "activate").write_text(f"PATH={bin}:{os.path.dirname(sys.executable)}:$PATH\n")
        command = f'exec {program} "$@"' if program else f'exec {sys.executable} -m chimera_mpi "$@"'
        (bin / "chimera-mpi").write_text(
            f"#!/bin/bash\nexport PYTHONPATH={ROOT}\nexport PYTHON={sys.executable}\n{command}\n"
        )
        (bin / "chimera-mpi").chmod(0o755)

    def submit(self, *words: str, script: Path = SCRIPTS / "train.sbatch", **environment: str) -> str:
        return self.cluster.submit(script, *words, cwd=self.folder, **self.environment, **environment)

    def run(self, *command: str, **environment: str) -> str:
        done = self.cluster.run(
            "bash", "-c", 'cd "$0" && exec "$@"', str(self.folder), *command, timeout_s=120,
            **self.environment, **environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def await_file(self, name: str, timeout_s: float = 60) -> Path:
        wait_for((self.folder / name).exists, timeout_s)
        return self.folder / name
