"""Wait without taking the cores from those that compute."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from mpi4py import MPI

MOST_FILES = 1024  # that select() can watch


@dataclass(frozen=True)
class Patience:
    """Poll without pause for `spin_s`, then sleep between polls, from `nap_s` up to `longest_nap_s`.

    A blocking MPI wait would spin for good, and on shared cores keep its neighbours from computing. Where a doorbell
    rings for what is awaited naps grow sooner, and a ring is followed by polls without pause again: MPI may need a few
    to take a message in.
    """

    spin_s: float
    nap_s: float = 50e-6
    longest_nap_s: float = 1e-3
    alarm: Callable[[], None] | None = None  # called between naps; sees to it that what will not come ends in an error

    @staticmethod
    def for_node(ranks: int, cores: int) -> Patience:
        """Ranks with cores of their own spin longer; ranks that share cores yield them soon."""
        return Patience(spin_s=50e-6) if ranks > cores else Patience(spin_s=2e-3)

    def __str__(self) -> str:
        return f"waits spin {self.spin_s * 1e6:.0f} us, then sleep"

    def until(self, done: Callable[[], bool], bell: Doorbell | None = None) -> None:
        """Return once `done()`, which drives MPI's progress by itself."""
        if done():
            return
        sleep, growth = (bell.wait, 1.5) if bell else (_sleep, 1.05)
        nap = self.nap_s
        awake = time.perf_counter()
        while not done():
            if time.perf_counter() - awake > self.spin_s:
                if sleep(nap):
                    awake = time.perf_counter()
                nap = min(nap * growth, self.longest_nap_s)
                if self.alarm:
                    self.alarm()

    def wait(self, *requests: MPI.Request) -> None:
        """Return once all `requests` are complete."""
        pending = list(requests)
        self.until(lambda: MPI.Request.Testall(pending))

    def outlive(self, *requests: MPI.Request) -> None:
        """Return once none of `requests` is under way any more: those of a revoked communicator end in an error."""
        for request in requests:
            replace(self, alarm=None).until(partial(_has_ended, request))


class Doorbell:
    """Wakes ranks of this node that wait for something from this one, and this one when another rings.

    A ring is an empty datagram. It may come early, late or not at all: whoever waits looks for himself. Without rings
    a rank that waits must wake and poll, so often that it takes time from those that compute, or so seldom that it
    finds out late.
    """

    def __init__(self, listener: socket.socket, addresses: Mapping[int, bytes]):
        """`addresses` are those of the ranks that can be reached."""
        self.listener, self.addresses = listener, addresses

    @staticmethod
    def between(comm: MPI.Intracomm, node: MPI.Intracomm) -> Doorbell | None:
        """A doorbell of each rank of `comm` that has neighbours, which are `node`; None where rings do not arrive,
        as in containers that share memory but no network. Collective over `node`.
        """
        listener = _listener() if node.size > 1 else None
        everyone = node.allgather(listener and listener.getsockname())
        if listener and None not in everyone:
            addresses = dict(zip(node.group.Translate_ranks(None, comm.group), everyone, strict=True))
            bell = Doorbell(listener, {rank: address for rank, address in addresses.items() if rank != comm.rank})
            if bell._is_heard(node):
                return bell
        if listener:
            listener.close()
        return None

    def _is_heard(self, node: MPI.Intracomm) -> bool:
        """Whether each rank hears its neighbour, which says who it is: elsewhere others may have the same addresses."""
        after = node.allgather(self.listener.getsockname())[(node.rank + 1) % node.size]
        with suppress(OSError):
            self.listener.sendto(b"%d" % node.rank, after)
        node.Barrier()
        heard = b""
        with suppress(BlockingIOError):
            heard = self.listener.recv(16)
        return node.allreduce(heard == b"%d" % ((node.rank - 1) % node.size), MPI.LAND)

    def among(self, own: MPI.Intracomm, part: MPI.Intracomm) -> Doorbell:
        """The same one for the ranks of `part`, a part of the communicator `own` that this one is for."""
        ranks = enumerate(part.group.Translate_ranks(None, own.group))
        return Doorbell(self.listener, {at: self.addresses[rank] for at, rank in ranks if rank in self.addresses})

    def ring(self, rank: int) -> None:
        """Wake `rank`, if it can be reached and waits."""
        if address := self.addresses.get(rank):
            with suppress(OSError):  # it has not heard the last rings yet, or is gone
                self.listener.sendto(b"", address)

    def wait(self, seconds: float) -> bool:
        """Return when somebody rings, after `seconds` at the latest; whether somebody did."""
        rung = bool(select.select([self.listener], [], [], seconds)[0])
        if rung:
            self._hear()
        return rung

    def close(self) -> None:
        self.listener.close()

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.listener.recv(1)


def assemble(comm: MPI.Comm, patience: Patience = Patience(spin_s=50e-6)) -> None:
    """Return once all ranks have called it. Ahead of a blocking call, in which those who are early would spin on the
    cores that those who are late need. Collective."""
    patience.wait(comm.Ibarrier())


def _has_ended(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _listener() -> socket.socket | None:
    """A datagram socket with an address of its own, which vanishes with its process; on Linux."""
    if sys.platform != "linux":
        return None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        listener.bind("")
    except OSError:
        listener.close()
        return None
    if listener.fileno() >= MOST_FILES:
        listener.close()
        return None
    listener.setblocking(False)
    return listener
