"""A run for TensorBoard: its log written anew as an event file. The log stays the source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, unwritable
from ..runlog import Run
from ..sampled import starts_of

_STEPS = ("grad_norm", "learning_rate", "seconds", "samples_per_s", "tokens_per_s", "flops_per_s", "bubble_ratio")
_WORKERS = ("compute_s", "wait_s", "allreduce_wait_s", "update_s", "peak_bytes")
MOST_OF_WORKERS = 10_000  # steps, evenly spread, whose times of workers are written
_MARK = "events.out.tfevents."


class _Tools(NamedTuple):
    """Of the library, which may not be installed."""

    Event: Any
    Summary: Any
    SummaryMetadata: Any
    TensorProto: Any
    RecordWriter: Any


def write_events(runs: Mapping[Path, Run]) -> None:
    """An event file for each run, in its folder.

    A file that was written before of the same run is replaced, whole or not at all. Raises InputError where the
    library is missing, a folder has events of anything else, which TensorBoard would draw as one curve with these, or
    nothing can be written.
    """
    tools = _tools()
    files = {folder / _name(run): run for folder, run in runs.items()}
    for file in files:
        _check_place(file)
    for file, run in files.items():
        _write(tools, run, file)


def _tools() -> _Tools:
    try:
        proto = "tensorboard.compat.proto."
        return _Tools(
            import_module(proto + "event_pb2").Event,
            import_module(proto + "summary_pb2").Summary,
            import_module(proto + "summary_pb2").SummaryMetadata,
            import_module(proto + "tensor_pb2").TensorProto,
            import_module("tensorboard.summary.writer.record_writer").RecordWriter,
        )
    except ImportError:
        raise InputError("--tensorboard needs tensorboard: pip install 'chimera-mpi[tensorboard]'") from None


def _name(run: Run) -> str:
    """The same each time for a run, and another for any other."""
    first = run.sessions[0]
    began = int(datetime.fromisoformat(first.start).timestamp())
    return f"{_MARK}{began}.{first.host}.{run.path.stem}.chimera-mpi"


def _check_place(file: Path) -> None:
    with suppress(OSError):  # it is made, or cannot be written
        others = sorted(name for name in os.listdir(file.parent) if _MARK in name and name != file.name)
        if others:
            raise InputError(
                f"{file.parent} has events of something else already, {others[0]}, which TensorBoard would draw as "
                "one run with these: take another folder"
            )


def _write(tools: _Tools, run: Run, file: Path) -> None:
    draft = file.with_name(f".chimera-mpi-{os.getpid()}.new")  # a name that TensorBoard does not look at
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as plain:
            records = tools.RecordWriter(plain)
            for event in _events(tools, run):
                records.write(event.SerializeToString())
            records.flush()
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise unwritable(file, error) from None


def _events(tools: _Tools, run: Run) -> Iterator[Any]:
    """By time: the format, the configuration of each session, a line a step."""
    times = _times(run)
    first = datetime.fromisoformat(run.sessions[0].start).timestamp()
    yield tools.Event(wall_time=first, file_version="brain.Event:2")
    for start in starts_of(run):
        at = int(run.steps["step"][start.rows[0]]) if len(start.rows) else 0
        words = "\n".join(f"    {key} = {value}" for key, value in start.keys.items())
        when = datetime.fromisoformat(start.session.start).timestamp()
        yield tools.Event(wall_time=when, step=at, summary=_text(tools, "configuration", words))
    evaluations = dict(zip(run.evaluations["step"].tolist(), run.evaluations["loss"].tolist(), strict=True))
    every = -(-len(times) // MOST_OF_WORKERS)
    for row, step in enumerate(run.steps["step"].tolist()):
        values = {**_of_step(run, row), **(_of_workers(run, row) if row % every == 0 else {})}
        if step in evaluations:
            values["loss/validation"] = evaluations[step]
        scalars = [tools.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        yield tools.Event(wall_time=times[row], step=step, summary=tools.Summary(value=scalars))


def _of_step(run: Run, row: int) -> dict[str, float]:
    of_step = {f"steps/{name}": float(run.steps[name][row]) for name in _STEPS}
    return {"loss/training": float(run.steps["loss"][row]), **of_step}


def _of_workers(run: Run, row: int) -> dict[str, float]:
    return {
        f"{name}/rank{rank}": value
        for name in _WORKERS
        for rank, value in enumerate(run.workers[name][row].tolist())
        if np.isfinite(value)
    }


def _text(tools: _Tools, tag: str, words: str) -> Any:
    """As the text plugin reads it; indented, so that it is shown as it is."""
    metadata = tools.SummaryMetadata(plugin_data=tools.SummaryMetadata.PluginData(plugin_name="text"))
    tensor = tools.TensorProto(dtype="DT_STRING", string_val=[words.encode()])
    tensor.tensor_shape.dim.add(size=1)
    return tools.Summary(value=[tools.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _times(run: Run) -> np.ndarray:
    """When each step ended, as near as the log tells: its session's start and the seconds of the steps since."""
    times = np.zeros(len(run.steps["step"]))
    for start in starts_of(run):
        began = datetime.fromisoformat(start.session.start).timestamp()
        times[start.rows] = began + np.cumsum(run.steps["seconds"][start.rows].astype(np.float64))
    return np.maximum.accumulate(times)
