"""The steps of a run that can be measured together: those of one layout.

A run may be resumed with another number of ranks, another depth or another scheme. Its medians, costs and spans are
those of the sessions that had the same layout, by default that of the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..runlog import Run
from ..sampled import Start, is_whole, starts_of
from ..schedule import STREAMS, Schedule
from ..timeline import Timeline

# Keys that change neither what a step computes nor how.
INCIDENTAL = frozenset(
    {"seed", "data", "log", "checkpoint", "checkpoint_every", "checkpoint_keep", "resume", "check_replicas",
     "spans_every", "profile", "time_limit", "watchdog_s", "machine"}
)  # fmt: skip
# Keys that change what is learnt, and not how long it takes.
LEARNING = frozenset(
    {"steps", "learning_rate", "minimum_learning_rate", "warmup_steps", "weight_decay", "momentum", "loss_scale",
     "on_nan", "eval_every", "eval_mini_batches"}
)  # fmt: skip
# Keys of how a mini-batch is shared out, which tables have columns for or which follow from these.
SHAPE = frozenset({"depth", "micro_batches", "micro_batch_size", "mini_batch_size", "accumulate", "partition"})
# Keys of a model, beside the number of its parameters.
MODEL = ("model", "layers", "hidden", "heads", "vocabulary", "positions", "tied", "sequence_length")


def without(keys: Mapping[str, Any], *left_out: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not any(key in some for some in left_out)}


def differing(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that do not have one value in all."""
    keys = dict.fromkeys(key for each in many for key in each)
    return [key for key in keys if any(each.get(key) != many[0].get(key) for each in many)]


def canonical(keys: Mapping[str, Any]) -> str:
    """Equal for equal keys."""
    return json.dumps(keys, sort_keys=True, default=str)


def check_training(start: Start) -> None:
    """Raises InputError if the log has not what `train` writes, or a configuration that it does not know."""
    start.check_has("config", "width", "mini_batch_size")
    if start.depth * start.width != start.ranks:
        raise InputError(f"{start.run.path} has {start.ranks} ranks with depth={start.depth} and width={start.width}")


def layout_of(start: Start) -> str:
    """Equal where steps do the same in the same way."""
    parts = {"ranks": start.ranks, "hosts": len(start.hosts), "partition": start.attributes.get("partition")}
    if start.keys.get("scheme") in STREAMS:  # its steps come in passes, whose length depends on where it began
        parts["steps"] = start.plan.steps
    return canonical({**without(start.keys, INCIDENTAL, LEARNING), **parts})


@dataclass(frozen=True, eq=False)
class Part:
    """The steps that some sessions of one layout did; `starts` are in order, one at least."""

    run: Run
    starts: tuple[Start, ...]

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def is_whole(self) -> bool:
        """Whether it has all steps of the run."""
        return len(self.rows) == len(self.run.steps["step"])

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        return np.concatenate([start.rows for start in self.starts])

    @cached_property
    def counted(self) -> NDArray[np.intp]:
        """The rows without warm-up, if there are any."""
        counted = self.rows[~self.run.steps["warmup"][self.rows]]
        return counted if len(counted) else self.rows

    @property
    def is_warm(self) -> bool:
        """Whether it has steps beside the warm-up."""
        return not self.run.steps["warmup"][self.counted].any()

    def column(self, name: str) -> NDArray[Any]:
        """Of the counted steps."""
        return self.run.steps[name][self.counted]

    def of_workers(self, name: str) -> NDArray[np.float64]:
        """[counted steps, replicas, workers]."""
        ranks = self.last.ranks
        table = self.run.workers[name][self.counted][:, :ranks].astype(np.float64)
        return table.reshape(len(table), self.last.width, -1)

    def median(self, name: str) -> float:
        values = self.column(name)
        return float(np.nanmedian(values)) if np.isfinite(values).any() else np.nan

    @property
    def schedule(self) -> Schedule:
        return self.last.plan.schedule

    @cached_property
    def sampled_steps(self) -> tuple[int, ...]:
        """The steps whose spans are those of its schedule."""
        mine = set(self.run.steps["step"][self.rows].tolist())
        return tuple(step for step in self.run.sampled_steps if step in mine and is_whole(self.run, step))

    def timeline(self, step: int | None = None) -> Timeline:
        """The first replica's sampled step, by default the last one. Raises InputError if it was not sampled."""
        if not self.sampled_steps:
            raise InputError(
                f"{self.run.path} has no spans{'' if self.is_whole else f' of session {self.last.number}'} yet: "
                f"wait for step {self.last.config.spans_every}"
            )
        if step is not None and step in self.run.sampled_steps and step not in self.sampled_steps:
            others = self.run.steps["session"][self.run.steps["step"] == step].tolist()
            remedy = f"give --session {others[0]}" if others else "take another step"
            raise InputError(f"{self.run.path}: step {step} was done in another layout: {remedy}")
        return self.run.timeline(self.sampled_steps[-1] if step is None else step, self.schedule)


def part_of(run: Run, session: int | None = None) -> Part:
    """The steps of `session`; by default of all sessions that had the layout of the last one that did a step.

    Raises InputError if there is no such session.
    """
    starts = starts_of(run)
    if session is not None:
        if not 0 <= session < len(starts):
            last = len(starts) - 1
            raise InputError(f"{run.path} has no session {session}: give one from 0 to {last}")
        return Part(run, (starts[session],))
    last_start = next((start for start in reversed(starts) if len(start.rows)), starts[-1])
    if len(starts) == 1 or not len(last_start.rows):
        return Part(run, (last_start,))
    layout = layout_of(last_start)
    return Part(run, tuple(s for s in starts if s is last_start or (len(s.rows) and layout_of(s) == layout)))
