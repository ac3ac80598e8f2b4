"""Sums of gradients over ranks, by the runtime's gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ...models import Model
from ...models.layers import cross_entropy
from ...predict.calibrated import SumReading
from ...predict.fit import hidden_share
from ...schedule import build
from ..gradients import Gradients
from ..grid import Comm, Grid
from ..stage import Stage
from ..staging import Staging
from ..waiting import Patience
from .ensemble import ALONE, NAN, Ensemble
from .layout import Group
from .product import computing, product_below

PARAMETER = 1 << 16  # numbers in a parameter of what is summed only


class Stock(nn.Module):
    """Parameters that nothing computes with."""

    def __init__(self, size_bytes: int):
        super().__init__()
        whole, rest = divmod(max(size_bytes // 4, 1), PARAMETER)
        sizes = [PARAMETER] * whole + ([rest] if rest else [])
        self.parameters_of_all = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


class Gathering:
    """The runtime's gradients of one stage over the ranks of a group."""

    def __init__(self, comm: Comm, size_bytes: int, patience: Patience, staging: Staging):
        self.grid = Grid(comm, 1)
        stage = Stage(Model((partial(Stock, size_bytes),), cross_entropy), range(1), 0, device=staging.device)
        self.gradients = Gradients(self.grid, build("1f1b", 1, 1), {ALONE: stage}, (), patience, staging=staging)

    def sum(self, meanwhile: Callable[[], object] = lambda: None) -> float:
        """Seconds of a sum, and of what is done meanwhile."""
        start = time.perf_counter()
        self.gradients.start(ALONE)
        meanwhile()
        self.gradients.await_sums(ALONE)
        end = time.perf_counter()
        self.gradients.release(ALONE)
        return end - start

    def close(self) -> None:
        self.gradients.close()
        self.grid.close()


def read_sums(ensemble: Ensemble, group: Group, staging: Staging) -> list[SumReading]:
    """Sums of all sizes over one group of ranks, the largest also while the ranks compute. Collective."""
    found: list[SumReading] = []
    for size_bytes in ensemble.effort.sum_bytes:
        with _gathering(ensemble, group, size_bytes, staging) as gathering:
            seconds = ensemble.read(partial(_summed, gathering)).values[0]
            is_last = size_bytes == ensemble.effort.sum_bytes[-1] or 16 * seconds > ensemble.effort.longest_s
            hidden = _hidden(ensemble, gathering, seconds, staging) if is_last else None
            found.append(SumReading(group.replicas, group.nodes, size_bytes, seconds, hidden))
        if is_last:
            break
    return found


@contextmanager
def _gathering(ensemble: Ensemble, group: Group, size_bytes: int, staging: Staging) -> Iterator[Gathering | None]:
    gathering = Gathering(group.comm, size_bytes, ensemble.patience, staging) if group.comm else None
    yield gathering
    if gathering:
        gathering.close()


def _summed(gathering: Gathering | None) -> list[float]:
    if gathering is None:
        return [NAN]
    gathering.sum()  # after which all begin at one moment
    return [gathering.sum()]


def _hidden(ensemble: Ensemble, gathering: Gathering | None, alone_s: float, staging: Staging) -> float:
    """The share of a sum that goes on while the ranks compute, and drive it between products as between ops."""
    product, product_s = product_below(ensemble, alone_s / 4, staging)
    count = max(math.ceil(1.5 * alone_s / product_s), 4)

    def act() -> list[float]:
        if gathering is None:
            return [NAN, NAN]
        gathering.sum()
        together_s = gathering.sum(lambda: computing(product, count, gathering.gradients.poke))
        return [computing(product, count), together_s]

    compute_s, together_s = ensemble.read(act).values
    return hidden_share(alone_s, compute_s, together_s)
