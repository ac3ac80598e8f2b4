"""Logs of runs that never were, with round numbers; `logs` has some with the times of simulated steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from chimera_mpi.config import Config, schedule_of
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.runlog import RunLog, StepRow

NEVER_FLUSHED_S = 1e9


def config(**keys) -> Config:
    return Config(**{"scheme": "chimera", "depth": 4, "micro_batches": 4, "steps": 50, "checkpoint": "saved", **keys})


def attributes(asked: Config, width: int = 1) -> dict[str, str | int | float]:
    return {
        "config": asked.model_dump_json(),
        "width": width,
        "ranks": width * asked.depth,
        "mini_batch_size": 32 * width,
        "parameters": 1000,
        "unigram_entropy_nats": 3.0,
    }


def row(step: int, session_first: int = 0, **more) -> StepRow:
    given = StepRow(step, 5 - 0.05 * step, 0.5, 1e-3, 0.5, 32, 3200, 1e9, 0.25, step < session_first + 2)
    return given._replace(**more)


def workers(ranks: int) -> np.ndarray:
    """Rank r computes half of a step of 0.5 s and waits r hundredths of it."""
    return np.array([(0.25, 0.005 * r, 0.05, 0.1, 1e8) for r in range(ranks)])


@contextmanager
def session(path: Path, attributes: Mapping[str, Any], ranks: int, reason: str | None) -> Iterator[RunLog]:
    """Of a log that may be there already; without a reason it ends as if it had been killed once all was flushed."""
    make = RunLog.append if path.exists() else RunLog.create
    writer = make(path, attributes, ranks, flush_every_s=NEVER_FLUSHED_S)
    yield writer
    writer.flush()
    if reason is None:
        writer._abandon()
    else:
        writer.close(reason)


def log(path: Path, first: int, last: int, width: int = 1, reason: str | None = "done", **keys) -> None:
    """A session of a run."""
    asked = config(**keys)
    ranks = asked.depth * width
    spans = simulate(schedule_of(asked).schedule, Costs(0.01, 0.02)).spans
    with session(path, attributes(asked, width), ranks, reason) as writer:
        for step in range(first, last + 1):
            if step % 10 == 9:
                for replica in range(width):
                    writer.spans(step, replica, spans)
            writer.step(row(step, first), workers(ranks))
            if step % 20 == 19:
                writer.evaluation(step, 5 - 0.04 * step, 100)
