"""When a run's checkpoints are written, by which ranks, and which one it goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from .checkpoint import (
    NAME,
    Checkpoint,
    Choice,
    Draft,
    LayerFile,
    choose_named,
    choose_newest,
    found_in,
    open_checkpoint,
)
from .errors import RunFailed, refusing
from .host import free_memory
from .runtime.agreement import agree
from .runtime.grid import Comm
from .runtime.pipeline import Pipeline

LEAST_FREE = 0.2  # of the machine's memory: below, layers are not copied, and the run waits until they are on disk

Facts = Mapping[str, Any]


class Saver:
    """Writes checkpoints while the run goes on. All methods are collective and belong between two steps.

    Each rank copies the layers that it answers for, and a thread of its own writes the copies. Once all ranks are
    through, which they find out between two later steps, rank 0 gives the checkpoint its name. A failure on one rank
    is a RunFailed on all of them at the same step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path,
        keep: int,
        least_free: float = LEAST_FREE,
        attached: Mapping[str, bytes] = {},
    ):
        """`attached` are files that go into every checkpoint, by name."""
        self.pipeline, self.folder, self.keep, self.least_free = pipeline, folder, keep, least_free
        self.attached = attached
        self.world, self.patience = pipeline.grid.world, pipeline.patience
        self.newest: Path | None = None  # of those that this run has written, or goes on from in its folder
        self.newest_step = -1
        self.saved = -1  # the step of the last save that has begun, or of the checkpoint that is gone on from
        self.seconds = 0.0  # that the longest save has taken, from its beginning to its name
        self._began_s = 0.0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._draft: Draft | None = None
        self._work: Future[Any] = _done({})
        self._next: Callable[[dict[int, LayerFile]], Path] | None = None  # what rank 0 does once all are through

    def go_on_from(self, path: Path, step: int) -> None:
        """What the checkpoint at `path` holds, of so many steps, need not be written again, if it is in the folder; not
        so of one that was set aside: with it begins a course of which the folder has nothing."""
        if path.parent.resolve() == self.folder.resolve() and NAME.fullmatch(path.name):
            self.saved = self.newest_step = step
            self.newest = path

    def save(self, step: int, facts: Facts, wait: bool) -> None:
        """Write what the run is after `step` steps; before, `wait` for the last one, and for this one if asked."""
        self.finish()
        if step != self.saved:
            since, self.saved, self._began_s = self.saved, step, time.monotonic()
            draft = self._draft = Draft(self.folder, step)
            self._work = self._begin(draft)
            self._next = lambda files: draft.commit(files, facts, self.keep, since, self.attached)
        if wait:
            self.finish()

    def poll(self) -> None:
        """See how far the ranks are. Costs nothing while nothing is being written, else an all-reduce of 16 bytes."""
        if self._draft is None or not self._all_are_through():
            return
        if self._next is None:
            self._draft, self.newest, self.newest_step = None, self._work.result(), self.saved
            self.seconds = max(self.seconds, time.monotonic() - self._began_s)
            return
        everyone = self.world.gather(self._work.result())
        if everyone is None:
            self._work = _done(self._draft.path)
        else:
            files = {index: file for of_rank in everyone for index, file in of_rank.items()}
            self._work = self._thread.submit(self._next, files)
        self._next = None

    def finish(self) -> None:
        """Wait until what is being written has its name."""
        while self._draft is not None:
            self.patience.until(self._work.done)
            self.poll()

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False)

    def abandon(self) -> None:
        """Leave what is being written as it is, once this rank writes it no more. Not collective."""
        self._draft = None
        self._thread.shutdown()

    def _begin(self, draft: Draft) -> Future[dict[int, LayerFile]]:
        """Write what there is no room to copy at once, and the rest in the background."""
        written: dict[int, LayerFile] = {}
        copies: dict[int, dict] = {}
        failure: OSError | None = None
        for index, state in self.pipeline.layer_states():  # to its end, as it is collective
            try:
                if free_memory() > self.least_free:
                    copies[index] = {name: tensor.clone() for name, tensor in state.items()}
                elif failure is None:
                    written[index] = draft.write(index, state)
            except OSError as error:
                failure = error

        def write() -> dict[int, LayerFile]:
            if failure is not None:
                raise failure
            for index in list(copies):
                written[index] = draft.write(index, copies.pop(index))
            return written

        return self._thread.submit(write)

    def _all_are_through(self) -> bool:
        """Raises RunFailed on all ranks if one has failed."""
        done = self._work.done()
        error = self._work.exception() if done else None
        left = np.array([not done, error is not None], dtype=np.int64)
        self.patience.wait(self.world.Iallreduce(MPI.IN_PLACE, left))
        if left[1]:
            self._fail(error)
        return not left[0]

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, OSError):
            raise error  # nothing that a user could help
        assert self._draft is not None
        draft, self._draft = self._draft, None
        self.patience.until(self._work.done)  # what is given back must not be written anew
        everyone = self.world.allgather(None if error is None else _told(error))
        if self.world.rank == 0:
            draft.abandon()
        rank, reason = next((rank, text) for rank, text in enumerate(everyone) if text)
        left = found_in(self.folder)
        remedy = f"{left[0]} is the last one there" if left else "no other one is there"
        raise RunFailed(f"{draft.path} cannot be written by rank {rank} ({reason}): {remedy}", on_all=True)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _told(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or f"{type(error).__name__}: {' '.join(str(error).split())}"


def find(world: Comm, asked: str | None, folder: Path | None) -> Choice:
    """The checkpoint that `resume` asks for, all of it verified. Collective. Raises InputError on all ranks."""
    if asked is None:
        return Choice(None)
    if asked == "auto":
        assert folder is not None
        return find_last(world, folder)
    return find_named(world, Path(asked), "resume={}".format)


def find_last(world: Comm, folder: Path) -> Choice:
    """The last one in a folder that is whole, if any is there. Collective. Raises InputError on all ranks."""
    listed = _listed(world, folder)
    return choose_newest(listed, partial(_verified, world))._replace(among=tuple(listed))


def find_named(world: Comm, path: Path, taking: Callable[[Path], str]) -> Choice:
    """The one at `path`, or the last one in it. Collective. Raises InputError on all ranks if that is not whole; by
    `taking`, a path in words, it says how another one is taken."""
    within = _listed(world, path)
    listed = within or _listed(world, path.parent)
    chosen = within[0] if within else path
    return choose_named(chosen, listed, partial(_verified, world), taking)._replace(among=tuple(listed))


def _verified(world: Comm, path: Path) -> Checkpoint:
    checkpoint = agree(world, lambda: open_checkpoint(path))
    agree(world, lambda: checkpoint.verify(range(world.rank, len(checkpoint.files), world.size)))
    return checkpoint


def _listed(world: Comm, folder: Path) -> list[Path]:
    def listed() -> list[Path]:
        with refusing(f"{folder} cannot be read"):
            return found_in(folder) if world.rank == 0 else []

    return world.bcast(agree(world, listed))
