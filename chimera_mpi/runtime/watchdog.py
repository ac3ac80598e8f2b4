"""Ends a job in which a rank hangs or has left, and says where each rank is: a thread of each rank.

The threads have a communicator of their own. While its worker is in a step, each looks once a second whether an op has
begun or ended since. The first that has seen none for too long asks the others. If none of them has an excuse, such
as an evaluation, it prints what they say and ends the job. A rank that says nothing has no excuse: its interpreter
lock is held for good, and after a while its own C runtime prints its stack.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ..errors import complain
from ..schedule import Kind, Op, Schedule, from_elsewhere
from .grid import Comm, Grid, holders
from .worker import Whereabouts

TICK_S = 1.0
ANSWERS_S = 5.0  # that ranks have to say where they are
TIMES, LEAST_S = 20, 60.0  # of the longest pass, and seconds, until a silence is too long
AT_FIRST_S = 1800.0  # the same before that is known: first passes build what later ones have
PASSES = 2  # that must have been measured before
ANSWER_BYTES, LINE = 1 << 14, 1000  # and letters
ASK, ANSWER = 1, 2


class Report(NamedTuple):
    """What a rank says of itself; `excuse` is empty where it has none."""

    excuse: str
    line: str
    stack: str

    def encoded(self) -> NDArray[np.uint8]:
        """In as many bytes as an answer has; the outermost frames go first where it has too few."""
        head = f"{self.excuse}\0{self.line}\0".encode()[: ANSWER_BYTES // 2]
        tail = self.stack.encode()[-(ANSWER_BYTES - len(head)) :]
        return np.frombuffer((head + tail).ljust(ANSWER_BYTES, b"\n"), dtype=np.uint8).copy()

    @staticmethod
    def decoded(answer: NDArray[np.uint8]) -> Report:
        return Report(*answer.tobytes().decode(errors="replace").rstrip().split("\0", 2))


class Transfer(NamedTuple):
    """A message under way, and the memory that MPI reads or writes until it is through."""

    request: MPI.Request
    memory: NDArray[np.uint8]


def under_way(transfers: Sequence[Transfer]) -> list[Transfer]:
    return [transfer for transfer in transfers if not transfer.request.Test()]


class Watchdog:
    """All ranks of `grid` make it alike, in their main threads, and close it once they are through."""

    def __init__(
        self,
        grid: Grid,
        here: Whereabouts,
        waits_for: Callable[[Op], str],
        limit_s: float | None = None,
        end: Callable[[str], None] | None = None,
        lets_leave: bool = False,
    ):
        """Silence for `limit_s` is too long, by default a multiple of what `measured` is told. `waits_for` says what an
        op waits for, from which ranks; `end` prints a text and ends all ranks. Whether one `lets_leave` others, because
        MPI tells who waits for them. Collective."""
        self.here, self.waits_for, self.end = here, waits_for, end or _end_by(grid.world)
        self.limit_s = AT_FIRST_S if limit_s is None else limit_s
        self._is_auto, self._passes_s = limit_s is None, [0.0]
        self._main = threading.get_ident()
        self._silence = Silence()
        self.world, self.patience = grid.world.Dup(), grid.patience
        grid.others.append(self.world)
        self._next = None if lets_leave else _Neighbour.of(self.world, grid)
        self._talks = self.world.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._question = np.zeros(1, dtype=np.uint8)
        self._sent, self._late = list[Transfer](), list[Transfer]()
        self._asked = self._listen()
        self._leaving, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def measured(self, pass_s: float) -> None:
        """A pass over the schedule took so long."""
        if self._is_auto:
            self._passes_s = [*self._passes_s[-10:], pass_s]
            if len(self._passes_s) > PASSES:
                self.limit_s = max(LEAST_S, TIMES * max(self._passes_s))

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.stop()

    def close(self) -> None:
        """The ranks are through, and may leave. Collective."""
        self._leaving.set()
        self.patience.wait(self.world.Ibarrier())
        self.stop()
        self.world.Free()

    def stop(self) -> None:
        """Watch no more; others may still do. A second time it does nothing."""
        if self._closing.is_set():
            return
        self._leaving.set()
        self._closing.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._talks:
            for request in (self._asked, *(late.request for late in self._late)):
                with suppress(MPI.Exception):  # of one who has died
                    request.Cancel()
                    request.Wait()
        if self._next:
            self._next.close()

    def _watch(self) -> None:
        self._leave_stack()
        while not self._closing.wait(TICK_S):
            self._answer()
            if self._next and self._next.has_left() and not self._leaving.is_set():
                self.end(f"rank {self._next.rank} has left before the end: ending the job")
            silent_s = self._silence.after(TICK_S, (self.here.step, self.here.op, self.here.acts))
            if self.here.step < 0 or self.here.excuse:
                self._silence.break_()
            elif silent_s > self.limit_s + _turn(self.world.rank):
                self._alarm(silent_s)
            self._leave_stack()

    def _leave_stack(self) -> None:
        """See that the C runtime prints all stacks of this process if this thread does not run for too long."""
        if sys.__stderr__ is not None:
            with suppress(ValueError, OSError):  # no file to print to
                faulthandler.dump_traceback_later(self.limit_s + 2 * TICK_S, file=sys.__stderr__)

    def _alarm(self, silent_s: float) -> None:
        """Ask all where they are, and end the job unless one of them has an excuse."""
        faulthandler.cancel_dump_traceback_later()  # this one runs
        reports = self._ask()
        excused = [report.excuse for report in reports if report and report.excuse]
        if excused or self._leaving.is_set():
            self._silence.break_()
        else:
            asker = f"rank {self.world.rank} has seen no op begin or end for {silent_s:.0f} s"
            self.end("\n".join([f"{asker} (watchdog_s={self.limit_s:g}): ending the job", *told(reports)]))

    def _ask(self) -> list[Report | None]:
        """What each rank says; None of those that do not answer."""
        reports: list[Report | None] = [None] * self.world.size
        reports[self.world.rank] = self._report()
        if not self._talks:
            return reports
        with suppress(MPI.Exception):  # a connection to one that is gone
            self._collect(reports)
        return reports

    def _collect(self, reports: list[Report | None]) -> None:
        """Fill in what the others answer in time."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        answers = [np.empty(ANSWER_BYTES, dtype=np.uint8) for _ in others]
        arriving = {
            rank: Transfer(self.world.Irecv(answer, rank, ANSWER), answer)
            for rank, answer in zip(others, answers, strict=True)
        }
        question = np.zeros(1, dtype=np.uint8)
        self._sent += [Transfer(self.world.Isend(question, rank, ASK), question) for rank in others]
        until_s = time.monotonic() + ANSWERS_S
        try:
            while arriving and time.monotonic() < until_s:
                self._answer()
                for rank in [rank for rank, answer in arriving.items() if answer.request.Test()]:
                    reports[rank] = Report.decoded(arriving.pop(rank).memory)
                time.sleep(0.01)
        finally:
            self._late += arriving.values()  # their answers are to this question, whenever they come

    def _listen(self) -> MPI.Request:
        return self.world.Irecv(self._question, MPI.ANY_SOURCE, ASK) if self._talks else MPI.REQUEST_NULL

    def _answer(self) -> None:
        """Tell those who ask, who then see to the rest."""
        with suppress(MPI.Exception):  # of one who has died
            self._answer_all()

    def _answer_all(self) -> None:
        if not self._talks:
            return
        status = MPI.Status()
        while self._asked.Test(status):
            self._silence.break_()
            answer = self._report().encoded()
            self._sent.append(Transfer(self.world.Isend(answer, status.Get_source(), ANSWER), answer))
            self._asked = self._listen()
        self._sent, self._late = under_way(self._sent), under_way(self._late)

    def _report(self) -> Report:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)) if frame else "no stack\n"
        return Report(self.here.excuse, self._line()[:LINE], stack)

    def _line(self) -> str:
        """Where the main thread is, which goes on meanwhile."""
        step, op, acts = self.here.step, self.here.op, self.here.acts
        if self.here.excuse:
            return f"is in {self.here.excuse}"
        if step < 0:
            return "is between two steps"
        if op is None:
            return f"step {step}: waits until others have taken what it has sent"
        what = f"step {step}, op {op}"
        return f"{what}: at work" if acts else f"{what}: waits for {self.waits_for(op)}"


class Silence:
    """Adds up the seconds without a change, as long as this process runs: not those for which it was stopped."""

    def __init__(self) -> None:
        self.seconds, self._seen = 0.0, object()

    def after(self, seconds: float, seen: object) -> float:
        self.seconds = self.seconds + seconds if seen == self._seen else 0.0
        self._seen = seen
        return self.seconds

    def break_(self) -> None:
        self.seconds = 0.0


class _Neighbour:
    """The process of the next rank on this node."""

    def __init__(self, rank: int, descriptor: int):
        self.rank, self._poll, self._descriptor = rank, select.poll(), descriptor
        self._poll.register(descriptor, select.POLLIN)

    @staticmethod
    def of(world: Comm, grid: Grid) -> _Neighbour | None:
        """None where a rank has none, or the system does not tell when a process ends. Collective."""
        node = grid.together(world)
        processes = node.allgather((world.rank, os.getpid(), _process_namespace()))
        rank, process, namespace = processes[(node.rank + 1) % node.size]
        node.Free()
        if rank == world.rank or namespace is None or namespace != _process_namespace():
            return None
        try:
            return _Neighbour(rank, os.pidfd_open(process))
        except (AttributeError, OSError):
            return None

    def has_left(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._descriptor)


def _process_namespace() -> str | None:
    """What the numbers of processes mean something in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _turn(rank: int) -> float:
    """So that one rank asks, and the others are asked."""
    return min(rank, 10) * 2 * TICK_S


def told(reports: Sequence[Report | None]) -> list[str]:
    """A line for each rank, then the stack of each."""
    lines = [f"rank {rank}: {report.line if report else 'does not answer'}" for rank, report in enumerate(reports)]
    stacks = [
        f"rank {rank}: {line}" for rank, report in enumerate(reports) if report for line in report.stack.splitlines()
    ]
    return [*lines, *stacks]


def awaited(schedule: Schedule, grid: Grid, op: Op) -> str:
    """What a worker of this rank's pipeline group waits for before `op`, and from which ranks."""
    first = grid.replica * grid.depth
    if op.kind is Kind.UPDATE:
        workers = holders(schedule, [op.stage])
        ranks = sorted(group * grid.depth + worker for group in range(grid.width) for worker in workers)
        return f"gradients of stage {op.stage} from ranks {', '.join(map(str, ranks))}, and their norm from all"
    names = [f"{need} from rank {first + schedule.worker(need)}" for need in from_elsewhere(schedule, op)]
    return ", ".join(names) or "nothing"


def _end_by(world: Comm) -> Callable[[str], None]:
    def end(text: str) -> None:
        complain(f"chimera-mpi: {text}")
        time.sleep(0.5)  # launchers drop what a rank wrote just before it aborts
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            world.Abort(1)
        os._exit(1)

    return end
