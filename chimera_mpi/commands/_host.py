"""What the checks of `doctor` look at, all in one value, so that tests can make one up."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ._ranks import LAUNCHERS

FAMILIES = {  # by what their libraries and launchers say of themselves
    "Open MPI": ("Open MPI", "OpenRTE"),
    "MPICH": ("MPICH", "HYDRA", "MVAPICH", "Intel(R) MPI"),
}


class Library(NamedTuple):
    """The MPI library of this process; `text` is its own word for itself, `level` that for the threads it takes."""

    text: str
    level: str
    largest_tag: int
    size: int


class Share(NamedTuple):
    """Of a node: its ranks, the cores that these may use together, those of this rank, and how it waits."""

    ranks: int
    cores: int
    own_cores: int
    waits: str = ""

    @property
    def threads(self) -> int:
        """What `train` gives a rank by itself."""
        return max(1, min(self.own_cores, self.cores // self.ranks))


def ask(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a program prints, in this process's environment or another; nothing where it is not there or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        return "" if done.returncode else done.stdout + done.stderr
    return ""


@dataclass(frozen=True)
class Host:
    """All that a check may look at. `library` is None where MPI cannot be loaded. `folder` is that of logs."""

    library: Library | None
    share: Share
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    machine_cores: int = 1
    ask: Callable[..., str] = ask
    shared_memory: Path = Path("/dev/shm")
    processes: Path = Path("/proc")

    @property
    def family(self) -> str:
        """That of its MPI library."""
        return family_of(self.library.text) if self.library else ""

    @property
    def is_launched(self) -> bool:
        return any(name in self.environ for name in LAUNCHERS)


def family_of(text: str) -> str:
    return next((name for name, marks in FAMILIES.items() if any(mark in text for mark in marks)), "")
