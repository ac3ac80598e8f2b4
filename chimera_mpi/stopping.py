"""Ends of a run before its last step: a signal, or the end of the time that a job has."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from .errors import InputError

OF_OTHER_QUEUES = (signal.SIGUSR2, signal.SIGXCPU)  # LSF and Grid Engine warn by them; others may have other uses
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, *OF_OTHER_QUEUES)
AGAIN = 75  # EX_TEMPFAIL of sysexits.h
ECHO_S = 1.0  # launchers pass on what a terminal has sent already: an INT so soon after another is the same one
EXIT_S = 5.0  # to close log and MPI
WRITE_BYTES_PER_S = 100e6  # of a checkpoint, before one has been measured
LAPS = 50  # of which the longest counts, unless what comes now and then comes less often
SQUEUE_S = 60.0  # that a busy controller may take to answer


class End(NamedTuple):
    """Why a run ended, in a line, and the exit code that tells it: 0 done, 1 failed, 75 saved and to be run again."""

    reason: str
    code: int


DONE = End("done", 0)


class Signals:
    """Notes the first signal that asks this process to stop, within its `with`. A second INT interrupts at once.

    Those of other queues are let be where they are ignored, or a tool has them. Outside of the main thread, where
    Python handles no signals, it notes none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._interrupted_s = math.inf
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            used = [number for number in OF_OTHER_QUEUES if signal.getsignal(number) != signal.SIG_DFL]
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS if number not in used}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hush(self) -> None:
        """Let no more of them, but an interrupt, disturb the end of this process, which is near."""
        for number in self._before.keys() - {signal.SIGINT}:
            del self._before[number]
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted_s > ECHO_S:
                raise KeyboardInterrupt
            self._interrupted_s = min(self._interrupted_s, now)


@dataclass
class TimeLimit:
    """When a run must have ended, by `time.monotonic`. It learns how long steps and checkpoints take."""

    end_s: float
    name: str
    save_s: float = 0.0  # of a checkpoint, while none has been measured
    laps: int = LAPS
    _longest: deque[tuple[int, float]] = field(default_factory=deque)  # of the last laps: those longer than all after
    _lap: int = 0
    _at_s: float | None = None

    def is_near(self, now_s: float, save_s: float = 0.0) -> bool:
        """Whether to stop after the next pass, which is when all have heard; called once between two passes. The
        longest checkpoint took `save_s`, if there was one."""
        if self._at_s is not None:
            self._note(now_s - self._at_s)
        self._at_s = now_s
        pass_s = self._longest[0][1] if self._longest else 0.0
        return must_stop(self.end_s - now_s, pass_s, save_s or self.save_s)

    def _note(self, lap_s: float) -> None:
        self._lap += 1
        while self._longest and self._longest[-1][1] <= lap_s:
            self._longest.pop()
        self._longest.append((self._lap, lap_s))
        if self._longest[0][0] <= self._lap - self.laps:
            self._longest.popleft()


def must_stop(left_s: float, pass_s: float, save_s: float) -> bool:
    """Whether one more pass, of steps or with an evaluation, would leave too little time to stop after the one that
    follows it."""
    return left_s < 2 * pass_s + 1.5 * save_s + EXIT_S


def save_seconds(parameters: int) -> float:
    """How long a first checkpoint may take: weights, masters and two moments of AdamW."""
    return 16 * parameters / WRITE_BYTES_PER_S


@dataclass
class Stops:
    """What may end a run early, as rank 0 weighs it up."""

    signals: Signals = field(default_factory=Signals)
    limit: TimeLimit | None = None

    def why(self, numbers: Sequence[float], save_s: float = 0.0) -> str:
        """Why to stop, or nothing. `numbers` are the signals that the ranks have noted, 0 for none; the longest
        checkpoint took `save_s`."""
        for rank, number in enumerate(numbers):
            if number:
                return f"{signal.Signals(int(number)).name} on rank {rank}"
        return self.limit.name if self.limit and self.limit.is_near(time.monotonic(), save_s) else ""


def find_limit(
    asked: str | float | None, began_s: float, environ: Mapping[str, str], save_s: float, laps: int = LAPS
) -> TimeLimit | None:
    """The limit that `time_limit` asks for: seconds since `began_s`, or the end of this Slurm job, if it has one. The
    longest of the last `laps` passes counts.

    Raises InputError if Slurm does not tell.
    """
    if asked is None:
        return None
    if not isinstance(asked, str):
        return TimeLimit(began_s + asked, f"time_limit={asked:g}", save_s, laps)
    job = slurm_job(environ)
    end = slurm_end(job, environ) if job else None
    if end is None:
        return None
    left_s = end.timestamp() - time.time()  # the difference of two local times forgets that clocks are changed
    return TimeLimit(time.monotonic() + left_s, f"Slurm's end of job {job} at {end:%H:%M:%S}", save_s, laps)


def share_limit(limit: TimeLimit | None, bcast: Callable[[Any], Any]) -> TimeLimit | None:
    """The limit that rank 0 has found, on all ranks: each has a clock of its own. Collective, as is `bcast`."""
    told = bcast(limit and (limit.end_s - time.monotonic(), limit.name, limit.save_s, limit.laps))
    return limit or (TimeLimit(time.monotonic() + told[0], *told[1:]) if told else None)


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """This job as squeue knows it alone: the number of an array is that of all its tasks too."""
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def slurm_end(
    job: str, environ: Mapping[str, str], run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> datetime | None:
    """When Slurm will end the job, in local time; None if it has no limit. Where it does not answer, what it told the
    job when it started. Raises InputError."""
    try:
        return _asked_end(job, environ, run)
    except InputError:
        if (told := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
            return datetime.fromtimestamp(int(told))
        raise


def _asked_end(
    job: str, environ: Mapping[str, str], run: Callable[..., subprocess.CompletedProcess[str]]
) -> datetime | None:
    command = ["squeue", "-h", "-j", job, "-o", "%e"]
    environ = {**environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        answer = run(command, env=environ, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _untold(command, str(error)) from None
    if answer.returncode:
        raise _untold(command, answer.stderr)
    return parse_end(answer.stdout, command)


def parse_end(text: str, command: Sequence[str] = ("squeue",)) -> datetime | None:
    """The time in what squeue prints of `%e`. Raises InputError."""
    said = text.strip()
    if said.upper() in ("NONE", "N/A", "UNLIMITED", "NOT_SET"):
        return None
    try:
        return datetime.fromisoformat(said)
    except ValueError:
        raise _untold(command, f"it said {said!r}") from None


def _untold(command: Sequence[str], why: str) -> InputError:
    reason = " ".join(why.split())
    return InputError(
        f"time_limit=auto: `{' '.join(command)}` told no time: {reason}; give seconds, or time_limit=none"
    )
