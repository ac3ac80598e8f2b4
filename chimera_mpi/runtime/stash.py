"""What a forward keeps for its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..schedule import Op
from .mailbox import Tensors
from .tape import Tape


class Kept(NamedTuple):
    """The tape of a micro-batch at a stage; at the last stage also its number of targets."""

    tape: Tape
    targets: Tensors


class Stash:
    """What is kept by (pipe, stage, micro-batch), and the most that were there at once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self.peak = 0

    def put(self, op: Op, kept: Kept) -> None:
        self._kept[op[1:]] = kept
        self.peak = max(self.peak, len(self._kept))

    def get(self, op: Op) -> Kept:
        return self._kept[op[1:]]

    def pop(self, op: Op) -> Kept:
        return self._kept.pop(op[1:])

    def flush(self) -> None:
        """Raises RuntimeError if a forward was not followed by its backward."""
        if self._kept:
            raise RuntimeError(f"activations left in the stash at the flush: {sorted(self._kept)}")

    def clear(self) -> None:
        """Forget all, as no backward will follow."""
        self._kept.clear()
