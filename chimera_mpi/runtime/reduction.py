"""Sums of buffers over the replicas of a stage, in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from mpi4py import MPI

from .grid import Comm, Nearby
from .staging import DONE, Event, Staging
from .waiting import Doorbell

Zeros = Callable[[int, torch.dtype], torch.Tensor]
TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}


def zeros(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def numbers(tensor: torch.Tensor) -> list[Any]:
    """The numbers of a contiguous tensor, wherever it lies, as MPI takes them."""
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), TYPES[tensor.dtype]]


class Layout(NamedTuple):
    """What is summed together: `size` gradients, and behind them a number of targets where `counted`."""

    size: int
    counted: bool
    dtype: torch.dtype


class Sum(Protocol):
    """A buffer that is summed over all ranks of a communicator, which all start their sums in one order.

    `flat` begins with the gradients. Once `drive` says so, `count` and `mine` are sums: of all gradients, or of the
    share of them that begins at `start_at`.
    """

    flat: torch.Tensor
    mine: torch.Tensor
    count: torch.Tensor
    is_share: bool
    start_at: int

    @property
    def requests(self) -> list[MPI.Request]:
        """What is under way by MPI, or was."""

    @property
    def bell(self) -> Doorbell | None:
        """What rings when there is news, if something always does."""

    def start(self) -> None:
        """The buffer is whole on this rank."""

    def drive(self) -> bool:
        """Do what can be done without waiting; whether all is done."""

    @property
    def in_order(self) -> bool:
        """Whether a sum that was started later may be driven."""


class MessageSum:
    """An all-reduce by MPI; none over one rank."""

    in_order, is_share, start_at, bell = True, False, 0, None

    def __init__(self, comm: Comm, layout: Layout, make: Zeros = zeros):
        self.comm = comm
        self.flat = make(layout.size + layout.counted, layout.dtype)
        self.mine, self.count = self.flat[: layout.size], self.flat[layout.size :]
        self.requests: list[MPI.Request] = []

    def start(self) -> None:
        if self.comm.size > 1:
            self.requests = [self.comm.Iallreduce(MPI.IN_PLACE, numbers(self.flat), MPI.SUM)]

    def drive(self) -> bool:
        return MPI.Request.Testall(self.requests)


class MessageShares:
    """A reduce-scatter by MPI (ZeRO, Rajbhandari et al. 2020): each rank has the sum of a share.

    The buffer is padded to equal shares; the sum of this rank's arrives at its beginning.
    """

    in_order, is_share, bell = True, True, None

    def __init__(self, comm: Comm, layout: Layout, make: Zeros = zeros):
        self.comm = comm
        share = -(-layout.size // comm.size)
        self.start_at = comm.rank * share
        self.flat = make(share * comm.size, layout.dtype)
        self.mine = self.flat[:share]
        self.count = make(int(layout.counted), layout.dtype)
        self.requests: list[MPI.Request] = []

    def start(self) -> None:
        self.requests = [self.comm.Ireduce_scatter_block(MPI.IN_PLACE, numbers(self.flat), MPI.SUM)]
        if len(self.count):
            self.requests.append(self.comm.Iallreduce(MPI.IN_PLACE, numbers(self.count), MPI.SUM))

    def drive(self) -> bool:
        return MPI.Request.Testall(self.requests)


class SharedMemory:
    """For each rank of a node bytes that all of them can read and write, and words for signals."""

    def __init__(self, node: Comm, words: int, nbytes: int):
        header = -(-8 * words // 64) * 64
        self.window = MPI.Win.Allocate_shared(header + nbytes, 1, comm=node)
        self.window.Lock_all()
        self.rank = node.rank
        memories: list[Any] = [self.window.Shared_query(rank)[0] for rank in range(node.size)]
        self.words = [memoryview(memory)[: 8 * words].cast("b").cast("q") for memory in memories]
        self.bytes = [torch.frombuffer(memory, dtype=torch.uint8)[header:] for memory in memories]
        self.bytes[self.rank].zero_()
        for at in range(words):
            self.words[self.rank][at] = 0
        self.sync()
        node.Barrier()
        self.sync()

    def sync(self) -> None:
        """Order what this rank wrote and reads before and after."""
        self.window.Sync()

    def close(self) -> None:
        """Collective over the node. No tensor in this memory may be used any more."""
        self.words, self.bytes = [], []
        self.window.Unlock_all()
        self.window.Free()


ARRIVED, HANDED = 0, 1


@dataclass
class SharedSum:
    """Each rank of a node adds up its share of all ranks' buffers, with the same ranks of other nodes by MPI where
    there are any, and hands the sum to all on the node, or keeps it where each has a use for its share only.

    Two signals a rank, in shared memory, carry the number of the sum: the buffer is whole, the share is handed out.
    """

    memory: SharedMemory
    rail: Comm
    buffers: list[torch.Tensor]  # of each rank on the node
    layout: Layout
    signals: int  # where the two words are
    is_share: bool
    doorbell: Doorbell | None

    def __post_init__(self) -> None:
        rank, size = self.memory.rank, self.layout.size
        self.flat = self.buffers[rank]
        share = len(self.flat) // len(self.buffers)
        self.share = slice(rank * share, (rank + 1) * share)
        self.start_at = self.share.start if self.is_share else 0
        self.mine = self.flat[self.start_at : min(self.share.stop, size) if self.is_share else size]
        self.count = self.flat[size : size + self.layout.counted]
        self._number = 0  # of the sum under way
        self._added = self._handed = 0  # the last one added up, and handed out
        self.requests: list[MPI.Request] = []

    @property
    def in_order(self) -> bool:
        return self._added == self._number

    def start(self) -> None:
        self._number += 1
        self._signal(ARRIVED)

    def drive(self) -> bool:
        if self._added < self._number:
            if not self._everybody(ARRIVED):
                return False
            self._add_up()
        if self._handed < self._number:
            if not MPI.Request.Testall(self.requests):
                return False
            self._hand_out()
        return self._everybody(HANDED)

    def _add_up(self) -> None:
        self._total = self.buffers[0][self.share].clone()
        for buffer in self.buffers[1:]:
            self._total += buffer[self.share]
        if self.rail.size > 1:
            self.requests = [self.rail.Iallreduce(MPI.IN_PLACE, self._total.numpy(), MPI.SUM)]
        self._added = self._number

    def _hand_out(self) -> None:
        if self.is_share:
            self.flat[self.share] = self._total
            self._hand_out_count()
        else:
            for buffer in self.buffers:
                buffer[self.share] = self._total
        del self._total
        self._handed = self._number
        self._signal(HANDED)

    def _hand_out_count(self) -> None:
        at = self.layout.size
        if self.layout.counted and self.share.start <= at < self.share.stop:
            for buffer in self.buffers:
                buffer[at] = self._total[at - self.share.start]

    @property
    def bell(self) -> Doorbell | None:
        return self.doorbell if self.rail.size == 1 else None

    def _signal(self, what: int) -> None:
        self.memory.sync()
        self.memory.words[self.memory.rank][self.signals + what] = self._number
        if self.doorbell:
            for rank in range(len(self.buffers)):
                self.doorbell.ring(rank)

    def _everybody(self, what: int) -> bool:
        if all(words[self.signals + what] >= self._number for words in self.memory.words):
            self.memory.sync()
            return True
        return False


class StagedSum:
    """A sum of what lies on a device: `inner` adds up where MPI can, once the values have got there.

    What is behind it waits until `inner` has started, so that all ranks start their sums in one order.
    """

    bell = None

    def __init__(self, inner: Sum, staging: Staging):
        self.inner, self.is_share, self.start_at = inner, inner.is_share, inner.start_at
        self._whole, self._count = staging.mirror_of(inner.flat), staging.mirror_of(inner.count)
        first = inner.mine.storage_offset() - inner.flat.storage_offset()
        self._mine = slice(first, first + len(inner.mine))
        self.flat, self.mine, self.count = self._whole.tensor, self._whole.tensor[self._mine], self._count.tensor
        self._fetched: Event = DONE
        self._started = False

    @property
    def requests(self) -> list[MPI.Request]:
        return self.inner.requests

    @property
    def in_order(self) -> bool:
        return self._started and self.inner.in_order

    def start(self) -> None:
        self._started = False
        self._fetched = self._whole.fetch()
        if len(self.count):
            self._fetched = self._count.fetch()  # copies come in order: the last one is after both

    def drive(self) -> bool:
        if not self._started:
            if not self._fetched.query():
                return False
            self.inner.start()
            self._started = True
        if not self.inner.drive():
            return False
        self._whole.bring(self._mine, self._fetched)
        if len(self.count):
            self._count.bring(after=self._fetched)
        return True


def by_messages(comm: Comm, layouts: Sequence[Layout], sharded: bool, make: Zeros = zeros) -> list[Sum]:
    """A sum for each layout, whose buffers `make` makes."""
    kind: Callable[[Comm, Layout, Zeros], Sum] = MessageShares if sharded and comm.size > 1 else MessageSum
    return [kind(comm, layout, make) for layout in layouts]


def in_shared_memory(
    nearby: Nearby, layouts: Sequence[Layout], sharded: bool, bell: Doorbell | None = None
) -> tuple[SharedMemory, list[Sum]]:
    """A sum for each layout, and the memory that they lie in; `bell` is for the ranks of the node. Collective."""
    sizes = [padded_bytes(layout, nearby.node.size) for layout in layouts]
    memory = SharedMemory(nearby.node, 2 * len(layouts), sum(sizes))
    pieces = zip(*(of_rank.split(sizes) for of_rank in memory.bytes), strict=True)
    return memory, [
        SharedSum(memory, nearby.rail, [p.view(layout.dtype) for p in piece], layout, 2 * at, sharded, bell)
        for at, (layout, piece) in enumerate(zip(layouts, pieces, strict=True))
    ]


def padded_bytes(layout: Layout, shares: int) -> int:
    """Of a buffer in equal shares of whole cache lines."""
    line = 64 // layout.dtype.itemsize
    per_share = -(-(layout.size + layout.counted) // (shares * line)) * line
    return per_share * shares * layout.dtype.itemsize
