"""Which rank is which worker of which replica, and who speaks with whom."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from mpi4py import MPI

from ..errors import InputError
from ..schedule import Schedule
from .waiting import Patience

Comm = MPI.Intracomm


def width_of(ranks: int, depth: int) -> int:
    """How many pipeline groups of `depth` workers `ranks` ranks make. Raises InputError."""
    if ranks % depth:
        fitting = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise InputError(f"depth {depth} does not divide the {ranks} MPI ranks: try depth = {fitting}")
    return ranks // depth


class Grid:
    """`width` replicas of a pipeline group of `depth` workers: rank = replica * depth + worker.

    Owns its communicators; `close` frees them.
    """

    def __init__(self, comm: Comm, depth: int):
        self.depth, self.width = depth, width_of(comm.size, depth)
        self.world: Comm = comm.Dup()
        self.replica, self.worker = divmod(comm.rank, depth)
        self.pipeline = self.world.Split(self.replica, self.worker)
        self.node = find_node(self.world)
        self._groups: dict[tuple[int, ...], MPI.Comm] = {}

    def replicas(self, workers: Iterable[int]) -> MPI.Comm:
        """The communicator of these workers of all pipeline groups. Collective over them, in one order on all."""
        ranks = tuple(sorted(group * self.depth + worker for group in range(self.width) for worker in set(workers)))
        if ranks not in self._groups:
            self._groups[ranks] = self.world.Create_group(self.world.group.Incl(ranks))
        return self._groups[ranks]

    def close(self) -> None:
        for comm in (*self._groups.values(), self.pipeline, self.world):
            comm.Free()
        self._groups.clear()


def holders(schedule: Schedule, stages: Iterable[int]) -> set[int]:
    """The workers that hold a copy of any of `stages`."""
    return {pipe[stage] for pipe in schedule.pipes for stage in stages}


class Node(NamedTuple):
    """How many ranks share this rank's memory, how many cores they have, and how many of those are this rank's."""

    ranks: int
    cores: int
    own_cores: int

    @property
    def threads(self) -> int:
        """Threads for each rank, so that all ranks together use each core once."""
        return max(1, min(self.own_cores, self.cores // self.ranks))

    @property
    def patience(self) -> Patience:
        return Patience.for_node(self.ranks, self.cores)


def find_node(comm: MPI.Comm) -> Node:
    """Collective over `comm`."""
    together = comm.Split_type(MPI.COMM_TYPE_SHARED)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    node = Node(together.size, len(set().union(*together.allgather(own))), len(own))
    together.Free()
    return node
