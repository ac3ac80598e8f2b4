"""What goes together with a schedule, and what does not."""

from __future__ import annotations

from ..errors import InputError
from .ops import Schedule


def check_compatible(schedule: Schedule, *, tied: bool, sharded: bool, fp16: bool) -> None:
    """Raises InputError if `schedule` cannot train weights that are `tied` across stages, with an optimizer whose state
    replicas share out, or in fp16."""
    if sharded:
        _check_sharding(schedule)
    if schedule.updates == 1:
        return
    if tied:
        raise InputError(f"{schedule.scheme} holds its stages at several versions, tied weights at one: set tied=false")
    if fp16:
        raise InputError(
            f"{schedule.scheme} updates stage by stage, and skipping an overflow of fp16 needs all: take bf16"
        )


def _check_sharding(schedule: Schedule) -> None:
    remedy = "set optimizer_sharding=none"
    if schedule.updates > 1:
        raise InputError(f"{schedule.scheme} holds its weights in several versions, shares have one: {remedy}")
    for worker in range(schedule.depth):
        stages = [stage for _, stage in schedule.places(worker)]
        if len(stages) > len(set(stages)):
            raise InputError(f"worker {worker} of {schedule.scheme} holds a stage twice, which has one share: {remedy}")
