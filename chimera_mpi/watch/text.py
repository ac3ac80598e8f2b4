"""The view of a run in lines of text, for a terminal of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..draw.look import ASCII, NAMES, clock, duration, figure, percent
from ..schedule import Kind
from .view import Rank, State, View, WorkerView

STYLES = {State.RUNNING: "green", State.SILENT: "yellow", State.ENDED: "bold", State.KILLED: "red"}
BLOCKS, BLOCKS_ASCII = "▁▂▃▄▅▆▇█", ".:#"
BAR, BAR_ASCII = ("█", "░"), ("#", "-")
LABEL = 12  # letters before a figure
CURVE = 4  # rows
SHOWN, SESSIONS = 32, 3  # ranks where the height is not limited, and sessions, at most


class Part(NamedTuple):
    """A piece of a line; `style` is a colour or a weight, by the names that rich has for them."""

    text: str
    style: str = ""


Line = tuple[Part, ...]


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
