"""The sessions of a run, and its sampled steps as timelines of the schedules that these carried out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import draw
from .config import Config, Steps, checked, schedule_of
from .draw import SampledStep
from .errors import InputError
from .predict.partition import by_thirds
from .runlog import Run, Session, array_spans
from .schedule import STREAMS
from .timeline import Timeline

MOST_SPANS = 250_000  # of a trace: about 70 MB
KEPT = 1000  # configurations: those of all logs of a large study, whose spans take more memory than their plans
WHAT = ["replica", "worker", "kind", "pipe", "stage", "index"]
FIGURES = ("loss", "grad_norm", "learning_rate", "samples_per_s", "bubble_ratio")


@dataclass(frozen=True, eq=False)
class Start:
    """A session of a run: what the job was when it started."""

    run: Run
    number: int

    @property
    def session(self) -> Session:
        return self.run.sessions[self.number]

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """What the session was given; what an older log did not write down of it, the run as a whole was."""
        return {**self.run.attributes, **self.session.attributes}

    def check_has(self, *names: str) -> None:
        """Raises InputError if it lacks an attribute that every training has."""
        for name in names:
            if name not in self.attributes:
                raise InputError(f"{self.run.path} has no {name!r}: is it the log of chimera-mpi train?")

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The configuration as it was written down."""
        with self._reading():
            found = json.loads(str(self.attributes.get("config", "{}")))
        return found if isinstance(found, dict) else {}

    @cached_property
    def config(self) -> Config:
        """Keys that this version does not know are passed over. Raises InputError."""
        self.check_has("config")
        with self._reading():
            return _asked(self.attributes["config"])

    @property
    def ranks(self) -> int:
        return self.session.ranks

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def width(self) -> int:
        with self._reading():
            return int(self.attributes.get("width", 1))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Each once."""
        with self._reading():
            return tuple(dict.fromkeys(json.loads(str(self.attributes.get("hosts", "[]"))) or [self.session.host]))

    @property
    def plan(self) -> Steps:
        """The schedule that each replica carried out. Raises InputError if this program does not know the scheme."""
        planned_by = self._planned_by
        with self._reading():
            return _plan(*planned_by)

    @property
    def wanted(self) -> frozenset[tuple[Any, ...]]:
        """What there is a span of in a sampled step, by the columns `WHAT`."""
        width, planned_by = self.width, self._planned_by
        with self._reading():
            return _wanted(width, *planned_by)

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """Where its steps are in the log."""
        return np.flatnonzero(self.run.steps["session"] == self.number)

    @cached_property
    def _planned_by(self) -> tuple[str, str, int]:
        """Configuration, costs of the stages, and the steps that were done, where these count."""
        done = max(self.session.first_step, 0) if self.config.scheme in STREAMS else 0
        return self.attributes["config"], self.attributes.get("stage_costs", "[]"), done

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # refused; or the log is damaged
            raise InputError(f"{self.run.path}: its configuration cannot be read: {error}") from None


def starts_of(run: Run) -> list[Start]:
    return [Start(run, number) for number in range(len(run.sessions))]


def start_of_step(run: Run, step: int) -> Start:
    """Of the session that did a step which is in the log."""
    return _start_at(run, _row(run, step))


@lru_cache(maxsize=KEPT)
def _asked(config: str) -> Config:
    return checked({key: value for key, value in json.loads(config).items() if key in Config.model_fields})


@lru_cache(maxsize=KEPT)
def _plan(config: str, costs: str, done: int) -> Steps:
    asked = _asked(config)
    ordered_by = None if asked.order == "drawn" else by_thirds(json.loads(costs), asked.recompute != "none")
    return schedule_of(asked, ordered_by, done)


@lru_cache(maxsize=16)
def _wanted(width: int, config: str, costs: str, done: int) -> frozenset[tuple[Any, ...]]:
    return frozenset(
        (replica, worker, op.kind.value.encode(), op.pipe, op.stage, op.index)
        for replica in range(width)
        for worker, order in enumerate(_plan(config, costs, done).schedule.orders)
        for op in order
    )


def timelines(run: Run, step: int) -> tuple[Timeline, ...]:
    """Of each replica one, of a step that is in the log. None if it was not sampled, or by a session that was killed
    before it logged the step, which another layout did again."""
    if not is_whole(run, step):
        return ()
    start, rows = start_of_step(run, step), run.rows_by_step[step]
    replicas = (rows[rows["replica"] == replica] for replica in range(start.width))
    return tuple(Timeline(start.plan.schedule, array_spans(of_one)) for of_one in replicas)


def is_whole(run: Run, step: int) -> bool:
    """Whether a step that is in the log has a span of each op of its schedule, and of nothing else."""
    rows = run.rows_by_step.get(step)
    if rows is None:
        return False
    wanted = start_of_step(run, step).wanted
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
        every = starts_of(run)[-1].config.spans_every
        raise InputError(f"{run.path} has no spans yet: one step in {every} has some at first, see spans_every=")
    ends_s = _ends(run, numbers)
    for number, replicas in there.items():
        row = _row(run, number)
        before = row - _start_at(run, row).plan.steps
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
        with_it = slice(row + 1 - _start_at(run, row).plan.steps, row)  # of a stream the spans are those of all
        seconds[row] = max(seconds[row], run.rows_by_step[step]["end_s"].max() - seconds[with_it].sum())
    return np.cumsum(seconds).tolist()


def _with_spans(run: Run) -> list[int]:
    return np.intersect1d(list(run.rows_by_step), run.steps["step"]).tolist()


def _row(run: Run, step: int) -> int:
    return int(np.searchsorted(run.steps["step"], step))


def _start_at(run: Run, row: int) -> Start:
    return Start(run, int(run.steps["session"][row]))
