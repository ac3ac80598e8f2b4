"""The moments at which trials kill a rank."""

from __future__ import annotations

from dataclasses import dataclass

OF_RANK_0 = {"log", "flush", "commit"}  # phases that no other rank comes by


@dataclass(frozen=True)
class Fault:
    """A rank is killed at a call of a part of the program, by its name in tests/fail_at.py, or so many ms after its
    start."""

    phase: str
    call: int
    rank: int

    def __str__(self) -> str:
        return f"{self.phase}:kill:{self.call}"
