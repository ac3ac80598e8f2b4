"""Logs as `train` writes them, made without MPI: every figure follows from a few numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from run_logs import session

from chimera_mpi.config import Config, schedule_of
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.runlog import RunLog, StepRow
from chimera_mpi.timeline import breakdown


class Made(NamedTuple):
    """How the log of a session is made."""

    ranks: int = 4
    first: int = 0
    steps: int = 20  # the step before which it ends
    forward_s: float = 0.004
    noise: float = 0.02
    chance: int = 0  # of the noise, so that repeats differ
    allreduce_s: float = 0.002
    transfer_s: float = 0.0004
    asked: int | None = None  # steps that the configuration asks for
    reason: str | None = "done"  # why it ends; None: it is killed
    hosts: Sequence[str] = ("node1",)
    attributes: dict[str, Any] = {}  # noqa: RUF012


KEYS = {"layers": 8, "hidden": 64, "heads": 4, "positions": 64, "sequence_length": 64, "micro_batch_size": 2}


def write_log(path: Path, made: Made = Made(), **keys: Any) -> Path:
    """A session of a training; a log that is there is gone on with."""
    keys = {"scheme": "chimera", "depth": 4, "micro_batches": 4, "spans_every": 5, "eval_every": 10, **KEYS, **keys}
    config = Config(steps=made.asked or made.steps, **keys)
    width = made.ranks // config.depth
    attributes = {**_attributes(config, width, made), **made.attributes}
    path.parent.mkdir(parents=True, exist_ok=True)
    with session(path, attributes, made.ranks, made.reason) as log:
        _write_steps(log, config, width, made)
    return path


def _attributes(config: Config, width: int, made: Made) -> dict[str, Any]:
    stages = schedule_of(config, done=made.first).schedule.stages
    mini_batch = config.mini_batch_size or width * config.micro_batches * config.micro_batch_size * config.accumulate
    memory = [{"weights_bytes": 1e6, "total_bytes": 4e6 + 5e5 * worker} for worker in range(config.depth)]
    return {
        "config": config.model_dump_json(),
        "width": width,
        "ranks": made.ranks,
        "mini_batch_size": mini_batch,
        "parameters": 12 * config.layers * config.hidden**2,
        "partition": json.dumps([2 * stage for stage in range(1, stages)]),
        "stage_costs": json.dumps([1.0] * stages),
        "unigram_entropy_nats": 3.1,
        "hosts": json.dumps([made.hosts[rank % len(made.hosts)] for rank in range(made.ranks)]),
        "held_before_bytes": json.dumps([10_000_000] * made.ranks),
        "memory_measured": "process",
        "predicted_memory": json.dumps(memory),
        "machine": "small-box",
        "predicted_step_s": 0.05,
    }


def _write_steps(log: RunLog, config: Config, width: int, made: Made) -> None:
    plan = schedule_of(config, done=made.first)
    chance = random.Random(made.chance)
    attributes = _attributes(config, width, made)
    for first in range(made.first, made.steps, plan.steps):
        jitter = made.noise * (1 + first % 3)
        replicas = [
            simulate(
                plan.schedule,
                Costs(
                    forward_s=made.forward_s, backward_s=2 * made.forward_s, transfer_s=made.transfer_s,
                    allreduce_s=made.allreduce_s, groups=2, update_s=0.001, jitter=jitter, seed=chance.randrange(10**9),
                ),
            )
            for _ in range(width)
        ]  # fmt: skip
        seconds = 1.02 * max(timeline.makespan_s for timeline in replicas) / plan.steps
        times = np.array([breakdown(row, 0.0) for timeline in replicas for row in timeline.rows]) / plan.steps
        workers = np.column_stack([times, np.full(len(times), 18e6)])
        last = min(first + plan.steps, made.steps) - 1
        if any((step + 1) % config.spans_every == 0 for step in range(first, last + 1)) or last + 1 == config.steps:
            for replica, timeline in enumerate(replicas):
                log.spans(last, replica, timeline.spans)
        for step in range(first, last + 1):
            samples = attributes["mini_batch_size"]
            row = StepRow(
                step=step,
                loss=2.5 + 3 * 0.97**step + 0.02 * chance.random(),
                grad_norm=1.0,
                learning_rate=config.learning_rate,
                seconds=seconds * (3 if step == made.first else 1),
                samples=samples,
                tokens=samples * config.sequence_length,
                flops=1e9,
                bubble_ratio=0.2,
                warmup=step < made.first + 2,
            )
            log.step(row, workers)
            if (step + 1) % config.eval_every == 0:
                log.evaluation(step, 2.6 + 3 * 0.97**step, 100)
