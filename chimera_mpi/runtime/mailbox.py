"""Messages between the workers of a pipeline, each named by the op that makes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI

from ..schedule import COMPUTE, Kind, Op, Schedule, from_elsewhere, messages
from .staging import Direct, Incoming, Outgoing, Spec, Staging, Tensors
from .waiting import Doorbell, Patience

__all__ = ["Delivery", "Mailbox", "Spec", "Tags", "Tensors", "pieces", "tag_bound"]


@dataclass(frozen=True)
class Delivery:
    """How messages travel.

    `ahead` receives are posted before they are needed. Messages above `limit_bytes` travel in pieces.
    `synchronous` makes no send complete before its receive is posted, which uncovers deadlocks.
    `verify` compares the bytes that arrived with those expected.
    """

    ahead: int = 4
    limit_bytes: int = 1 << 30
    synchronous: bool = False
    verify: bool = False


class Mailbox:
    """Sends what ops make and receives what they need, as the schedule implies.

    Both ends know the schedule and `spec`, the tensors that an op's message is made of, so no size and no
    type is ever sent. Each tensor is a message of its own, tagged by the op. A message to oneself does not
    go through MPI.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        schedule: Schedule,
        spec: Callable[[Op], tuple[Spec, ...]],
        patience: Patience,
        delivery: Delivery = Delivery(),
        staging: Staging = Direct(),
        bell: Doorbell | None = None,
    ):
        """`bell` wakes the ranks of `comm` that share a node."""
        self.comm, self.schedule = comm, schedule
        self.patience, self.delivery, self.staging = patience, delivery, staging
        self.bell = bell if staging.in_place else None  # a device completes what it has without a ring
        self._isend = comm.Issend if delivery.synchronous else comm.Isend
        self._mine = [m for m in messages(schedule) if comm.rank in (m.source, m.target)]
        self._expected = [m.op for m in self._mine if m.target == comm.rank != m.source]
        self._awaited = {op: from_elsewhere(schedule, op) for op in schedule.orders[comm.rank] if op.kind in COMPUTE}
        self._ahead: deque[Op] = deque()
        self._arriving: dict[Op, Arrival] = {}
        self._unsent: deque[Letter] = deque()
        self._leaving: deque[Departure] = deque()
        self._to_self: dict[Op, Tensors] = {}
        self.expect(spec)

    def expect(self, spec: Callable[[Op], tuple[Spec, ...]]) -> None:
        """From the next step on the messages of ops are made of these tensors."""
        tags = Tags(self.schedule, tag_bound(self.comm))
        self._routes = {m.op: Route(m.source, m.target, *tags.tagged(m.op, spec(m.op))) for m in self._mine}

    def open(self) -> None:
        """Begin a step: post the first receives."""
        self._ahead.extend(self._expected)
        self._post()

    def receive(self, op: Op, meanwhile: Callable[[], object] = lambda: None) -> Tensors:
        """Wait for what other stages made for `op`. Raises at a message of another size (`verify`).

        `meanwhile` drives what others may wait for before they send.
        """
        received: Tensors = ()
        for need in self._awaited[op]:
            received += self._take(need, meanwhile)
        return received

    def send(self, op: Op, tensors: Tensors) -> None:
        """Give away what `op` made, and return at once. A write to the tensors before they have left that
        autograd would notice is found out: a later call raises RuntimeError."""
        route, tensors = self._routes[op], tuple(tensor.detach() for tensor in tensors)
        if route.target == route.source:
            self._to_self[op] = tensors
            return
        if not route.fits(tensors):
            made = [(tuple(t.shape), t.dtype) for t in tensors]
            raise TypeError(f"{op} made {made}, its receiver expects {route.specs}")
        for tag, tensor in zip(route.tags, tensors, strict=True):
            tensor = tensor.contiguous()
            if self.staging.in_place:
                self._isend_pieces(op, route.target, tag, tensor)
            else:
                outgoing = self.staging.leaving(tensor)
                self._unsent.append(Letter(op, route.target, tag, outgoing, tensor, tensor._version))
        if self.bell:
            self.bell.ring(route.target)
        self.poke()

    def poke(self) -> bool:
        """Let go of the tensors that have left, and drive the progress of those that have not; whether all have."""
        if self._unsent:
            self._despatch()
        while self._leaving and self._leaving[0].request.Test():
            self._leaving.popleft().verify()
        if not (self.staging.in_place or self.delivery.verify):
            self._hasten()
        return not (self._unsent or self._leaving)

    def push(self) -> None:
        """Hand to MPI all that was sent: others may need it before they do what this rank will wait for."""
        self.patience.until(self._despatch)

    def flush(self) -> None:
        """End a step: wait until all has left. Raises RuntimeError if anything was never taken."""
        self.push()
        self.patience.wait(*(departure.request for departure in self._leaving))
        while self._leaving:
            self._leaving.popleft().verify()
        if self._arriving or self._to_self or self._ahead:
            left = [str(op) for op in (*self._arriving, *self._to_self, *self._ahead)]
            raise RuntimeError(f"messages left in the mailbox of worker {self.comm.rank} at the flush: {left}")

    def abandon(self) -> None:
        """Forget all messages, once MPI writes to their memory and reads it no more."""
        arriving = (request for arrival in self._arriving.values() for request in arrival.requests)
        self.patience.outlive(*arriving, *(departure.request for departure in self._leaving))
        for each in (self._ahead, self._arriving, self._unsent, self._leaving, self._to_self):
            each.clear()

    def _post(self) -> None:
        while self._ahead and len(self._arriving) < self.delivery.ahead:
            op = self._ahead.popleft()
            self._arriving[op] = self._irecv(op)

    def _despatch(self) -> bool:
        """Hand to MPI, in their order, the tensors that are ready; whether none is left."""
        while self._unsent and self._unsent[0].outgoing.ready():
            letter = self._unsent.popleft()
            letter.verify()
            self._isend_pieces(letter.op, letter.target, letter.tag, letter.outgoing.tensor)
            if letter.tensor.nbytes:
                self._leaving.append(self._leaving.pop()._replace(outgoing=letter.outgoing))
        return not self._unsent

    def _isend_pieces(self, op: Op, target: int, tag: int, tensor: torch.Tensor) -> None:
        for piece in pieces(tensor, self.delivery.limit_bytes):
            self._leaving.append(Departure(self._isend(piece, target, tag), op, tensor, tensor._version))

    def _hasten(self) -> None:
        """Move on to the device what has come in, before it is needed."""
        for arrival in self._arriving.values():
            if MPI.Request.Testall(arrival.requests):
                for part in arrival.parts:
                    part.hasten()

    def _irecv(self, op: Op) -> Arrival:
        route = self._routes[op]
        incoming = tuple(self.staging.arriving(spec) for spec in route.specs)
        requests, sizes = [], []
        for tag, of in zip(route.tags, incoming, strict=True):
            for piece in pieces(of.tensor, self.delivery.limit_bytes):
                requests.append(self.comm.Irecv(piece, route.source, tag))
                sizes.append(piece.nbytes)
        return Arrival(requests, incoming, sizes)

    def _take(self, op: Op, meanwhile: Callable[[], object]) -> Tensors:
        if op in self._to_self:
            return self._to_self.pop(op)
        self._post()
        arrival = self._arriving[op]
        bell = self.bell if self.bell and self._routes[op].source in self.bell.addresses else None
        statuses = [MPI.Status() for _ in arrival.requests] if self.delivery.verify else None
        self.patience.until(partial(self._has_come, arrival.requests, statuses, meanwhile), bell)
        del self._arriving[op]
        if statuses:
            arrival.verify(op, statuses)
        self._post()
        return tuple(part.take() for part in arrival.parts)

    def _has_come(
        self, requests: list[MPI.Request], statuses: list[MPI.Status] | None, meanwhile: Callable[[], object]
    ) -> bool:
        if self._unsent:
            self._despatch()  # what is awaited may be made of it
        if MPI.Request.Testall(requests, statuses):
            return True
        meanwhile()
        return False


class Route(NamedTuple):
    """A message's way: from which worker to which, its tensors and the tag of each."""

    source: int
    target: int
    specs: tuple[Spec, ...]
    tags: tuple[int, ...]

    def fits(self, tensors: Tensors) -> bool:
        """Whether `tensors` are what the other end expects."""
        return len(tensors) == len(self.specs) and all(
            tensor.shape == spec.shape and tensor.dtype is spec.dtype
            for tensor, spec in zip(tensors, self.specs, strict=True)
        )


class Letter(NamedTuple):
    """A tensor that is to be sent once it is ready. `version` counts the writes to it so far."""

    op: Op
    target: int
    tag: int
    outgoing: Outgoing
    tensor: torch.Tensor
    version: int

    def verify(self) -> None:
        _verify_unwritten(self.op, self.tensor, self.version)


class Departure(NamedTuple):
    """A message, or a piece of one, on its way out. `version` counts the writes to its tensor so far.

    The last piece of a tensor has what is done once it is `sent`.
    """

    request: MPI.Request
    op: Op
    tensor: torch.Tensor
    version: int
    outgoing: Outgoing | None = None

    def verify(self) -> None:
        """It has left."""
        _verify_unwritten(self.op, self.tensor, self.version)
        if self.outgoing is not None:
            self.outgoing.sent()


def _verify_unwritten(op: Op, tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(f"what {op} made was written to while it was being sent")


class Arrival(NamedTuple):
    """A message on its way in: the pieces' requests and bytes, the tensors they fill."""

    requests: list[MPI.Request]
    parts: tuple[Incoming, ...]
    sizes: list[int]

    def verify(self, op: Op, statuses: list[MPI.Status]) -> None:
        for status, size in zip(statuses, self.sizes, strict=True):
            if status.Get_count(MPI.BYTE) != size:
                raise RuntimeError(f"the message of {op} has {status.Get_count(MPI.BYTE)} bytes, not {size}")


class Tags:
    """One tag for each tensor of each op, wrapped below what the MPI library can carry.

    Tags repeat after `window` micro-batches. That is harmless: a stage makes, and its neighbour takes, the
    messages of one kind in one order, and MPI keeps the order of messages with equal tags.
    """

    parts = 8

    def __init__(self, schedule: Schedule, bound: int):
        self.pipes, self.stages = len(schedule.pipes), schedule.stages
        self.window = (bound + 1) // (self.pipes * self.stages * 2 * self.parts)
        if self.window < 1:
            raise ValueError(f"{self.pipes} pipelines of {self.stages} stages need more tags than 0 to {bound}")

    def tagged(self, op: Op, specs: Sequence[Spec]) -> tuple[tuple[Spec, ...], tuple[int, ...]]:
        """The tensors of a message and their tags. Raises ValueError if there are too many."""
        if len(specs) > self.parts:
            raise ValueError(f"the message of {op} is {len(specs)} tensors, it can have {self.parts} at most")
        return tuple(specs), tuple(self(op, part) for part in range(len(specs)))

    def __call__(self, op: Op, part: int) -> int:
        place = (op.index % self.window * self.pipes + op.pipe) * self.stages + op.stage
        return (place * 2 + (op.kind is not Kind.FORWARD)) * self.parts + part


def tag_bound(comm: MPI.Comm) -> int:
    """The largest tag of this MPI library."""
    return int(comm.Get_attr(MPI.TAG_UB) or 32767)


def pieces(tensor: torch.Tensor, limit_bytes: int) -> list[MPI.buffer]:
    """The memory of a contiguous tensor in buffers of at most `limit_bytes`."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if 0 < nbytes <= limit_bytes:
        return [MPI.buffer.fromaddress(address, nbytes)]
    return [
        MPI.buffer.fromaddress(address + start, min(limit_bytes, nbytes - start))
        for start in range(0, nbytes, limit_bytes)
    ]
