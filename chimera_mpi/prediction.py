"""What a job is predicted to take, before it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from .draw.look import duration
from .errors import InputError
from .predict import simulate
from .predict.estimate import Choice, costs_of
from .predict.footprint import Footprint, Memory
from .predict.machine import read_machine
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
    cannot be found. Raises InputError if the machine cannot.

    A step is that of the job's own schedule, from its first op to its last; of a stream, its share of the whole.
    """
    machine = read_machine(job.config.machine) if job.config.machine else None
    try:
        work = work_of(job.config, device)
    except InputError:
        return None
    memory = _memory(job, work)
    if machine is None:
        return Prediction(memory)
    schedule = job.plan.schedule
    timeline = simulate(schedule, costs_of(work, machine, choice_of(job), schedule))
    return Prediction(memory, machine.name, float(timeline.makespan_s) / job.plan.steps, timeline.spans)


def choice_of(job: Job) -> Choice:
    """The job as the planner would have chosen it."""
    config = job.config
    whole = Choice(
        scheme=config.scheme,
        depth=config.depth,
        width=job.width,
        micro_batch_size=max(job.sizes),
        micro_batches=config.micro_batches * config.accumulate,
        recompute=config.recompute,
        options=tuple(sorted(config.scheme_options.items())),
        sync=config.sync,
        sharded=config.optimizer_sharding == "replicas",
        cuts=job.cuts,
    )
    return replace(whole, micro_batch_size=whole.halves * whole.micro_batch_size)


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
