"""torch.profiler over some steps of a run: of each rank a Chrome trace, which has the ops of the schedule by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile, record_function

from ..schedule import Op
from .tensors import Tensors
from .worker import Handler, Worker


def place_of(log: Path, rank: int) -> Path:
    """Where the profile of a rank goes, beside the log."""
    return log.with_name(f"{log.stem}-profile-rank{rank}.json.gz")


class Recorder:
    """Records a worker in the steps that are `wanted`; all ranks have one, and write when the last of them is done."""

    def __init__(self, world: MPI.Intracomm, worker: Worker, wanted: range, path: Path, device: torch.device):
        self.told = list[str]()  # on rank 0, once it is written: where, or why not
        self._world, self._worker, self._wanted, self._path = world, worker, wanted, path
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = None

    @contextmanager
    def over(self, steps: range) -> Iterator[None]:
        """Around a pass over the schedule, which does `steps`: all are recorded where one of them is wanted.
        Collective."""
        if steps.stop <= self._wanted.start or steps.start >= self._wanted.stop:
            yield
            return
        with self._worker.here.excused("the start of a profile"):
            self._start()
        name = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
        with self._worker.handling(named), record_function(name):
            yield
        if steps.stop >= self._wanted.stop:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if there is anything that has not been. Collective."""
        if self._profile is None:
            return
        with self._worker.here.excused("a profile"):
            self._profile.stop()
            problem = self._write(self._profile)
            self._profile = None
            problems = self._world.gather(problem) or []
        others = ", and one of each other rank" if len(problems) > 1 else ""
        refused = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        self.told = refused or [f"{self._path}{others}"]

    def abandon(self) -> None:
        """Record no more, and write nothing: a rank has died."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start(self) -> None:
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()

    def _write(self, recorded: profile) -> str:
        """Why it could not be written, or nothing. It has its name when it is whole."""
        draft = self._path.with_name(f"{self._path.name}.new.gz")
        try:
            if self._path.exists():
                return f"{self._path} is there already, and is not replaced"
            recorded.export_chrome_trace(str(draft))
            draft.rename(self._path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            return f"{self._path} cannot be written ({error.strerror})"
        return ""


def named(handler: Handler) -> Handler:
    """The same, with the op's name on what it does, and on its wait."""
    wait, act = handler

    def named_wait(op: Op) -> Tensors:
        with record_function(f"{op} waits"):
            return wait(op)

    def named_act(op: Op, received: Tensors) -> None:
        with record_function(str(op)):
            act(op, received)

    return named_wait, named_act
