"""The log of a run: one HDF5 file, written by rank 0, readable at any moment and by anything that reads HDF5.

    /                        schema, format, and what the run was: configuration (JSON), versions, hosts, job
    /steps/{step,loss,...}   one column a figure, one row a step; `step` is the dimension scale
    /workers/{compute_s,...} step x rank
    /spans                   one row an op of a sampled step (`SPAN`)
    /plan/{spans,session}    the planned timeline, the same rows, and the session that planned it
    /evaluations/{step,...}  one row an evaluation
    /sessions                one row a start of the job

HDF5 itself promises nothing about a file whose writer is at work or was killed. `_Bursts` does: rows wait in memory,
every few seconds HDF5 writes them into memory once more, and the few changed blocks go to the disk in an order in
which each prefix is a whole file. A process killed anywhere loses the rows since the last burst, nothing else, and a
full disk stops before the first block that matters. (A machine that loses power may lose what its kernel still held.)

Nobody but its one writer may change a log, and everybody may read it. Writers lock a file beside the log: locking the
log itself would stop readers, as HDF5 takes a shared lock to read, and over NFS all kinds of locks are one. On the log
the writer only shares, like a reader: that keeps out HDF5 programs that would change it, h5py's "a" and "r+", and no
reader.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import platform
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError, RunFailed
from .lock import NO_LOCKS, Lock, beside, owner
from .schedule import Kind, Op, Schedule
from .timeline import Span, Timeline

SCHEMA = 2
FORMAT = "chimera_mpi run log"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
CHUNK_ROWS = 2048  # of a column; 64 such chunks fit the root of HDF5's index

Attributes = Mapping[str, str | int | float]


class Column(NamedTuple):
    name: str
    dtype: str
    units: str


STEPS = (
    Column("step", "i4", "1"),
    Column("loss", "f8", "nat"),
    Column("grad_norm", "f8", "1"),
    Column("learning_rate", "f8", "1"),
    Column("seconds", "f4", "s"),
    Column("samples", "i4", "samples"),
    Column("tokens", "i4", "tokens"),
    Column("samples_per_s", "f4", "samples/s"),
    Column("tokens_per_s", "f4", "tokens/s"),
    Column("flops_per_s", "f4", "flop/s"),
    Column("bubble_ratio", "f4", "1"),
    Column("warmup", "u1", "1"),
    Column("skipped", "u1", "1"),
    Column("session", "i2", "1"),
)
WORKERS = (
    Column("compute_s", "f4", "s"),
    Column("wait_s", "f4", "s"),
    Column("allreduce_wait_s", "f4", "s"),
    Column("update_s", "f4", "s"),
    Column("peak_bytes", "f4", "byte"),
)
EVALUATIONS = (Column("step", "i4", "1"), Column("loss", "f8", "nat"), Column("tokens", "i8", "tokens"))
SPAN = np.dtype(
    [
        ("step", "i4"),  # -1 in a plan
        ("replica", "i4"),
        ("worker", "i4"),
        ("kind", "S1"),
        ("pipe", "i2"),
        ("stage", "i2"),
        ("index", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)


def _text(length: int) -> np.dtype:
    return h5py.string_dtype("utf-8", length)


SESSION = np.dtype(
    [
        ("start", _text(32)),  # ISO 8601, UTC
        ("end", _text(32)),  # empty while the session runs, and for ever if it was killed
        ("reason", _text(128)),
        ("host", _text(64)),
        ("first_step", "i4"),  # -1 before its first step
        ("ranks", "i4"),
        ("attributes", h5py.string_dtype()),  # JSON: what this start was given
    ]
)


class StepRow(NamedTuple):
    """One optimizer step of the whole job. Rates follow from the amounts and `seconds`."""

    step: int
    loss: float  # nat per target token
    grad_norm: float  # global, before clipping
    learning_rate: float
    seconds: float
    samples: int  # of all replicas
    tokens: int
    flops: float  # of the model, all ranks
    bubble_ratio: float
    warmup: bool  # not to be counted in means of time
    skipped: bool = False  # an update, because gradients or loss were not finite


class Session(NamedTuple):
    """One start of the job. `end` and `reason` are empty for one that runs or was killed."""

    start: str
    end: str
    reason: str
    host: str
    first_step: int
    ranks: int
    attributes: dict[str, Any]


def spans_array(step: int, replica: int, spans: Sequence[Span]) -> NDArray[np.void]:
    """The rows of `/spans` for one replica's timeline of one step; seconds from the step's start."""
    rows = [
        (step, replica, worker, op.kind.value, op.pipe, op.stage, op.index, float(start_s), float(end_s))
        for worker, op, start_s, end_s in spans
    ]
    return np.array(rows, dtype=SPAN)


def array_spans(rows: NDArray[np.void]) -> tuple[Span, ...]:
    """The spans that `spans_array` made these rows of."""
    return tuple(
        Span(worker, Op(Kind(kind.decode()), pipe, stage, index), start_s, end_s)
        for _, _, worker, kind, pipe, stage, index, start_s, end_s in rows.tolist()
    )


def locks_wanted(environ: Mapping[str, str]) -> bool:
    """Whether HDF5_USE_FILE_LOCKING, which HDF5 reads as well, leaves file locks on."""
    return environ.get("HDF5_USE_FILE_LOCKING", "TRUE").upper() not in ("FALSE", "0")


# ---------------------------------------------------------------------------------------------- writing


class RunLog:
    """The one writer of a log. Use `create` or `append`, and `with` or `close`."""

    def __init__(self, path: Path, bursts: _Bursts, lock: Lock, workers: int, flush_every_s: float) -> None:
        self.path, self._bursts, self._lock = path, bursts, lock
        self._workers, self._flush_every_s = workers, flush_every_s
        self._steps: list[tuple[float, ...]] = []
        self._of_workers: list[NDArray[np.float32]] = []
        self._spans: list[NDArray[np.void]] = []
        self._file: h5py.File = None
        self._headers: frozenset[int] = frozenset()
        self._session = 0
        self._started = False  # its first step has been seen
        self._last_step = self._on_disk = self._last_evaluation = -1
        self._spans_before = -1  # the last step that has spans of an earlier session
        self._due_s = 0.0

    @classmethod
    def create(
        cls, path: str | Path, attributes: Attributes, workers: int, flush_every_s: float = 2.0, locking: bool = True
    ) -> RunLog:
        """Start a log for `workers` ranks at a `path` that does not exist.

        The file appears under its name when it is whole. Raises `InputError` and leaves nothing behind when the
        path exists, is being written, cannot be written or cannot be locked.
        """
        path = Path(path)
        if os.path.lexists(path):
            raise _refusal(path, FileExistsError(errno.EEXIST, "it exists"))
        draft = _draft_of(path)
        with _taken(path, locking) as lock:
            draft.unlink(missing_ok=True)  # of a killed one; it may be a second name of a log that was moved since
            bursts = _Bursts(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            log = cls(path, bursts, lock, workers, flush_every_s)
            try:
                lock.share(bursts.descriptor)
                log._file = h5py.File(bursts, "w", libver="earliest")
                _lay_out(log._file, attributes, workers)
                log._start_session(attributes)
                _publish(draft, path)
            except BaseException:
                log._abandon()
                raise
            finally:
                draft.unlink(missing_ok=True)
        return log

    @classmethod
    def append(
        cls,
        path: str | Path,
        attributes: Attributes,
        workers: int,
        flush_every_s: float = 2.0,
        locking: bool = True,
        before: Sequence[StepRow] = (),
    ) -> RunLog:
        """Go on with the log of a run that is resumed, maybe on another number of ranks.

        `attributes` are kept in the row of `/sessions` that this adds. Nothing that is there changes: a step at or
        before `last_step`, done again after a checkpoint, is not written again. The last session gets those of the rows
        `before` that it lacks. Raises `InputError` for what `read_run` refuses, and when the log is being written or
        cannot be.
        """
        path = Path(path)
        with _taken(path, locking) as lock:
            with _reading(path) as file:
                _step_tables(file)
            _refuse_second_names(path)
            bursts = _Bursts(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            log = cls(path, bursts, lock, workers, flush_every_s)
            try:
                lock.share(bursts.descriptor)
                log._file = h5py.File(bursts, "r+", libver="earliest")
                log._resume()
                log._make_good(before)
                log._start_session(attributes)
            except BaseException:
                log._abandon()
                raise
        return log

    def go_on(self, reason: str, attributes: Attributes, workers: int, before: Sequence[StepRow] = ()) -> None:
        """End this session, with those of the rows `before` that it lacks, for a `reason`, and begin another, maybe on
        another number of ranks."""
        with self._failing():
            self._make_good(before)
            self._burst()
            self._end_session(reason)
            self._workers = workers
            _widen(self._file["workers"], workers)
            self._start_session(attributes)

    @property
    def last_step(self) -> int:
        """The last step in the log, -1 when there is none."""
        return self._last_step

    def step(self, row: StepRow, workers: ArrayLike) -> bool:
        """Add a step; `workers` is [ranks, 5] in the order of `WORKERS`. False if the step was there already."""
        table = np.array(workers, dtype=np.float32)
        if table.shape != (self._workers, len(WORKERS)):
            raise ValueError(f"workers has the shape {table.shape}, not {(self._workers, len(WORKERS))}")
        if not self._started:
            self._started = True
            self._file["sessions"][self._session, "first_step"] = row.step
        if row.step <= self._last_step:
            return False
        self._last_step = row.step
        self._steps.append(self._columns(row))
        self._of_workers.append(table)
        if time.monotonic() + row.seconds >= self._due_s:  # by the end of the next step it would be too late
            self.flush()
        return True

    def spans(self, step: int, replica: int, spans: Sequence[Span]) -> None:
        """Add the timeline of one replica for a sampled step, unless an earlier session did."""
        if step > self._spans_before:
            self._spans.append(spans_array(step, replica, spans))

    def plan(self, spans: Sequence[Span]) -> None:
        """Add the timeline that this session plans for each of its steps."""
        plan = self._file["plan"]
        rows = spans_array(-1, 0, spans)
        _extend(plan["spans"], rows)
        _extend(plan["session"], np.full(len(rows), self._session))
        self.flush()

    def evaluation(self, step: int, loss: float, tokens: int) -> bool:
        """Add an evaluation over `tokens` target tokens after `step`. False if it was there already."""
        if step <= self._last_evaluation:
            return False
        self._last_evaluation = step
        for column, value in zip(EVALUATIONS, (step, loss, tokens), strict=True):
            _extend(self._file["evaluations"][column.name], np.array([value]))
        self.flush()
        return True

    def flush(self, sync: bool = False) -> None:
        """Put all that was given on disk; with `sync` so that it outlives the machine.

        Raises `RunFailed` if it cannot be; the file then is as it was.
        """
        with self._failing():
            self._burst()
            if sync:
                os.fsync(self._bursts.descriptor)

    def close(self, reason: str = "done") -> None:
        """Write what is left and why the session ends, and let others write. A second close does nothing."""
        if not self._file:
            return
        try:
            with self._failing():
                self._end_session(reason)
                self._burst()
                self._file.close()
                self._bursts.commit(self._headers, last=True)
                os.fsync(self._bursts.descriptor)
        finally:
            self._abandon()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(RunFailed):  # the first failure is the one to tell
            self.close(f"{type(error).__name__}: {error}")

    def _end_session(self, reason: str) -> None:
        sessions = self._file["sessions"]
        sessions[self._session, "end"] = _now().encode()
        sessions[self._session, "reason"] = _cut(reason, 128)

    def _make_good(self, rows: Sequence[StepRow]) -> None:
        """Add the steps that are not there, of whose workers nothing is known."""
        for row in rows:
            if row.step > self._last_step:
                self.step(row, np.full((self._workers, len(WORKERS)), math.nan))

    def _start_session(self, attributes: Attributes) -> None:
        sessions = self._file["sessions"]
        self._session, self._started = len(sessions), False
        row = (_now(), "", "", _cut(platform.node(), 64), -1, self._workers, json.dumps(dict(attributes)))
        _extend(sessions, np.array([row], dtype=SESSION))
        self._find_tables()
        self._burst()

    def _find_tables(self) -> None:
        self._headers = _headers(self._file)
        self._tables = _step_tables(self._file)
        self._on_disk = self._last_step

    def _resume(self) -> None:
        """Find the end of what is there, and drop the rows of a burst that a kill cut off between columns. Its last
        session is this one until another begins."""
        self._file.flush()
        self._bursts.settle()
        self._bursts.reserve(self._bursts.LEAD_BYTES)
        for tables in (_step_tables(self._file), _datasets(self._file["evaluations"]), _datasets(self._file["plan"])):
            rows = min(len(table) for table in tables)
            for table in tables:
                if len(table) > rows:
                    table.resize(rows, axis=0)
        self._last_step = _last(self._file["steps/step"])
        self._last_evaluation = _last(self._file["evaluations/step"])
        self._spans_before = _last(self._file["spans"], "step")
        _widen(self._file["workers"], self._workers)
        self._session = len(self._file["sessions"]) - 1
        self._started = _last(self._file["sessions"], "first_step") >= 0
        self._find_tables()

    def _columns(self, row: StepRow) -> tuple[float, ...]:
        """The row in the order of `STEPS`."""
        step, loss, grad_norm, learning_rate, seconds, samples, tokens, flops, bubble_ratio, warmup, skipped = row
        rates = (amount / seconds if seconds > 0 else math.nan for amount in (samples, tokens, flops))
        started = (step, loss, grad_norm, learning_rate, seconds, samples, tokens)
        return (*started, *rates, bubble_ratio, warmup, skipped, self._session)

    def _write_rows(self) -> None:
        if self._steps:
            of_steps = map(np.array, zip(*self._steps, strict=True))
            of_workers = np.moveaxis(np.stack(self._of_workers), 2, 0)
            for table, rows in zip(self._tables, (*of_steps, *of_workers), strict=True):
                _extend(table, rows)
        if self._spans:
            _extend(self._file["spans"], np.concatenate(self._spans))
        self._steps, self._of_workers, self._spans = [], [], []

    def _burst(self) -> None:
        self._write_rows()
        self._file.flush()
        self._bursts.commit(self._headers)
        self._on_disk = self._last_step
        self._due_s = time.monotonic() + self._flush_every_s

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What the disk refuses once the log is there ends the run."""
        try:
            yield
        except OSError as error:
            told = _refusal(self.path, error, f"; its steps up to {self._on_disk} are safe")
            raise RunFailed(str(told)) from error

    def _abandon(self) -> None:
        """Let go of the file as it is on disk."""
        if self._file:
            self._file.close()
        self._bursts.close()
        self._lock.release()


def _lay_out(file: h5py.File, attributes: Attributes, workers: int) -> None:
    file.attrs.update({**attributes, "format": FORMAT, "schema": SCHEMA})
    for name, columns in (("steps", STEPS), ("evaluations", EVALUATIONS)):
        group = file.create_group(name)
        for column in columns:
            _table(group, column, (0,), (CHUNK_ROWS,))
        _scale(group, columns, "step", 0)
    group = file.create_group("workers")
    group["step"] = file["steps/step"]
    _table(group, Column("rank", "i4", "1"), (workers,), (64,))[:] = np.arange(workers)
    for column in WORKERS:
        _table(group, column, (0, workers), (max(1, min(CHUNK_ROWS, 8 * CHUNK_ROWS // workers)), workers))
    _scale(group, WORKERS, "step", 0)
    _scale(group, WORKERS, "rank", 1)
    plan = file.create_group("plan")
    for rows in (
        file.create_dataset("spans", (0,), SPAN, maxshape=(None,), chunks=(CHUNK_ROWS // 2,)),
        plan.create_dataset("spans", (0,), SPAN, maxshape=(None,), chunks=(CHUNK_ROWS // 8,)),
    ):
        rows.attrs["units"] = "start_s, end_s: s from the start of the step"
    _table(plan, Column("session", "i2", "1"), (0,), (CHUNK_ROWS // 8,))
    file.create_dataset("sessions", (0,), SESSION, maxshape=(None,), chunks=(8,))


def _table(group: h5py.Group, column: Column, shape: tuple[int, ...], chunks: tuple[int, ...]) -> h5py.Dataset:
    missing = math.nan if column.dtype.startswith("f") else 0
    table = group.create_dataset(
        column.name, shape, column.dtype, maxshape=(None,) * len(shape), chunks=chunks, fillvalue=missing
    )
    table.attrs["units"] = column.units
    return table


def _scale(group: h5py.Group, columns: Sequence[Column], name: str, axis: int) -> None:
    if not group[name].is_scale:
        group[name].make_scale(name)
    for column in columns:
        if column.name != name:
            group[column.name].dims[axis].attach_scale(group[name])


def _extend(table: h5py.Dataset, rows: NDArray[Any]) -> None:
    """Add rows; where the table is wider than they are, it keeps its fill value."""
    first = len(table)
    table.resize(first + len(rows), axis=0)
    table[(slice(first, None), *(slice(width) for width in rows.shape[1:]))] = rows


def _widen(workers: h5py.Group, ranks: int) -> None:
    if ranks > len(workers["rank"]):
        workers["rank"].resize(ranks, axis=0)
        workers["rank"][:] = np.arange(ranks)
        for column in WORKERS:
            workers[column.name].resize(ranks, axis=1)


def _headers(file: h5py.File) -> frozenset[int]:
    """Where the datasets' headers lie, which hold their lengths."""
    found: list[int] = []
    file.visititems(lambda _, item: found.append(h5py.h5o.get_info(item.id).addr))
    return frozenset(found)


def _step_tables(file: h5py.File) -> list[h5py.Dataset]:
    """What has one row a step, in the order of STEPS and WORKERS."""
    steps, workers = file["steps"], file["workers"]
    return [*(steps[column.name] for column in STEPS), *(workers[column.name] for column in WORKERS)]


def _datasets(group: h5py.Group) -> list[h5py.Dataset]:
    return [item for item in group.values() if isinstance(item, h5py.Dataset)]


def _last(table: h5py.Dataset, field: str | None = None) -> int:
    if not len(table):
        return -1
    return int(table[-1] if field is None else table[-1][field])


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _cut(text: str, length: int) -> bytes:
    return text.encode()[:length].decode(errors="ignore").encode()


# ---------------------------------------------------------------------------------------------- the disk


class _Bursts(io.RawIOBase):
    """A file for h5py whose writes wait in memory until `commit` puts them on disk in a safe order.

    The order, each step of which leaves a file that HDF5 reads, with the old rows in it:

        1. blocks in new space: nothing refers to them yet
        2. the superblock, which says how long the file is
        3. blocks in old space: the last chunk of a column has new rows behind its old ones
        4. the index of chunks, parents before children: a node that was split keeps its entries until its
           parent knows the new one
        5. the headers, which say how many rows there are

    A reader asks for the file's size, then reads the superblock, then a header, and a burst may come between: it
    refuses a file shorter than its superblock says, and a block beyond that length. So until the log is closed the
    superblock announces `LEAD_BYTES` more than are used, and the file is as much longer again (holes, which take no
    space). The superblock has version 0, in which the length is at byte 40 (HDF5 File Format Specification 3.0,
    section II.A).
    """

    LEAD_BYTES = 1 << 20
    _LENGTH = slice(40, 48)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._settled = self._size
        self._at = 0
        self._pending: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        first, length = self._at, len(buffer)
        found = os.pread(self.descriptor, length, first)
        buffer[:] = found + bytes(length - len(found))
        for at, data in self._pending:
            begin, end = max(at, first), min(at + len(data), first + length)
            if begin < end:
                buffer[begin - first : end - first] = data[begin - at : end - at]
        self._at += length
        return length

    def write(self, data: Any) -> int:
        self._pending.append((self._at, bytes(data)))
        self._at += len(data)
        self._size = max(self._size, self._at)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def settle(self) -> None:
        """All that lies beyond the present end is new space."""
        self._settled = self._size

    def reserve(self, lead_bytes: int) -> None:
        """Make the file long enough for the next announcement."""
        length = self._size + 2 * lead_bytes
        if length > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, length)

    def commit(self, headers: frozenset[int], last: bool = False) -> None:
        """Write what is pending, and after the `last` burst end the file where it ends. Can be repeated if it fails."""
        if os.fstat(self.descriptor).st_size < self._settled:
            raise OSError(errno.EIO, "another program has cut it short")
        lead_bytes = 0 if last else self.LEAD_BYTES
        length = struct.pack("<Q", self._size + lead_bytes)
        old = [(at, data) for at, data in self._pending if at < self._settled or at == 0]
        for at, data in self._pending:
            if at >= self._settled and at > 0:
                _put(self.descriptor, at, data)
        self.reserve(lead_bytes)
        _put(self.descriptor, self._LENGTH.start, length)
        for at, data in sorted(old, key=lambda block: _turn(block[0], block[1], headers)):
            if at == 0:
                data = data[: self._LENGTH.start] + length + data[self._LENGTH.stop :]
            _put(self.descriptor, at, data)
        if last:
            os.ftruncate(self.descriptor, self._size)
        self._pending.clear()
        self.settle()

    def close(self) -> None:
        if not self.closed:
            os.close(self.descriptor)
        super().close()


def _turn(at: int, data: bytes, headers: frozenset[int]) -> tuple[int, int]:
    """When a block in old space is written: the numbers of `_Bursts`."""
    if at == 0:
        return 2, 0
    if at in headers:
        return 5, 0
    if data.startswith(b"TREE"):
        return 4, -data[5]  # its level
    return 3, 0


def _put(descriptor: int, at: int, data: bytes) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        at, data = at + written, data[written:]


@contextmanager
def _taken(path: Path, locking: bool) -> Iterator[Lock]:
    """Hold the lock of the log at `path` from here on; if the body fails, let it go and say why to the user."""
    lock = None
    try:
        lock = Lock(beside(path), locking)
        yield lock
    except BaseException as error:
        if lock:
            lock.release()
        if isinstance(error, BlockingIOError):
            raise InputError(
                f"{path} is being written by {owner(beside(path))}: wait for its end, or give another log=FILE"
            ) from error
        if isinstance(error, OSError):
            raise _refusal(path, error) from error
        raise


def _draft_of(path: Path) -> Path:
    """What a log is until it has its name."""
    return path.with_name(path.name + ".new")


def _refuse_second_names(path: Path) -> None:
    """Raises InputError for a log that another could write by another name. That of its draft stays if whoever made it
    was killed just then."""
    draft = _draft_of(Path(os.path.realpath(path)))
    with suppress(FileNotFoundError):
        if draft.samefile(path):
            draft.unlink()
    if (names := os.stat(path).st_nlink) > 1:
        raise InputError(
            f"{path} has {names} names, by which as many runs could write it at once: keep one of those that "
            f"`find -samefile {path}` tells, or give another log=FILE"
        )


def _publish(draft: Path, path: Path) -> None:
    """Give a file its name, at once and only if the name is free."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.rename(draft, path)  # a file system without links: the lock and the look before must do


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def _refusal(path: Path, error: OSError, more: str = "") -> InputError:
    """What went wrong with the log at `path`, and what to do, in one line."""
    reason = error.strerror or str(error)
    if error.errno == errno.EEXIST:
        return InputError(f"{path} exists and a log is never overwritten: give another log=FILE")
    if error.errno in NO_LOCKS:
        remedy = "set HDF5_USE_FILE_LOCKING=FALSE and see to it that one job writes it, or log to another file system"
        return InputError(f"{path}: its file system does not lock files ({reason}): {remedy}")
    if error.errno in _NO_SPACE:
        remedy = "free some space, or log to another file system"
    elif error.errno in _FORBIDDEN:
        remedy = f"ask for the right to write in {path.absolute().parent}, or give another log=FILE"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        remedy = f"is {path.absolute().parent} a folder? Make it, or give another log=FILE"
    else:
        remedy = "give another log=FILE"
    return InputError(f"{path} cannot be written ({reason}){more}: {remedy}")


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, eq=False)
class Run:
    """What a log held when it was read. Columns of a group have the same length."""

    path: Path
    attributes: dict[str, Any]
    config: dict[str, Any]
    steps: dict[str, NDArray[Any]]  # [steps], by the names of STEPS
    workers: dict[str, NDArray[np.float32]]  # [steps, ranks], by the names of WORKERS; NaN for a rank not there
    evaluations: dict[str, NDArray[Any]]
    sessions: tuple[Session, ...]
    span_rows: NDArray[np.void]  # SPAN
    plan_rows: NDArray[np.void]
    plan_sessions: NDArray[np.int16]  # which session made each of plan_rows

    @cached_property
    def rows_by_step(self) -> dict[int, NDArray[np.void]]:
        """The rows of spans of each step that has some, in order."""
        rows = self.span_rows[np.argsort(self.span_rows["step"], kind="stable")]
        steps, firsts = np.unique(rows["step"], return_index=True)
        return dict(zip(steps.tolist(), np.split(rows, firsts[1:]), strict=False))

    @property
    def sampled_steps(self) -> tuple[int, ...]:
        """The steps that have spans."""
        return tuple(self.rows_by_step)

    def spans(self, step: int, replica: int = 0) -> tuple[Span, ...]:
        """What one replica did in a sampled step; empty for another."""
        rows = self.rows_by_step.get(step, self.span_rows[:0])
        return array_spans(rows[rows["replica"] == replica])

    def timeline(self, step: int, schedule: Schedule, replica: int = 0) -> Timeline:
        """The spans of a sampled step as the timeline of its schedule. Raises `InputError` if there are none."""
        spans = self.spans(step, replica)
        if not spans:
            sampled = ", ".join(map(str, self.sampled_steps[:12])) or "none"
            raise InputError(f"{self.path} has no spans of step {step}, replica {replica}: sampled are {sampled}")
        return Timeline(schedule, spans)

    def planned(self, step: int | None = None) -> tuple[Span, ...]:
        """The plan that was in force at `step`; without it, the last plan. Empty if there was none."""
        if not len(self.plan_sessions):
            return ()
        session = self.plan_sessions[-1]
        if step is not None:
            of_step = self.steps["session"][self.steps["step"] == step]
            if not len(of_step):
                return ()
            session = of_step[0]
        return array_spans(self.plan_rows[self.plan_sessions == session])


def read_run(path: str | Path) -> Run:
    """Read a log, also one that is being written or whose writer was killed.

    Raises `InputError` for a file that is missing, empty, cut short, damaged, not a log or of a newer schema.
    """
    path = Path(path)
    with _reading(path) as file:
        attributes = {name: _plain(value) for name, value in file.attrs.items()}
        columns = _alike(_step_tables(file))
        steps = dict(zip(_names(STEPS), columns, strict=False))
        for switch in ("warmup", "skipped"):
            steps[switch] = steps[switch].astype(bool)
        plan_rows, plan_sessions = _alike([file["plan/spans"], file["plan/session"]])
        return Run(
            path=path,
            attributes=attributes,
            config=json.loads(attributes.get("config", "{}")),
            steps=steps,
            workers=dict(zip(_names(WORKERS), columns[len(STEPS) :], strict=True)),
            evaluations=dict(
                zip(_names(EVALUATIONS), _alike([file["evaluations"][n] for n in _names(EVALUATIONS)]), strict=True)
            ),
            sessions=tuple(_session(row) for row in file["sessions"][:].tolist()),
            span_rows=file["spans"][:],
            plan_rows=plan_rows,
            plan_sessions=plan_sessions,
        )


def _names(columns: Sequence[Column]) -> list[str]:
    return [column.name for column in columns]


def _alike(tables: Sequence[h5py.Dataset]) -> list[NDArray[Any]]:
    """The rows that all tables have: a burst that is under way, or was cut off, has reached some of them only."""
    rows = min(map(len, tables))
    return [table[:rows] for table in tables]


@contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """The log at `path`, open to read.

    Through a plain file object: HDF5 then takes no lock, minds no other opening of the file in this process, and
    stands in no writer's way.
    """
    try:
        with open(path, "rb", buffering=0) as plain:
            signature = plain.read(len(SIGNATURE))
            if signature != SIGNATURE:
                what = "not an HDF5 file" if signature else "empty"
                raise InputError(f"{path} is {what}, so not a run log: is its name right?")
            yield from _checked(path, plain)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): is its name right?") from error


def _checked(path: Path, plain: io.FileIO) -> Iterator[h5py.File]:
    try:
        with h5py.File(plain, "r") as file:
            _check_schema(path, file)
            yield file
    except InputError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is cut short or damaged ({reason}): take a copy that is whole") from error


def _check_schema(path: Path, file: h5py.File) -> None:
    if file.attrs.get("format") != FORMAT:
        raise InputError(f"{path} is an HDF5 file but not a run log: is its name right?")
    schema = int(file.attrs["schema"])
    if schema > SCHEMA:
        raise InputError(f"{path} has schema {schema} and this version knows up to {SCHEMA}: update chimera-mpi")
    if schema < SCHEMA:
        raise InputError(
            f"{path} has schema {schema}, from before steps could be skipped, and this version reads {SCHEMA}"
        )


def _session(row: tuple[Any, ...]) -> Session:
    start, end, reason, host, first_step, ranks, attributes = row
    texts = start.decode(), end.decode(), reason.decode(), host.decode()
    return Session(*texts, first_step, ranks, json.loads(attributes))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
