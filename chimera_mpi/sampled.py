"""The sampled steps of a run as timelines, of the schedules that its sessions carried out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any

import numpy as np

from . import draw
from .config import Config, Steps, checked, schedule_of
from .draw import SampledStep
from .errors import InputError
from .predict.partition import by_thirds
from .runlog import Run, array_spans
from .schedule import STREAMS
from .timeline import Timeline

MOST_SPANS = 250_000  # of a trace: about 70 MB
WHAT = ["replica", "worker", "kind", "pipe", "stage", "index"]
FIGURES = ("loss", "grad_norm", "learning_rate", "samples_per_s", "bubble_ratio")


@dataclass(frozen=True)
class Layout:
    """What a session was asked for, in so many replicas, and the schedule that each of them carried out."""

    config: Config
    width: int
    plan: Steps

    @property
    def depth(self) -> int:
        return self.config.depth

    @cached_property
    def wanted(self) -> frozenset[tuple[Any, ...]]:
        """What there is a span of in a sampled step, by the columns `WHAT`."""
        return frozenset(
            (replica, worker, op.kind.value.encode(), op.pipe, op.stage, op.index)
            for replica in range(self.width)
            for worker, order in enumerate(self.plan.schedule.orders)
            for op in order
        )


def given_to(run: Run, session: int = -1) -> dict[str, Any]:
    """What a session was given; what an older log did not write down of it, the run as a whole was."""
    return {**run.attributes, **run.sessions[session].attributes}


def asked_of(run: Run, session: int = -1) -> Config:
    """The configuration of a session, by default the last: a run may be resumed with another. Raises InputError."""
    given = given_to(run, session)
    if "config" not in given:
        raise InputError(f"{run.path} says nothing of what was trained: is it the log of chimera-mpi train?")
    with _read_from(run):
        return _asked(given["config"])


def layout_of(run: Run, session: int = -1) -> Layout:
    """That of a session, by default the last. Raises InputError."""
    asked, given = asked_of(run, session), given_to(run, session)
    done = max(run.sessions[session].first_step, 0) if asked.scheme in STREAMS else 0
    with _read_from(run):
        return _layout(given["config"], given.get("stage_costs", "[]"), int(given.get("width", 1)), done)


@contextmanager
def _read_from(run: Run) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{run.path}: its configuration cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _asked(config: str) -> Config:
    """Keys that this version does not know are passed over."""
    return checked({key: value for key, value in json.loads(config).items() if key in Config.model_fields})


@lru_cache(maxsize=16)
def _layout(config: str, costs: str, width: int, done: int) -> Layout:
    asked = _asked(config)
    ordered_by = None if asked.order == "drawn" else by_thirds(json.loads(costs), asked.recompute != "none")
    return Layout(asked, width, schedule_of(asked, ordered_by, done))


def layout_of_step(run: Run, step: int) -> Layout:
    """That of the session that did a step which is in the log."""
    return _layout_at(run, _row(run, step))


def timelines(run: Run, step: int) -> tuple[Timeline, ...]:
    """Of each replica one, of a step that is in the log. None if it was not sampled, or by a session that was killed
    before it logged the step, which another layout did again."""
    if not is_whole(run, step):
        return ()
    layout, rows = layout_of_step(run, step), run.rows_by_step[step]
    replicas = (rows[rows["replica"] == replica] for replica in range(layout.width))
    return tuple(Timeline(layout.plan.schedule, array_spans(of_one)) for of_one in replicas)


def is_whole(run: Run, step: int) -> bool:
    """Whether a step that is in the log has a span of each op of its layout, and of nothing else."""
    rows = run.rows_by_step.get(step)
    if rows is None:
        return False
    wanted = layout_of_step(run, step).wanted
    return len(rows) == len(wanted) and wanted.issuperset(rows[WHAT].tolist())


def newest(run: Run) -> tuple[int, tuple[Timeline, ...]] | None:
    """The last sampled step, and its timelines."""
    for step in reversed(_with_spans(run)):
        if found := timelines(run, step):
            return step, found
    return None


def sampled(run: Run, step: int | None = None, most_spans: int = MOST_SPANS) -> Iterator[SampledStep]:
    """One sampled step, or all of them, the last ones if they have more than `most_spans`; on the axis of the run: the
    seconds of its steps, without what lies between them (evaluations, checkpoints, the time from session to session).
    Spans whose step a kill kept out of the log are left out. Raises InputError."""
    numbers = _with_spans(run)
    if step is not None and step not in numbers:
        known = ", ".join(map(str, numbers[:12])) or "none"
        raise InputError(f"{run.path} has no spans of step {step}: sampled are {known}")
    wanted = _last(run, numbers, most_spans) if step is None else [step]
    there = {number: found for number in wanted if (found := timelines(run, number))}
    if not there:
        every = layout_of(run).config.spans_every
        raise InputError(f"{run.path} has no spans yet: those of every {every} steps are logged, see spans_every=")
    ends_s = _ends(run, numbers)
    for number, replicas in there.items():
        row = _row(run, number)
        before = row - _layout_at(run, row).plan.steps
        figures = {name: float(run.steps[name][row]) for name in FIGURES}
        finite = {name: value for name, value in figures.items() if isfinite(value)}
        yield SampledStep(number, ends_s[before] if before >= 0 else 0.0, ends_s[row], replicas, finite)


def trace_of(run: Run, step: int | None = None) -> str:
    """What `sampled` has as a Chrome trace. Raises InputError."""
    return draw.run_trace(sampled(run, step), run.path.name)


def _last(run: Run, numbers: Sequence[int], most_spans: int) -> Sequence[int]:
    """The last steps that have no more spans together, at least one."""
    together = np.cumsum([len(run.rows_by_step[number]) for number in reversed(numbers)])
    return numbers[-max(int(np.searchsorted(together, most_spans, "right")), 1) :]


def _ends(run: Run, there: Sequence[int]) -> list[float]:
    """The ends of all steps on the axis of the run. A step lasts as long as rank 0 took for it, or a little longer
    where another worker was the last: the next one must not begin before."""
    seconds = run.steps["seconds"].astype(np.float64)
    for step in there:
        row = _row(run, step)
        with_it = slice(row + 1 - _layout_at(run, row).plan.steps, row)  # of a stream the spans are those of all
        seconds[row] = max(seconds[row], run.rows_by_step[step]["end_s"].max() - seconds[with_it].sum())
    return np.cumsum(seconds).tolist()


def _with_spans(run: Run) -> list[int]:
    return np.intersect1d(list(run.rows_by_step), run.steps["step"]).tolist()


def _row(run: Run, step: int) -> int:
    return int(np.searchsorted(run.steps["step"], step))


def _layout_at(run: Run, row: int) -> Layout:
    return layout_of(run, int(run.steps["session"][row]))
