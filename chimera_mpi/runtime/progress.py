"""Let messages move while a rank computes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType

from mpi4py import MPI

from ..errors import InputError

EVERY_S = 1e-3


class ProgressThread:
    """Drives MPI between a rank's own calls, as a context: while the rank is inside of it.

    MPI moves a large message, or the next part of an all-reduce, only when somebody calls it, and a rank that
    computes does so between its ops alone. Between ranks that share memory the one that waits does the copying;
    over a network both ends must call. A probe for what never comes is such a call, and touches no message.
    """

    def __init__(self, comm: MPI.Comm, every_s: float = EVERY_S):
        """`comm` is any on which nobody sends to himself. Raises InputError where MPI takes one thread at a time."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise InputError("progress=thread needs an MPI with MPI_THREAD_MULTIPLE: set progress=poll")
        self._comm, self._every_s = comm, every_s
        self._wanted, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._drive, name="mpi-progress", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._wanted.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted.clear()

    def close(self) -> None:
        """End the thread; before `comm` is freed."""
        self._closed = True
        self._wanted.set()
        self._thread.join()

    def _drive(self) -> None:
        with suppress(MPI.Exception):  # of a communicator that is revoked, of which those who wait learn themselves
            while self._wanted.wait() and not self._closed:
                self._comm.Iprobe(self._comm.rank)
                time.sleep(self._every_s)
