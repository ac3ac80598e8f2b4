"""What may become of a job on fewer ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from ..config import Config, checked
from ..errors import InputError
from ..prediction import predict
from ..runtime.grid import holders
from ..train import Job, job_on, ordered

SHAPES = ("pairs", "concat", "chunks", "waves")  # the schemes' own options, which may not fit another depth


def check_survivable(job: Job) -> None:
    """Raises InputError if a stage would die with a rank."""
    for stage in range(job.plan.schedule.stages):
        workers = holders(job.plan.schedule, [stage])
        if len(workers) * job.width == 1:
            depth, scheme = job.config.depth, job.config.scheme
            raise InputError(
                f"survive=replicas needs each stage on two ranks, and {scheme} with depth={depth} on {depth} ranks has "
                f"stage {stage} on one: start {2 * depth} ranks, or take scheme=chimera"
            )


def layouts(job: Job, ranks: int) -> Iterator[Job]:
    """What a job may become on `ranks` ranks, the most alike first: its pipeline in fewer groups, then shallower ones,
    then those of the scheme to fall back on. The mini-batch is the same, and its micro-batches are where the groups
    share them out evenly."""
    for scheme in dict.fromkeys(filter(None, (job.config.scheme, job.config.survive_scheme))):
        for depth in range(min(job.config.depth, ranks), 0, -1):
            width = min(ranks // depth, job.width) if depth == job.config.depth else ranks // depth
            with suppress(InputError):
                yield _became(job, scheme, depth, width)


def _became(job: Job, scheme: str, depth: int, width: int) -> Job:
    """Raises InputError if there is no such job."""
    config, samples = job.config, sum(job.sizes)
    factor = job.plan.micro_batches // config.micro_batches  # halves, and passes that add up
    micro_batches = max(1, min(-(-config.micro_batches * job.width // width), samples // (width * factor)))
    changes: dict[str, object] = {"depth": depth, "micro_batches": micro_batches, "mini_batch_size": samples}
    changes["spares"] = 0  # whoever is left over stands by
    if (scheme, depth) == (config.scheme, config.depth):
        same = job_on(_changed(config, **changes), width * depth)
        plan = ordered(same.config, same.plan, job.costs)
        return replace(job, config=same.config, width=width, plan=plan, sizes=same.sizes)
    if config.partition == "measured" or isinstance(config.partition, tuple):
        changes["partition"] = "flops"
    return job_on(_changed(config, scheme=scheme, **dict.fromkeys(SHAPES), **changes), width * depth)


def _changed(config: Config, **changes: object) -> Config:
    asked = {key: getattr(config, key) for key in config.model_fields_set - {"micro_batch_size"}}
    return checked({**asked, **changes})


def fits(job: Job, room_bytes: float, device: str) -> bool:
    """Whether the fullest rank finds room, as far as what it will hold can be told, on a `device` of this kind."""
    prediction = predict(job, device)
    return prediction is None or max(memory.total_bytes for memory in prediction.memory) <= room_bytes
