"""Who is where: pairs and groups of ranks, on one node or on several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from mpi4py import MPI

from ..device import free_bytes
from ..grid import Comm, Grid
from ..waiting import Doorbell

RESERVE = 0.1  # of free memory, for what no model counts


class Pair(NamedTuple):
    """Two ranks that speak, and what rings between them. Several pairs speak at once."""

    comm: Comm
    bell: Doorbell | None


class Group(NamedTuple):
    """Ranks that hold replicas of one stage; `comm` is None on those that stand by."""

    replicas: int
    nodes: int
    comm: Comm | None


class Layout:
    """The ranks of a grid on their nodes. Owns communicators."""

    def __init__(self, grid: Grid):
        self.grid, self.world, self.node = grid, grid.world, grid.together(grid.world)
        leaders = self.world.allgather(self.node.bcast(self.world.rank))
        firsts = sorted(set(leaders))
        self.number = firsts.index(leaders[self.world.rank])
        self.sizes = [leaders.count(first) for first in firsts]
        self._made: list[Comm] = [self.node]

    @property
    def nodes(self) -> int:
        return len(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len(set(self.sizes)) == 1

    def neighbours(self) -> Pair | None:
        """Two ranks of one node, all pairs at once; None on ranks that stand by. Collective."""
        paired = self.node.rank < self.node.size // 2 * 2
        comm = self._split((self.number, self.node.rank // 2) if paired else None)
        return Pair(comm, self.grid.bell_of(comm)) if comm else None

    def apart(self) -> Pair | None:
        """The first ranks of two nodes. Collective."""
        comm = self._split((0, 0) if self.node.rank == 0 and self.number < 2 else None)
        return Pair(comm, None) if comm else None

    def groups(self) -> Iterator[Group]:
        """Ranks of one node; one rank of each node; all ranks. Collective, in their order."""
        for replicas in doublings(min(self.sizes)):
            whole = self.node.rank < self.node.size // replicas * replicas
            yield Group(replicas, 1, self._split((self.number, self.node.rank // replicas) if whole else None))
        if self.nodes > 1 and self.is_even:
            for nodes in doublings(self.nodes):
                whole = self.number < self.nodes // nodes * nodes
                colour = (self.node.rank, self.number // nodes)
                yield Group(nodes, nodes, self._split(colour if whole else None))
            if self.node.size > 1:
                yield Group(self.world.size, self.nodes, self._split((0, 0)))

    def close(self) -> None:
        for comm in self._made:
            comm.Free()

    def _split(self, colour: tuple[int, int] | None) -> Comm | None:
        """Those of one colour; None for no colour."""
        number = MPI.UNDEFINED if colour is None else colour[0] * self.world.size + colour[1]
        comm = cast(Comm, self.world.Split(number, self.world.rank))
        if comm == MPI.COMM_NULL:
            return None
        self._made.append(comm)
        return comm


def doublings(most: int) -> list[int]:
    """2, 4, 8, ... and `most`, if that is 2 or more."""
    return sorted({2**power for power in range(1, most.bit_length()) if 2**power <= most} | ({most} - {0, 1}))


def usable_memory_bytes(device: torch.device, sharing: int) -> float:
    """Of one rank, which shares its device with so many: what it may take now, less a reserve."""
    return (1 - RESERVE) * free_bytes(device, sharing)
