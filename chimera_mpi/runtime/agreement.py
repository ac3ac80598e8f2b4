"""All ranks do the same thing, or none does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from ..errors import InputError
from .mailbox import pieces
from .waiting import Patience, assemble

T = TypeVar("T")


def agree(world: Any, act: Callable[[], T]) -> T:
    """What `act` returns on this rank, if it raises InputError on none; else the first such error, on all."""
    result, refused = _attempt(act)
    assemble(world)
    errors = [text for text in world.allgather(refused) if text is not None]
    if errors:
        raise InputError(errors[0])
    return result  # type: ignore[return-value]


def meet(world: MPI.Intracomm, patience: Patience, act: Callable[[], tuple[str, T]]) -> T:
    """What `act` returns on this rank, behind its word for it, if that word is the same on all ranks.

    Else all raise the same InputError: the first that an `act` raised, or one that names two words. Costs an
    all-reduce of 16 bytes while all agree.
    """
    result, refused = _attempt(act)
    word = refused or result[0]  # type: ignore[index]
    if not _is_same(world, patience, word):
        everyone = world.allgather((word, refused))
        errors = [refused for _, refused in everyone if refused is not None]
        rank, other = next((rank, other) for rank, (other, _) in enumerate(everyone) if other != everyone[0][0])
        differ = f"rank 0 is at {everyone[0][0]}, rank {rank} at {other}: make the same calls on all ranks"
        raise InputError(errors[0] if errors else differ)
    if refused is not None:
        raise InputError(refused)
    return result[1]  # type: ignore[index]


class Herald:
    """Carries a number of rank 0 to all ranks, which nobody waits for before it is needed."""

    def __init__(self, world: MPI.Intracomm, patience: Patience):
        self.world, self.patience = world, patience
        self._word, self._under_way = np.zeros(1, dtype=np.int64), MPI.REQUEST_NULL

    def send(self, word: int) -> None:
        """That of rank 0 counts. Collective, once the last one has been heard."""
        self._word[0] = word
        self._under_way = self.world.Ibcast(self._word)

    def heard(self) -> int:
        """What was sent last, on all ranks."""
        self.patience.wait(self._under_way)
        return int(self._word[0])

    def abandon(self) -> None:
        """Await no word any more."""
        self.patience.outlive(self._under_way)


@torch.no_grad()
def take_values_of_root(
    world: MPI.Intracomm, patience: Patience, tensors: Iterable[torch.Tensor], limit_bytes: int
) -> None:
    """Write rank 0's values into the tensors of all ranks, which are of the same shapes and dtypes. Collective."""
    for tensor in tensors:
        whole = tensor.contiguous()
        patience.wait(*(world.Ibcast(piece) for piece in pieces(whole, limit_bytes)))
        tensor.copy_(whole)


def _attempt(act: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return act(), None
    except InputError as refused:
        return None, str(refused)


def _is_same(world: MPI.Intracomm, patience: Patience, word: str) -> bool:
    key = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") >> 1
    extremes = np.array([key, -key])
    patience.wait(world.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX))
    return bool(extremes[0] == -extremes[1])
