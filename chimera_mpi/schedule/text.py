"""The text form of a schedule: CSV, a line for each worker, a cell for each op.

A cell is stage, kind and micro-batch: `2F0` is the forward of micro-batch 0 at stage 2; the kinds are those
of `Kind`. `@1` after it names the pipeline, where that is not pipeline 0. It is the notation that
torch.distributed.pipelining reads and writes.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .check import check, check_scheme, missing_op
from .ops import COMPUTE, Kind, Op, Place, Schedule
from .sync import with_updates

_OP = re.compile(r"(\d{1,9})([FBIWRU])(\d{1,9})(?:@(\d{1,9}))?")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def dumps(schedule: Schedule) -> str:
    """The text form of `schedule`; of a flush without its updates, which `loads` puts back by its `sync`.

    Only where a pipeline has no micro-batch, and so no other op, the updates are written.

    A schedule of one pipeline loads in torch.distributed.pipelining as a "compute_only" schedule.
    """
    whole = schedule.updates > 1 or len(set(schedule.pipe_of.values())) < len(schedule.pipes)
    rows = ([str(op) for op in order if whole or op.kind in COMPUTE] for order in schedule.orders)
    return "".join(",".join(row) + "\n" for row in rows)


def loads(text: str, scheme: str = "csv", sync: str | None = None) -> Schedule:
    """The schedule that `text` describes, checked; raises InputError, with line and cell. If `scheme` is one of the
    registry, it is held to what that has where, and to what it keeps.

    Line endings, a byte order mark, blanks, empty cells and blank lines do not matter. Cells that torch adds
    for what is implied here (messages, sharding, the reduction of gradients) are passed over; two ops that
    it overlaps follow each other. Where there are no updates they are added by `sync` (see `with_updates`),
    "eager_opt" by default; where there are, it is to be left out.
    """
    try:
        cells = list(_cells(text))
    except csv.Error as error:
        raise InputError(f"it is no table of ops: {error}") from None
    if not cells:
        raise InputError("there is no op in it: a line for each worker is wanted, such as 0F0,0F1,0B0,0B1")
    lines = sorted({cell.line for cell in cells})
    orders: list[list[Op]] = [[] for _ in lines]
    for cell in cells:
        orders[lines.index(cell.line)].append(cell.op)
    schedule = Schedule(scheme, _pipes(cells, lines), tuple(map(tuple, orders)))
    _check_doubles(cells)
    if not schedule.micro_batches:
        raise InputError("there is no micro-batch in it: each begins with a forward at stage 0, such as 0F0")
    if missing := missing_op(schedule):
        raise InputError(f"line {lines[schedule.worker(missing)]}: {missing} is missing")
    if sync and schedule.updates:
        raise InputError("its all-reduces and updates, R and U, are where it has them: leave out sync, or those")
    check_scheme(schedule)
    return check(with_updates(schedule, sync or "eager_opt"))


def read(path: str | Path, scheme: str = "csv", sync: str | None = None) -> Schedule:
    """The schedule in a file (see `loads`)."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            return loads(file.read(), scheme, sync)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            f"{named(name)} cannot be read ({why}): give a CSV file with a line for each worker, such as "
            "chimera-mpi show SCHEME --csv FILE writes"
        ) from None
    except InputError as error:
        raise type(error)(f"{named(name)}: {error}") from None


def named(name: str) -> str:
    """A file's name as a line of text can have it."""
    return name if name and name.isprintable() else repr(name)


class _Cell(NamedTuple):
    op: Op
    line: int  # from 1
    column: int  # from 1

    @property
    def where(self) -> str:
        return f"line {self.line}, cell {self.column}"


def _cells(text: str) -> Iterator[_Cell]:
    for line, row in enumerate(csv.reader(text.removeprefix("\ufeff").splitlines()), 1):
        for column, words in enumerate(row, 1):
            for word in _apart("".join(words.split())):
                if word and not _IMPLIED.fullmatch(word):
                    yield _Cell(_op(word, f"line {line}, cell {column}"), line, column)


def _apart(words: str) -> list[str]:
    """The ops of one cell: one, unless torch overlaps two."""
    together = _TOGETHER.fullmatch(words)
    return together[1].split(";") if together else [words]


def _op(word: str, where: str) -> Op:
    match = _OP.fullmatch(word)
    if not match:
        wanted = "stage, one of F B I W R U, and micro-batch, such as 2F0 or, on pipeline 1, 2F0@1"
        raise InputError(f"{where}: {word[:40]!r} is no op: it takes {wanted}")
    stage, kind, index, pipe = match.groups()
    return Op(Kind(kind), int(pipe or 0), int(stage), int(index))


def _pipes(cells: list[_Cell], lines: list[int]) -> tuple[tuple[int, ...], ...]:
    """Which worker holds each stage of each pipeline."""
    holders: dict[Place, _Cell] = {}
    for cell in cells:
        first = holders.setdefault(cell.op.place, cell)
        if first.line != cell.line:
            raise InputError(f"{cell.where}: {cell.op}, but line {first.line} holds that stage: it has {first.op}")
    pipes, stages = (len({place[of] for place in holders}) for of in (0, 1))
    for pipe in range(pipes):
        for stage in range(stages):
            if (pipe, stage) not in holders:
                on = f" of pipeline {pipe}" if pipes > 1 else ""
                raise InputError(f"no line has stage {stage}{on}: stages and pipelines count from 0 without a gap")
    if len(holders) > pipes * stages:
        far = max(holders.values(), key=lambda cell: (cell.op.stage, cell.op.pipe))
        raise InputError(f"{far.where}: {far.op}, but there are {stages} stages and {pipes} pipelines, from 0")
    return tuple(tuple(lines.index(holders[pipe, stage].line) for stage in range(stages)) for pipe in range(pipes))


def _check_doubles(cells: list[_Cell]) -> None:
    first: dict[Op, _Cell] = {}
    for cell in cells:
        if (earlier := first.setdefault(cell.op, cell)) is not cell:
            raise InputError(f"{cell.where}: {cell.op} is there twice, first in cell {earlier.column}")
