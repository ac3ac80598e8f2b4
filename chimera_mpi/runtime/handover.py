"""Layers go from ranks that have them to ranks that need them, straight from memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI

from .grid import Comm
from .mailbox import pieces
from .state import LayerState
from .waiting import Patience


class Transfer(NamedTuple):
    layer: int
    giver: int
    taker: int


def transfers(held: Sequence[Collection[int]], wanted: Sequence[Collection[int]]) -> list[Transfer]:
    """Who gives which layer to whom, by what each rank holds and wants; all that is wanted must be held by somebody.

    Nobody is given what he has. The holders of a layer take turns.
    """
    holders: dict[int, list[int]] = {}
    for rank, layers in enumerate(held):
        for layer in layers:
            holders.setdefault(layer, []).append(rank)
    return [
        Transfer(layer, holders[layer][(layer + taker) % len(holders[layer])], taker)
        for taker, layers in enumerate(wanted)
        for layer in sorted(layers)
        if layer not in held[taker]
    ]


def missing(held: Sequence[Collection[int]], layers: int) -> list[int]:
    """The layers that nobody holds."""
    return sorted(set(range(layers)).difference(*held))


class Handover:
    """The states of layers on their way between the ranks of `comm`. What is given must live until `finish`."""

    def __init__(self, comm: Comm, patience: Patience, limit_bytes: int):
        self.comm, self.patience, self.limit_bytes = comm, patience, limit_bytes
        self._leaving: list[MPI.Request] = []
        self._arriving: list[MPI.Request] = []
        self._given: list[torch.Tensor] = []

    def give(self, layer: int, state: Mapping[str, torch.Tensor], taker: int) -> None:
        """Begin to send a layer, and what its tensors are."""
        whole = {name: tensor.contiguous() for name, tensor in state.items()}
        specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()]
        self._given += whole.values()
        self._leaving.append(self.comm.isend(specs, taker, layer))
        for tensor in whole.values():
            self._leaving += [self.comm.Isend(piece, taker, layer) for piece in pieces(tensor, self.limit_bytes)]

    def take(self, layer: int, giver: int) -> LayerState:
        """A layer that another gives."""
        self.patience.until(partial(self.comm.iprobe, giver, layer))
        state = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self.comm.recv(None, giver, layer)}
        for tensor in state.values():
            self._arriving = [self.comm.Irecv(piece, giver, layer) for piece in pieces(tensor, self.limit_bytes)]
            self.patience.wait(*self._arriving)
        return state

    def finish(self) -> None:
        """Return once all that was given has left."""
        self.patience.wait(*self._leaving)
        self._given.clear()

    def abandon(self) -> None:
        """The communicator is revoked: await nothing any more."""
        self.patience.outlive(*self._leaving, *self._arriving)
        self._given.clear()
