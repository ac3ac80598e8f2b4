"""Which rank is which worker of which replica, and who speaks with whom."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, cast

from mpi4py import MPI

from ..host import sharpen_timer
from ..schedule import Schedule, width_of
from .waiting import Doorbell, Patience, assemble

Comm = MPI.Intracomm


class Grid:
    """`width` replicas of a pipeline group of `depth` workers: rank = replica * depth + worker.

    Owns its communicators; `close` frees them, after it has called what is in `closing`. Where it `survives`
    the death of ranks, who waits by its `patience` revokes them all once somebody has revoked one that it `heeds`, such
    as `comm`, which it is over.
    """

    def __init__(self, comm: Comm, depth: int, survives: bool = False):
        sharpen_timer()
        assemble(comm)
        self.heeds = [comm]
        self.depth, self.width = depth, width_of(comm.size, depth)
        self.world: Comm = comm.Dup()
        self.replica, self.worker = divmod(comm.rank, depth)
        self.pipeline = cast(Comm, self.world.Split(self.replica, self.worker))
        self.node = find_node(self.world)
        self.patience = replace(self.node.patience, alarm=self._heed) if survives else self.node.patience
        self.bell = self._bell()
        self._groups: dict[tuple[int, ...], Comm] = {}
        self._nearby: dict[int, Nearby | None] = {}
        self.closing: list[Callable[[], None]] = []
        self.others: list[Comm] = []  # communicators that parts of a run have beside it

    def replicas(self, workers: Iterable[int]) -> Comm:
        """The communicator of these workers of all pipeline groups. Collective over them, in one order on all."""
        ranks = tuple(sorted(group * self.depth + worker for group in range(self.width) for worker in set(workers)))
        if ranks not in self._groups:
            self._groups[ranks] = self.world.Create_group(self.world.group.Incl(ranks))
        return self._groups[ranks]

    def nearby(self, comm: Comm) -> Nearby | None:
        """How the ranks of one of this grid's communicators lie on nodes, equally many on each; None where they
        do not. Collective over `comm`."""
        if comm.handle not in self._nearby:
            node = self.together(comm)
            if comm.allreduce(node.size, MPI.MIN) == comm.allreduce(node.size, MPI.MAX):
                self._nearby[comm.handle] = Nearby(node, cast(Comm, comm.Split(node.rank, comm.rank)))
            else:
                self._nearby[comm.handle] = None
                node.Free()
        return self._nearby[comm.handle]

    def together(self, comm: Comm) -> Comm:
        """Those of `comm` that share this rank's memory."""
        return sharing_memory(comm)

    def bell_of(self, part: Comm) -> Doorbell | None:
        """A doorbell by the ranks of one of this grid's communicators."""
        return self.bell and self.bell.among(self.world, part)

    def _bell(self) -> Doorbell | None:
        node = self.together(self.world)
        bell = Doorbell.between(self.world, node)
        node.Free()
        return bell

    def close(self) -> None:
        for close in self.closing:
            close()
        if self.bell:
            self.bell.close()
        for comm in self._comms:
            comm.Free()
        self._groups.clear()
        self._nearby.clear()

    def revoke(self) -> None:
        """Let nobody wait on a communicator of this grid, for the dead or for one who has left for their sake: what is
        under way ends in an error on all ranks (ULFM). Not collective."""
        self.heeds.clear()
        for comm in filter(None, (*self._comms, *self.others)):  # without those that are freed
            comm.Revoke()

    def _heed(self) -> None:
        if any(comm.Is_revoked() for comm in self.heeds):
            self.revoke()

    @property
    def _comms(self) -> list[Comm]:
        near = [comm for nearby in self._nearby.values() if nearby for comm in nearby]
        return [*near, *self._groups.values(), self.pipeline, self.world]


def holders(schedule: Schedule, stages: Iterable[int]) -> set[int]:
    """The workers that hold a copy of any of `stages`."""
    return {pipe[stage] for pipe in schedule.pipes for stage in stages}


class Nearby(NamedTuple):
    """Of a communicator: the ranks on this node, and those of the same number on all nodes."""

    node: Comm
    rail: Comm


def free_shared_bytes() -> float:
    """Of the file system that MPI libraries take shared memory from."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize


class Node(NamedTuple):
    """How many ranks share this rank's memory, how many cores they have, how many of those are this rank's, and
    which of the ranks it is."""

    ranks: int
    cores: int
    own_cores: int
    rank: int = 0

    @property
    def threads(self) -> int:
        """Threads for each rank, so that all ranks together use each core once."""
        return max(1, min(self.own_cores, self.cores // self.ranks))

    @property
    def patience(self) -> Patience:
        return Patience.for_node(self.ranks, self.cores)


def sharing_memory(comm: MPI.Comm) -> Comm:
    """Those of `comm` on this rank's node, in their order. Collective."""
    return cast(Comm, comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))


def find_node(comm: MPI.Comm) -> Node:
    """Collective over `comm`."""
    together = sharing_memory(comm)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    node = Node(together.size, len(set().union(*together.allgather(own))), len(own), together.rank)
    together.Free()
    return node
