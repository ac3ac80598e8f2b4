"""Programs of a test's cluster: are they here, and started so that they end with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def missing(*programs: str) -> str | None:
    """Which of these programs this machine lacks, in words."""
    lacking = [program for program in programs if shutil.which(program, path=search_path()) is None]
    return f"there is no {', '.join(lacking)} here" if lacking else None


def search_path() -> str:
    """Daemons are in folders that a user's PATH may leave out."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin", "/usr/local/sbin"])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Processes:
    """What was started, to be ended in reverse; the kernel ends what a killed test leaves."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment, self._started = dict(environment), list[subprocess.Popen[bytes]]()

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def end(self, grace_s: float = 5) -> None:
        for process in reversed(self._started):
            with suppress(ProcessLookupError):
                process.terminate()
        for process in reversed(self._started):
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._started.clear()
