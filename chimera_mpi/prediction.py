"""What a job is predicted to take, before it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from .draw.look import duration
from .errors import InputError
from .predict import simulate
from .predict.estimate import Choice, costs_of
from .predict.footprint import Buffers, Memory, memory_of
from .predict.machine import Machine
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
        step = "" if self.step_s is None else f", {duration(self.step_s, 3)} a step on {self.machine}"
        return f"predicted: {most / 1e6:.1f} MB of tensors on the fullest rank{step}"


def predict(job: Job, device: str, machine: Machine | None = None) -> Prediction | None:
    """Of a job whose ranks compute on a `device` of this kind, "cpu" or "cuda". Raises InputError if a step on the
    `machine` cannot be told; without one, None if the work of a user's model cannot be found.

    A step is that of the job's own schedule, from its first op to its last; of a stream, its share of the whole.
    """
    try:
        work = work_of(job.config, device)
    except InputError as error:
        if machine:
            raise InputError(f"{error}: leave out machine=") from None
        return None
    choice, schedule = choice_of(job), job.plan.schedule
    memory = memory_of(work, choice, schedule)
    if machine is None:
        return Prediction(memory)
    timeline = simulate(schedule, costs_of(work, machine, choice, schedule))
    if not timeline.makespan_s:
        raise InputError(f"a step on {machine.name} takes 0 s: give its compute.points a time")
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
        buffers=Buffers(config.receives_ahead, config.bucket_bytes),
    )
    return replace(whole, micro_batch_size=whole.halves * whole.micro_batch_size)
