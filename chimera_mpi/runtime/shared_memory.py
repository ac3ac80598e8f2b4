"""Memory that the ranks of a node share."""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI


class SharedMemory:
    """For each rank of a node bytes that all of them can read and write, and words for signals."""

    def __init__(self, node: MPI.Intracomm, words: int, nbytes: int):
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
