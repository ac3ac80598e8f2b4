"""Whether so many ranks can do what a configuration asks for, as far as that can be told without torch."""

from __future__ import annotations

from .config import Config, schedule_on
from .data import even_sizes
from .errors import InputError
from .predict.partition import Cuts, cut_at, cut_uniformly
from .schedule import check_compatible, width_of
from .work import work_of


def check_on(config: Config, workers: int) -> None:
    """Raises InputError for what `train` would, on ranks of which none is spare. A user's model is not looked at."""
    plan = schedule_on(config, workers)
    sizes_of(config, width_of(workers, config.depth), plan.micro_batches)
    if config.model not in ("gpt", "bert"):
        return
    work, schedule = work_of(config), plan.schedule
    cut_as_asked(config, len(work.layers), schedule.stages)
    check_compatible(
        schedule,
        tied=schedule.stages > 1 and work.tied_parameters > 0,
        sharded=config.optimizer_sharding == "replicas",
        fp16=config.precision == "fp16",
    )


def sizes_of(config: Config, width: int, micro_batches: int) -> tuple[int, ...]:
    """The samples of each micro-batch of a step, of `micro_batches` on each of `width` replicas. Raises InputError."""
    even = width * config.micro_batches * config.accumulate * config.micro_batch_size
    if config.mini_batch_size is None:
        return even_sizes(even, width * micro_batches)
    if "micro_batch_size" in config.model_fields_set and config.mini_batch_size != even:
        raise InputError(
            f"mini_batch_size={config.mini_batch_size} is not {width} replicas x {config.micro_batches} micro-batches "
            f"{f'x accumulate={config.accumulate} ' if config.accumulate > 1 else ''}"
            f"x micro_batch_size={config.micro_batch_size} = {even}: set one of the two sizes"
        )
    return even_sizes(config.mini_batch_size, width * micro_batches)


def cut_as_asked(config: Config, layers: int, stages: int) -> Cuts:
    """At the layers that `partition` lists; else uniformly, for those to begin with that are cut by what layers cost.
    Raises InputError."""
    uniform = cut_uniformly(layers, stages)
    return cut_at(config.partition, layers, stages) if isinstance(config.partition, tuple) else uniform
