"""What can be seen of a run in progress: a view of its log at a moment, and the view as lines of text.

Pure: `view_of` makes a value of what was read and when, `lines` makes text of it. `commands/watch.py` reads and shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from math import inf, isfinite
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .draw.look import ASCII, NAMES, clock, duration, figure, percent
from .runlog import Run
from .sampled import Layout, layout_of, layout_of_step, newest
from .schedule import Kind, Op, needs
from .timeline import Timeline, Wait

RECENT = 20  # steps over which rates are taken
SILENT_S, TIMES = 30.0, 10  # without a new row, or so many times a step, until a run has gone silent
STARTING_S = 120.0  # the same before the first step of a session


# ------------------------------------------------------------------------------------------------ the view


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
    layout, steps, last = layout_of(run), run.steps, newest(run)
    recent = _recent(run)
    step_s = _mean(steps["seconds"][recent])
    done = int(steps["step"][-1]) + 1 if len(steps["step"]) else 0
    state = _state(run, step_s, (now - changed).total_seconds(), writer)
    return View(
        path=str(run.path),
        what=tuple(_what(run, layout)),
        state=state,
        status=_status(state, run, now, changed, writer),
        done=done,
        steps=layout.config.steps,
        left_s=(layout.config.steps - done) * step_s,
        losses=steps["loss"],
        grad_norm=_last(steps["grad_norm"]),
        learning_rate=_last(steps["learning_rate"]),
        step_s=step_s,
        samples_per_s=_mean(steps["samples"][recent]) / step_s,
        tokens_per_s=_mean(steps["tokens"][recent]) / step_s,
        bubble=_mean(steps["bubble_ratio"][recent]),
        validation=tuple(zip(run.evaluations["step"].tolist(), run.evaluations["loss"].tolist(), strict=True)),
        skipped=tuple(steps["step"][steps["skipped"]].tolist()),
        checkpoints=_checkpoints(layout),
        sessions=tuple(_told(run, number, now) for number in range(1, len(run.sessions) + 1)),
        workers=tuple(_workers(run, layout, recent, step_s, _blamed(run, layout, last))),
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
    run: Run, layout: Layout, recent: NDArray[np.intp], step_s: float, blamed: Mapping[Rank, Mapping[Cause, float]]
) -> Iterator[WorkerView]:
    if not len(recent):
        return
    ranks = layout.width * layout.depth
    shares = (
        run.workers[name][recent, :ranks].mean(axis=0) / step_s
        for name in ("compute_s", "wait_s", "allreduce_wait_s", "update_s")
    )
    rows = np.stack([*shares, run.workers["peak_bytes"][recent[-1], :ranks]], axis=1).tolist()
    for number, (compute, wait, allreduce, update, peak_bytes) in enumerate(rows):
        rank = Rank(*divmod(number, layout.depth))
        causes = blamed.get(rank, {})
        most = max(causes, key=causes.__getitem__, default=None)
        share = causes[most] / sum(causes.values()) if most else 0.0
        yield WorkerView(rank, compute, wait, allreduce, update, peak_bytes, most, share)


def _blamed(run: Run, layout: Layout, last: tuple[int, tuple[Timeline, ...]] | None) -> dict[Rank, dict[Cause, float]]:
    """By the last sampled step, if it was done in this layout."""
    if last is None:
        return {}
    step, replicas = last
    then = layout_of_step(run, step)
    return blames(replicas) if (then.width, then.depth) == (layout.width, layout.depth) else {}


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


def _what(run: Run, layout: Layout) -> Iterator[str]:
    config = layout.config
    yield f"{config.model} with {config.scheme}"
    yield f"depth {layout.depth} x width {layout.width}"
    yield f"{config.micro_batches} micro-batches"
    if samples := run.attributes.get("mini_batch_size"):
        yield f"{samples} samples a step"


def _checkpoints(layout: Layout) -> str:
    config = layout.config
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


# ------------------------------------------------------------------------------------------------ as text


class Part(NamedTuple):
    """A piece of a line; `style` is a colour or a weight, by the names that rich has for them."""

    text: str
    style: str = ""


Line = tuple[Part, ...]

STYLES = {State.RUNNING: "green", State.SILENT: "yellow", State.ENDED: "bold", State.KILLED: "red"}
BLOCKS, BLOCKS_ASCII = "▁▂▃▄▅▆▇█", ".:#"
BAR, BAR_ASCII = ("█", "░"), ("#", "-")
LABEL = 12  # letters before a figure
CURVE = 4  # rows
SHOWN, SESSIONS = 32, 3  # ranks where the height is not limited, and sessions, at most


def lines(view: View, width: int, height: int | None = None, ascii: bool = False) -> list[Line]:
    """The view in lines of at most `width` letters, and no more of them than `height`."""
    status = [(Part(words, STYLES[view.state]),) for words in wrap(view.status, max(width, LABEL))]
    head = [(Part(view.path, "bold"),), *_packed("", [Part(word, "dim") for word in view.what], width), *status, ()]
    figures = [line for name, phrases in _figures(view) for line in _packed(name, phrases, width)]
    progress = _progress(view, width, ascii)
    rest = SHOWN + CURVE + 5 if height is None else height - len(head) - len(progress) - len(figures)
    table = min(len(view.workers), 4) + 3
    shape = curve(view.losses, width - LABEL, CURVE, ascii) if rest >= CURVE + table else []
    drawn = [(Part(name.rjust(LABEL - 2) + "  ", "dim"), Part(row, "cyan")) for name, row in _scaled(view, shape)]
    below = _table(view, width, rest - len(drawn) - 1)
    whole = [*head, *progress, *drawn, *figures, *([(), *below] if below else [])]
    return [_fitted(line, width, ascii) for line in whole[:height]]


def _packed(name: str, phrases: Sequence[Part], width: int) -> list[Line]:
    """Phrases behind a name, or at the edge without one, in as many lines as they need."""
    indent = LABEL if name else 0
    rows: list[list[Part]] = []
    room = 0
    for text, style in phrases:
        if rows and len(text) + 2 <= room:
            rows[-1].append(Part(f"  {text}", style))
            room -= len(text) + 2
        else:
            rows.append([Part(("" if rows else name).ljust(indent), "dim"), Part(text, style)])
            room = width - indent - len(text)
    return [tuple(row) for row in rows]


def plain(line: Line) -> str:
    return "".join(part.text for part in line)


def curve(values: ArrayLike, width: int, rows: int = 1, ascii: bool = False) -> list[str]:
    """Values as columns between their least and their greatest: means of equally many where there are more than
    `width`, a gap where none is finite. Nothing if there is nothing to see."""
    given = np.asarray(values, dtype=np.float64)
    columns = [_finite_mean(part) for part in np.array_split(given, min(max(width, 1), len(given) or 1))]
    there = [value for value in columns if isfinite(value)]
    if not there:
        return []
    marks = BLOCKS_ASCII if ascii else BLOCKS
    low, span = min(there), max(there) - min(there)
    steps = rows * len(marks) - 1
    levels = [1 + round(steps * (value - low) / span if span else 0) if isfinite(value) else 0 for value in columns]
    return ["".join(_mark(level - row * len(marks), marks) for level in levels) for row in reversed(range(rows))]


def _mark(level: int, marks: str) -> str:
    return marks[min(level, len(marks)) - 1] if level > 0 else " "


def _finite_mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


def _scaled(view: View, rows: list[str]) -> Iterator[tuple[str, str]]:
    """The rows of the curve of losses, the greatest at the top and the least at the bottom."""
    finite = view.losses[np.isfinite(view.losses)]
    for number, row in enumerate(rows):
        at = {0: finite.max(), len(rows) - 1: finite.min()}.get(number)
        yield "" if at is None else figure(at), row.rstrip()


def _figures(view: View) -> Iterator[tuple[str, list[Part]]]:
    if len(view.losses):
        rates = [f"{view.samples_per_s:,.1f} samples/s", f"{view.tokens_per_s:,.0f} tokens/s"]
        yield (
            "loss",
            _parts(
                figure(view.losses[-1]), f"grad norm {view.grad_norm:.3f}", f"learning rate {view.learning_rate:.3g}"
            ),
        )
        yield "speed", _parts(*rates, f"{duration(view.step_s, 3)} a step", f"bubble {percent(view.bubble)}")
    if view.validation:
        step, last = view.validation[-1]
        best_step, best = min(view.validation, key=lambda each: each[1] if isfinite(each[1]) else inf)
        yield "validation", _parts(f"{figure(last)} after step {step}", f"best {figure(best)} after step {best_step}")
    if view.skipped:
        yield "skipped", [Part(f"{len(view.skipped)} steps, the last was step {view.skipped[-1]}", "yellow")]
    yield "checkpoints", _parts(view.checkpoints)
    if len(view.sessions) > 1:
        for number, session in enumerate(view.sessions[-SESSIONS:]):
            yield " " if number else "sessions", _parts(session)


def _parts(first: str, *more: str) -> list[Part]:
    return [Part(first, "bold"), *map(Part, more)]


def _progress(view: View, width: int, ascii: bool) -> list[Line]:
    """How far it is, with a bar where there is room for one."""
    share = min(view.done / view.steps, 1.0)
    words = _parts(f"{view.done} of {view.steps}", percent(share))
    if view.done < view.steps and isfinite(view.left_s) and view.state in (State.RUNNING, State.SILENT):
        words.append(Part(f"{clock(view.left_s)} left"))
    rows = _packed("step", words, width)
    room = min(width - len(plain(rows[-1])) - 2, 40)
    if len(rows) > 1 or room < 8:
        return rows
    full, empty = BAR_ASCII if ascii else BAR
    filled = round(share * room)
    return [(*rows[0], Part("  " + full * filled, "green"), Part(empty * (room - filled), "dim"))]


class _Column(NamedTuple):
    """Of the table of workers. Those with the largest `turn` go first where there is no room."""

    title: str
    cell: Callable[[WorkerView], str]
    turn: int = 0


def _table(view: View, width: int, rows: int) -> list[Line]:
    """Which worker waits for whom, in so many rows."""
    if not view.workers or rows < 2:
        return []
    depth = 1 + max(worker.rank.worker for worker in view.workers)
    name = _namer(depth, several=view.workers[-1].rank.replica > 0)
    shown = _shown(view.workers, rows - 1)
    columns = [
        _Column("worker", lambda worker: name(worker.rank)),
        _Column("compute", lambda worker: _percent(worker.compute), turn=2),
        _Column("wait", lambda worker: _percent(worker.wait)),
        _Column("all-reduce", lambda worker: _percent(worker.allreduce), turn=1),
        _Column("update", lambda worker: _percent(worker.update), turn=3),
        _Column("peak MB", lambda worker: f"{worker.peak_bytes / 1e6:,.0f}", turn=4),
    ]
    last = "waits most for" + ("" if view.sampled is None else f" (step {view.sampled})")
    words = [_most(worker, name) for worker in shown]
    while sum(map(_width(shown), columns)) + max(map(len, words), default=0) + 2 > width and any(
        c.turn for c in columns
    ):
        columns.remove(max(columns, key=lambda column: column.turn))
    cells = [[column.title, *map(column.cell, shown)] for column in columns]
    widths = [max(map(len, column)) + 2 for column in cells]
    texts = ["".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*cells, strict=True)]
    head = (Part(f"{texts[0]}  {last}", "dim"),)
    body = [
        (Part(text, _heat(worker)), Part(f"  {most}"))
        for text, worker, most in zip(texts[1:], shown, words, strict=True)
    ]
    hidden = len(view.workers) - len(shown)
    return [head, *body, *([(Part(f"  {hidden} more, which wait less", "dim"),)] if hidden else [])]


def _shown(workers: Sequence[WorkerView], rows: int) -> list[WorkerView]:
    """All, or those that wait most and leave a row to say so."""
    rows = min(rows, SHOWN)
    if len(workers) <= rows:
        return list(workers)
    return sorted(sorted(workers, key=lambda worker: -(worker.wait + worker.allreduce))[: max(rows - 1, 0)])


def _width(shown: Sequence[WorkerView]) -> Callable[[_Column], int]:
    return lambda column: max(map(len, [column.title, *map(column.cell, shown)])) + 2


def _heat(worker: WorkerView) -> str:
    waiting = worker.wait + worker.allreduce
    return "red" if waiting > 0.5 else "yellow" if waiting > 0.25 else ""


def _namer(depth: int, several: bool) -> Callable[[Rank], str]:
    """A worker's name; with the number of its MPI rank where there are several replicas."""
    return lambda rank: f"P{rank.worker} rank {rank.replica * depth + rank.worker}" if several else f"P{rank.worker}"


def _most(worker: WorkerView, name: Callable[[Rank], str]) -> str:
    if worker.most is None:
        return ""
    rank, kind = worker.most
    made = "all-reduce" if kind is Kind.REDUCE else NAMES[kind]
    what = "the sum of gradients" if rank == worker.rank else f"{name(rank)}, {made}"
    return f"{what}: {_percent(worker.share)} of it"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if isfinite(share) else "?"


def _fitted(line: Line, width: int, ascii: bool) -> Line:
    parts, left = [], width
    for part in line:
        text = part.text if len(part.text) <= left else part.text[: max(left - 1, 0)] + "…" * (left > 0)
        parts.append(Part(text.translate(ASCII) if ascii else text, part.style))
        left -= len(text)
    return tuple(part for part in parts if part.text)
