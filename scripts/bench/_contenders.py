"""Contenders that wait for their turn: groups of ranks, started once, that train what they are told and tell the time.

The one who compares (`Group`) and each rank (`Line`) speak in lines of JSON over a socket. A rank that waits reads
its socket and takes no core; a contender is built for its turn and gone after it, so that only one is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from _bench import mpiexec, save

RANKS = 2
START_LIMIT_S, TURN_LIMIT_S, STOP_LIMIT_S = 300, 900, 60
TRAINING = Path(__file__).with_name("_training.py")


@dataclass(frozen=True)
class Shape:
    """A GPT without dropout and ties, and `samples` samples of `sequence` tokens in each micro-batch."""

    layers: int = 8
    hidden: int = 256
    head_size: int = 64
    sequence: int = 128
    vocabulary: int = 8192
    samples: int = 8

    @property
    def heads(self) -> int:
        return max(1, self.hidden // self.head_size)


@dataclass(frozen=True)
class Turn:
    """`steps` steps of one contender, after `warm_up` more, of `micro_batches` for all ranks together."""

    contender: str
    micro_batches: int
    shape: Shape
    steps: int
    warm_up: int = 1
    cuts: str = "stages"  # what the partition makes even: stages, or the workers' sums of them
    order: str = "drawn"  # of our ops: as the scheme is drawn, or the best found for the stages' costs
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of all steps that are timed."""
        return self.steps * self.micro_batches * self.shape.samples


class Told(NamedTuple):
    """What one rank has to tell of a turn: the seconds of each step, and numbers of each step by name."""

    seconds: list[float]
    numbers: dict[str, list[float]]


class Refused(Exception):
    """A contender cannot do what it was asked to; the message says why."""


class Line:
    """Both ends of a line between the one who compares and a rank."""

    def __init__(self, connection: socket.socket):
        self._file = connection.makefile("rw")

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """None when the other end is gone."""
        text = self._file.readline()
        return json.loads(text) if text else None


def connect(rank: int) -> Line:
    """A rank's end of its line."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SOCKET])
    line = Line(connection)
    line.send(rank)
    return line


class Group:
    """The ranks of one family of contenders."""

    def __init__(self, family: str, lines: list[Line]):
        self.family, self._lines = family, lines

    def take(self, turn: Turn, ranks: int = RANKS) -> list[Told]:
        """Let the first `ranks` ranks take a turn, from one moment on. Raises Refused."""
        lines = self._lines[:ranks]
        refusals = [why for why in self._ask(lines, asdict(turn)) if why]
        if refusals:
            raise Refused(refusals[0])
        return [Told(**told) for told in self._ask(lines, "go")]

    def _ask(self, lines: list[Line], message: Any) -> list[Any]:
        for line in lines:
            line.send(message)
        answers = [line.receive() for line in lines]
        if None in answers:
            raise RuntimeError(f"a rank of {self.family} ended before it had answered")
        return [answer["told"] for answer in answers]


@contextmanager
def group(family: str, commands: list[list[str]], **environment: str) -> Iterator[Group]:
    """Start the ranks of a family by `commands`, and end them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/line"
        listener.bind(path)
        listener.listen()
        listener.settimeout(START_LIMIT_S)
        env = {**os.environ, **ENVIRONMENT, **environment, SOCKET: path}
        processes = [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) for command in commands]
        connections = []
        try:
            lines = {}
            while len(lines) < RANKS:
                connection, _ = listener.accept()
                connection.settimeout(TURN_LIMIT_S)
                connections.append(connection)
                line = Line(connection)
                lines[line.receive()] = line
            yield Group(family, [lines[rank] for rank in sorted(lines)])
            for connection in connections:
                connection.shutdown(socket.SHUT_RDWR)
            for process in processes:
                process.wait(STOP_LIMIT_S)
        finally:
            for process in processes:
                process.terminate()
                process.wait()


SOCKET = "BENCH_SOCKET"
BIG_BLOCKS = {"BENCH_BIG_BLOCKS": "1"}  # let glibc keep big blocks
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def over_mpi(*prefixes: Sequence[str]) -> list[list[str]]:
    """The command of an MPI job of all ranks; each rank's own begins with its prefix, if there are any."""
    rank = [sys.executable, str(TRAINING), "ours"]
    first, *others = [["-n", "1", *prefix, *rank] for prefix in prefixes] or [["-n", str(RANKS), *rank]]
    return [[*mpiexec(), *first, *(word for words in others for word in [":", *words])]]


def by_themselves(family: str) -> list[list[str]]:
    """The commands of ranks that find each other without a launcher."""
    return [[sys.executable, str(TRAINING), family, str(rank)] for rank in range(RANKS)]


def alternating(contenders: Sequence[str], reference: str, every: int) -> list[str]:
    """The turns of a round: the reference comes first, last, and after each `every` contenders."""
    turns = []
    for start in range(0, len(contenders), every):
        turns += [reference, *contenders[start : start + every]]
    return [*turns, reference]


def around(turns: Sequence[str], values: Sequence[float | None], reference: str, at: int) -> float:
    """The mean of the reference's values just before and just after turn `at`."""
    places = [place for place, name in enumerate(turns) if name == reference]
    before, after = max(p for p in places if p < at), min(p for p in places if p > at)
    return statistics.mean(value for value in (values[before], values[after]) if value is not None)


class Spread(NamedTuple):
    """Of several measurements."""

    least: float
    median: float
    most: float

    def show(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.most:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def machine() -> dict[str, Any]:
    return {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": version("torch")}


def tell(text: str) -> None:
    print(text, flush=True)


def record(args: argparse.Namespace, rows: Sequence[Any], **more: Any) -> None:
    """Write what was asked for and what was found to the file that --json names."""
    asked = {name: str(value) for name, value in vars(args).items()}
    save(args.json, {**more, "arguments": asked, "machine": machine(), "rows": [asdict(row) for row in rows]})
