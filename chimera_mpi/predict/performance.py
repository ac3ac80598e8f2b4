"""The performance model of the Chimera paper (Li and Hoefler 2021, Section 3.4, Eq. 1), for every scheme.

    T = (F + Comm) C_f + (B + Comm) C_b + max over workers of Comm_unoverlapped

C_f and C_b are the passes on the critical path of the schedule when messages are free. Comm_unoverlapped is what a
worker's all-reduces last beyond the end of the last backward of all, with the free regions before it taken off. Where
the backward is split, input gradients stand in for backwards and weight gradients are passes without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..schedule import COMPUTE, Kind, Schedule, messages
from .costs import Costs, at_stage
from .simulate import simulate


class Passes(NamedTuple):
    """The passes on the critical path: C_f, C_b (whole or input gradients) and C_w (weight gradients alone)."""

    forward: float
    backward: float
    weight: float = 0

    def plus(self, other: Passes, times: float) -> Passes:
        return Passes(*(mine + times * its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Performance:
    """Eq. 1 of one step, seconds: F, B (whole, or input gradient) and weight gradient of the busiest worker's stage."""

    passes: Passes
    forward_s: float
    backward_s: float
    weight_s: float
    transfer_s: float
    unoverlapped_s: float
    update_s: float = 0.0

    @property
    def step_s(self) -> float:
        return (
            (self.forward_s + self.transfer_s) * self.passes.forward
            + (self.backward_s + self.transfer_s) * self.passes.backward
            + self.weight_s * self.passes.weight
            + self.unoverlapped_s
            + self.update_s
        )
