"""Messages between two ranks, by the runtime's mailbox."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from ...predict import Costs, simulate
from ...predict.calibrated import MessageReading
from ...predict.fit import moved_share
from ...schedule import COMPUTE, Kind, Op, build, messages
from ..mailbox import Mailbox
from ..stage import COUNT
from ..staging import Staging
from ..waiting import Patience
from .ensemble import NAN, Ensemble, specs_of
from .layout import Pair
from .product import Product


class Way(NamedTuple):
    """How the two ranks of a pair send: as a schedule of two stages does that computes nothing, or `pause_s` an op."""

    scheme: str
    pause_s: float


WAYS = {
    "ping-pong": Way("naive", 0.0),
    "both at once": Way("chimera", 0.0),
    "after a pause": Way("naive", 4e-3),
}

Act = Callable[[Op], object]


def idle(op: Op) -> None:
    pass


class Letters:
    """The runtime's mailbox between the two ranks of a pair, for messages of one size."""

    def __init__(self, pair: Pair, scheme: str, trips: int, size_bytes: int, patience: Patience, staging: Staging):
        self.schedule, self.me = build(scheme, 2, trips), pair.comm.rank
        numbers = torch.zeros(max(size_bytes // 4, 1), device=staging.device)
        self._tensors = {
            Kind.FORWARD: (numbers,),
            Kind.BACKWARD: (torch.zeros((), dtype=COUNT.dtype, device=staging.device), numbers),
        }
        specs = {kind: specs_of(tensors) for kind, tensors in self._tensors.items()}
        self._sends = {message.op for message in messages(self.schedule) if message.source == self.me != message.target}
        self.mailbox = Mailbox(
            pair.comm, self.schedule, lambda op: specs[op.kind], patience, staging=staging, bell=pair.bell
        )
        self._ops = [op for op in self.schedule.orders[self.me] if op.kind in COMPUTE]

    def exchange(self, came: Act = idle, act: Act = idle, sent: Act = idle) -> None:
        """All messages of the schedule. What is done at each op once its input has come, where a stage would compute,
        and once its output is on its way."""
        self.mailbox.open()
        for op in self._ops:
            self.mailbox.receive(op)
            came(op)
            act(op)
            if op in self._sends:
                self.mailbox.send(op, self._tensors[op.kind])
            sent(op)
        self.mailbox.flush()

    def share_of_critical_path(self) -> tuple[float, float]:
        """Of all ops of both ranks, those on the critical path; and the messages on it."""
        ops = sum(len([op for op in order if op.kind in COMPUTE]) for order in self.schedule.orders)
        free = simulate(self.schedule, Costs(1, 1, transfer_s=0)).makespan_s
        return free / ops, simulate(self.schedule, Costs(0, 0, transfer_s=1)).makespan_s


def read_messages(ensemble: Ensemble, pair: Pair | None, staging: Staging, buffers: str) -> list[MessageReading]:
    """Messages of all sizes, all ways. Collective; `pair` is None on ranks that stand by."""
    found: list[MessageReading] = []
    least_s: dict[int, float] = {}  # what is left when pauses are taken off is more than a message takes by itself
    for name, way in WAYS.items():
        for size_bytes in ensemble.effort.message_bytes:
            (seconds,) = ensemble.read(_speaking(ensemble, pair, way, size_bytes, staging)).values
            seconds = max(seconds, least_s.setdefault(size_bytes, seconds))
            found.append(MessageReading(name, buffers, size_bytes, seconds))
            if 4 * ensemble.effort.trips * seconds * 4 > ensemble.effort.longest_s:
                break
    return found


def _speaking(
    ensemble: Ensemble, pair: Pair | None, way: Way, size_bytes: int, staging: Staging
) -> Callable[[], list[float]]:
    if pair is None:
        return lambda: [NAN]
    letters = Letters(pair, way.scheme, ensemble.effort.trips, size_bytes, ensemble.patience, staging)
    ops_share, hops = letters.share_of_critical_path()
    rest = Rest(way.pause_s)

    def act() -> list[float]:
        letters.exchange()  # after which both begin at one moment
        rest.taken_s = 0.0
        start = time.perf_counter()
        letters.exchange(act=rest.take if way.pause_s else idle)
        seconds = np.array([time.perf_counter() - start, rest.taken_s])
        ensemble.patience.wait(pair.comm.Iallreduce(MPI.IN_PLACE, seconds))
        return [(seconds[0] / 2 - ops_share * seconds[1]) / hops]

    return act


@dataclass
class Rest:
    """Sleeps, in which the other rank's wait grows drowsy, and adds up for how long."""

    pause_s: float
    taken_s: float = 0.0

    def take(self, op: Op) -> None:
        start = time.perf_counter()
        time.sleep(self.pause_s)
        self.taken_s += time.perf_counter() - start


def read_moved(ensemble: Ensemble, pair: Pair | None, size_bytes: int, alone_s: float, staging: Staging) -> float:
    """The share of a message of `size_bytes`, which takes `alone_s` by itself, that moves while its sender computes
    without a call of MPI. Collective."""
    compute_s = max(4 * alone_s, 5e-3)
    letters = Letters(pair, "naive", 1, size_bytes, ensemble.patience, staging) if pair else None
    product = Product(staging)

    def act() -> list[float]:
        if letters is None:
            return [NAN]
        letters.exchange()  # after which both begin at one moment
        start = time.perf_counter()
        arrived_s: list[float] = []

        def compute(op: Op) -> None:
            if letters.me == 0 and op.kind is Kind.FORWARD:
                product.until(start + compute_s)

        letters.exchange(came=lambda op: arrived_s.append(time.perf_counter() - start), sent=compute)
        return [arrived_s[0] if letters.me else NAN]

    (seconds,) = ensemble.read(act).values
    return NAN if math.isnan(seconds) else moved_share(alone_s, compute_s, seconds)
