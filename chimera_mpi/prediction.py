"""What a job is predicted to take, before it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .draw.look import duration
from .errors import InputError
from .predict.footprint import Footprint, Memory
from .predict.partition import Recompute
from .predict.work import Work
from .timeline import Span
from .train import Job
from .work import work_of


@dataclass(frozen=True)
class Prediction:
    """`memory` is that of each worker of a pipeline group; what a step takes is known of a `machine` only."""

    memory: tuple[Memory, ...]
    machine: str = "none"
    step_s: float | None = None
    spans: Sequence[Span] = ()

    @property
    def attributes(self) -> dict[str, str | float]:
        """As a log has it."""
        parts = json.dumps([{**asdict(memory), "total_bytes": memory.total_bytes} for memory in self.memory])
        step = {} if self.step_s is None else {"predicted_step_s": self.step_s}
        return {"machine": self.machine, "predicted_memory": parts, **step}

    def __str__(self) -> str:
        most = max(memory.total_bytes for memory in self.memory)
        step = "" if self.step_s is None else f", {duration(float(f'{self.step_s:.3g}'))} a step on {self.machine}"
        return f"predicted: {most / 1e6:.1f} MB of tensors on the fullest rank{step}"


def predict(job: Job, device: str) -> Prediction | None:
    """Of a job whose ranks compute on a `device` of this kind, "cpu" or "cuda"; None if the work of a user's model
    cannot be found. Raises InputError if the machine cannot."""
    try:
        work = work_of(job.config, device)
    except InputError:
        return None
    return Prediction(_memory(job, work))


def _memory(job: Job, work: Work) -> tuple[Memory, ...]:
    config = job.config
    return Footprint(
        work,
        job.plan.schedule,
        job.cuts,
        samples=max(job.sizes),
        width=job.width,
        recompute=Recompute.of(config.recompute),
        sharded=config.optimizer_sharding == "replicas",
        receives_ahead=config.receives_ahead,
        bucket_bytes=config.bucket_bytes,
    ).of_workers()
