"""Train transformers with bidirectional pipelines over MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """`Trainer` when it is first asked for: schedules need neither torch nor MPI, which it brings along."""
    if name == "Trainer":
        from .trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
