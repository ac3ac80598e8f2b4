"""A run in progress as its log shows it at a moment: pure, of what was read and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..draw.look import clock
from ..runlog import Run
from ..sampled import Start, newest, start_of_step, starts_of
from ..schedule import Kind, Op, needs
from ..timeline import Timeline, Wait

RECENT = 20  # steps over which rates are taken
SILENT_S, TIMES = 30.0, 10  # without a new row, or so many times a step, until a run has gone silent
STARTING_S = 120.0  # the same before the first step of a session


class Writer(NamedTuple):
    """Who holds the lock of a log, in words, none if nobody does; whether that process lives, None where it cannot be
    seen from here."""

    name: str
    lives: bool | None


class State(Enum):
    RUNNING = "running"
    SILENT = "silent"
    ENDED = "ended"
    KILLED = "killed"


class Rank(NamedTuple):
    replica: int
    worker: int


class Cause(NamedTuple):
    """Whose op, of which kind, a rank waits for."""

    rank: Rank
    kind: Kind


class WorkerView(NamedTuple):
    """How a rank spends a step, in shares of it, and what it waits for most, in a share of its waiting."""

    rank: Rank
    compute: float
    wait: float
    allreduce: float
    update: float
    peak_bytes: float
    most: Cause | None
    share: float


@dataclass(frozen=True, eq=False)
class View:
    """A run as its log shows it. A number that the log does not have yet is nan."""

    path: str
    what: tuple[str, ...]
    state: State
    status: str
    done: int
    steps: int
    left_s: float
    losses: NDArray[np.float64]  # of all steps
    grad_norm: float
    learning_rate: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    bubble: float
    validation: tuple[tuple[int, float], ...]  # after which step, and the loss
    skipped: tuple[int, ...]
    checkpoints: str
    sessions: tuple[str, ...]
    workers: tuple[WorkerView, ...]
    sampled: int | None  # the step that says who waits for whom

    def is_over(self, waits: bool) -> bool:
        """Whether there is nothing more to see. Who `waits` expects a run that stopped early to be resumed."""
        if self.state in (State.ENDED, State.KILLED):
            return not waits or self.done >= self.steps
        return False


def view_of(run: Run, now: datetime, changed: datetime, writer: Writer) -> View:
    """What a log held when it was read, which had grown last when it had `changed`. Raises InputError if its
    configuration is none that this version knows."""
    start, steps, last = starts_of(run)[-1], run.steps, newest(run)
    _ = start.plan  # refused now, not when a step has been sampled
    recent = _recent(run)
    step_s = _mean(steps["seconds"][recent])
    done = int(steps["step"][-1]) + 1 if len(steps["step"]) else 0
    state = _state(run, step_s, (now - changed).total_seconds(), writer)
    return View(
        path=str(run.path),
        what=tuple(_what(run, start)),
        state=state,
        status=_status(state, run, now, changed, writer),
        done=done,
        steps=start.config.steps,
        left_s=(start.config.steps - done) * step_s,
        losses=steps["loss"],
        grad_norm=_last(steps["grad_norm"]),
        learning_rate=_last(steps["learning_rate"]),
        step_s=step_s,
        samples_per_s=_mean(steps["samples"][recent]) / step_s,
        tokens_per_s=_mean(steps["tokens"][recent]) / step_s,
        bubble=_mean(steps["bubble_ratio"][recent]),
        validation=tuple(zip(run.evaluations["step"].tolist(), run.evaluations["loss"].tolist(), strict=True)),
        skipped=tuple(steps["step"][steps["skipped"]].tolist()),
        checkpoints=_checkpoints(start),
        sessions=tuple(_told(run, number, now) for number in range(1, len(run.sessions) + 1)),
        workers=tuple(_workers(run, start, recent, step_s, _blamed(run, start, last))),
        sampled=last[0] if last else None,
    )


def blames(replicas: Sequence[Timeline]) -> dict[Rank, dict[Cause, float]]:
    """For each rank the seconds of a step in which it was idle, by what it waited for.

    An update waits for the last of all ranks that start to add up the gradients of its stage: where that is the rank
    itself, for the sum.
    """
    starts: dict[Op, list[tuple[float, Rank]]] = defaultdict(list)
    for replica, timeline in enumerate(replicas):
        for span in timeline.spans:
            if span.op.kind is Kind.REDUCE:
                starts[span.op].append((span.end_s, Rank(replica, span.worker)))
    found: dict[Rank, dict[Cause, float]] = defaultdict(lambda: defaultdict(float))
    for replica, timeline in enumerate(replicas):
        for op, wait in timeline.waits.items():
            cause = _cause(timeline, replica, op, wait, starts)
            if cause and wait.idle_s > 0:
                found[Rank(replica, timeline.schedule.worker(op))][cause] += wait.idle_s
    return dict(found)


def _cause(
    timeline: Timeline, replica: int, op: Op, wait: Wait, starts: Mapping[Op, Sequence[tuple[float, Rank]]]
) -> Cause | None:
    """None where a worker waits for nobody but itself."""
    if op.kind is Kind.UPDATE:
        of_all = [start for need in needs(timeline.schedule, op) for start in starts.get(need, ())]
        return Cause(max(of_all)[1], Kind.REDUCE) if len(of_all) > 1 else None
    if wait.cause is None or wait.cause.worker == timeline.schedule.worker(op):
        return None
    return Cause(Rank(replica, wait.cause.worker), wait.cause.op.kind)


def _workers(
    run: Run, start: Start, recent: NDArray[np.intp], step_s: float, blamed: Mapping[Rank, Mapping[Cause, float]]
) -> Iterator[WorkerView]:
    if not len(recent):
        return
    ranks = start.width * start.depth
    shares = (
        run.workers[name][recent, :ranks].mean(axis=0) / step_s
        for name in ("compute_s", "wait_s", "allreduce_wait_s", "update_s")
    )
    rows = np.stack([*shares, run.workers["peak_bytes"][recent[-1], :ranks]], axis=1).tolist()
    for number, (compute, wait, allreduce, update, peak_bytes) in enumerate(rows):
        rank = Rank(*divmod(number, start.depth))
        causes = blamed.get(rank, {})
        most = max(causes, key=causes.__getitem__, default=None)
        share = causes[most] / sum(causes.values()) if most else 0.0
        yield WorkerView(rank, compute, wait, allreduce, update, peak_bytes, most, share)


def _blamed(run: Run, start: Start, last: tuple[int, tuple[Timeline, ...]] | None) -> dict[Rank, dict[Cause, float]]:
    """By the last sampled step, if it was done in the same layout."""
    if last is None:
        return {}
    step, replicas = last
    then = start_of_step(run, step)
    return blames(replicas) if (then.width, then.depth) == (start.width, start.depth) else {}


def _recent(run: Run) -> NDArray[np.intp]:
    """The last rows, of the last session without its warm-up, if it has such, else of what there is."""
    mine = run.steps["session"] == len(run.sessions) - 1
    for rows in (mine & ~run.steps["warmup"], mine, np.ones_like(mine)):
        if rows.any():
            return np.flatnonzero(rows)[-RECENT:]
    return np.flatnonzero(mine)


def _state(run: Run, step_s: float, silent_s: float, writer: Writer) -> State:
    """Who has written the end of a session and holds the lock still is about to let go of it, or to begin another."""
    if run.sessions[-1].end:
        goes_on = writer.name and writer.lives is not False and silent_s <= SILENT_S
        return State.RUNNING if goes_on else State.ENDED
    if writer.lives is False:
        return State.KILLED
    limit_s = max(SILENT_S, TIMES * step_s) if _has_stepped(run) else STARTING_S
    return State.SILENT if silent_s > limit_s else State.RUNNING


def _has_stepped(run: Run) -> bool:
    return bool((run.steps["session"] == len(run.sessions) - 1).any())


def _status(state: State, run: Run, now: datetime, changed: datetime, writer: Writer) -> str:
    session = run.sessions[-1]
    if state is State.ENDED:
        end = _time(datetime.fromisoformat(session.end), now)
        return f"done at {end}" if session.reason == "done" else f"ended at {end}: {session.reason}"
    if state is State.KILLED:
        return f"killed: {writer.name} is gone, its last rows are of {_time(changed, now)}"
    if state is State.SILENT:
        return f"silent since {_time(changed, now)}, for {clock((now - changed).total_seconds())}: {_alive(writer)}"
    if session.end:
        return f"ending or going on: {writer.name}"
    if not _has_stepped(run):
        again = f" again, steps up to {run.steps['step'][-1]} are in the log" if len(run.steps["step"]) else ""
        return f"starting{again}: no step yet since {_time(datetime.fromisoformat(session.start), now)}"
    return f"running: {writer.name}" if writer.name else "running"


def _alive(writer: Writer) -> str:
    if not writer.name:
        return "nobody holds its lock"
    return f"{writer.name} lives" if writer.lives else f"whether {writer.name} lives cannot be seen from here"


def _what(run: Run, start: Start) -> Iterator[str]:
    config = start.config
    yield f"{config.model} with {config.scheme}"
    yield f"depth {start.depth} x width {start.width}"
    yield f"{config.micro_batches} micro-batches"
    if samples := run.attributes.get("mini_batch_size"):
        yield f"{samples} samples a step"


def _checkpoints(start: Start) -> str:
    config = start.config
    if config.checkpoint is None:
        return "none"
    every = f"every {config.checkpoint_every} steps and at the end" if config.checkpoint_every else "at the end"
    return f"{every}, in {config.checkpoint}"


def _told(run: Run, number: int, now: datetime) -> str:
    """A session in a line."""
    session = run.sessions[number - 1]
    first = f"from step {session.first_step}" if session.first_step >= 0 else "no step"
    end = session.reason or ("has not ended" if number == len(run.sessions) else "killed")
    start = _time(datetime.fromisoformat(session.start), now)
    return f"{number}  {start}, {session.ranks} ranks, {first}: {end}"


def _mean(values: NDArray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else np.nan


def _last(values: NDArray) -> float:
    return float(values[-1]) if len(values) else np.nan


def _time(when: datetime, now: datetime) -> str:
    """On the clock of `now`, with the day if it is another."""
    there = when.astimezone(now.tzinfo)
    return f"{there:%H:%M:%S}" if there.date() == now.date() else f"{there:%Y-%m-%d %H:%M:%S}"
