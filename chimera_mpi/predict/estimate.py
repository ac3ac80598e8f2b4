"""What a choice of scheme, shape and batch comes to on a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..schedule import STREAMS, Schedule, build
from .costs import Costs
from .machine import Machine
from .partition import Cuts, cut_uniformly
from .work import LayerWork, Work


@dataclass(frozen=True)
class Choice:
    """How a model is trained. Workers are `depth * width`; a step takes `samples` samples."""

    scheme: str
    depth: int
    width: int
    micro_batch_size: int
    micro_batches: int  # of one group in a step
    recompute: str | int = "none"
    options: tuple[tuple[str, Any], ...] = ()  # of the scheme: pairs, concat, chunks, waves, sorted
    sync: str = "eager_opt"
    sharded: bool = False
    cuts: Cuts | None = None  # None: as equal numbers of layers as can be

    @property
    def samples(self) -> int:
        """The mini-batch."""
        return self.micro_batch_size * self.micro_batches * self.width

    @property
    def workers(self) -> int:
        return self.depth * self.width

    @property
    def halves(self) -> int:
        """Into how many pieces backward halving cuts a micro-batch."""
        return 2 if dict(self.options).get("concat") == "halving" else 1

    @property
    def piece(self) -> float:
        """Samples that an op works on."""
        return self.micro_batch_size / self.halves


@dataclass(frozen=True)
class Estimate:
    """What a choice comes to: seconds of a step by simulation and by Eq. 1 of the Chimera paper, and what it holds."""

    choice: Choice
    step_s: float
    formula_s: float
    bubble_ratio: float
    exposed_allreduce_s: float
    memory: tuple[Any, ...]

    @cached_property
    def samples_per_s(self) -> float:
        return self.choice.samples / self.step_s

    @property
    def disagreement(self) -> float:
        """How far the formula is from the simulation, as a share of it."""
        return self.formula_s / self.step_s - 1


def schedule_of(choice: Choice, micro_batches: int | None = None) -> Schedule:
    """One step of the choice, or the same scheme with another number of micro-batches. Raises ScheduleError."""
    pieces = (micro_batches or choice.micro_batches) * choice.halves
    options = dict(choice.options)
    if choice.scheme == "pipedream_2bw":
        options["every"] = choice.micro_batches
    return build(choice.scheme, choice.depth, pieces, sync=choice.sync, **options)


def cuts_of(work: Work, choice: Choice, schedule: Schedule) -> Cuts:
    """The layers of each stage."""
    return choice.cuts or cut_uniformly(len(work.layers), schedule.stages)


def costs_of(work: Work, machine: Machine, choice: Choice, schedule: Schedule) -> Costs:
    """The seconds of each stage's ops on one micro-batch, of its messages, its all-reduce and its update."""
    stages = [work.layers[cut.start : cut.stop] for cut in cuts_of(work, choice, schedule)]
    replicas = len(schedule.pipes) * choice.width

    def of_layers(seconds: Callable[[LayerWork, float], float]) -> list[float]:
        return [sum(seconds(layer, choice.piece) for layer in stage) for stage in stages]

    def of_parameters(cost: Callable[[int], float]) -> list[float]:
        return [cost(sum(layer.parameters for layer in stage)) for stage in stages]

    return Costs(
        forward_s=of_layers(machine.forward_s),
        backward_s=of_layers(machine.backward_s),
        input_s=of_layers(machine.input_s) if schedule.split else None,
        weight_s=of_layers(machine.weight_s) if schedule.split else None,
        recompute=choice.recompute != "none",
        message_bytes=[choice.piece * stage[-1].output_bytes for stage in stages],
        link=machine.link,
        node_link=machine.node_link,
        workers_per_node=machine.workers_per_node,
        sends_block=machine.overlap.sends_block,
        allreduce_s=of_parameters(
            lambda parameters: machine.allreduce_s(
                parameters * work.gradient_bytes, replicas, choice.depth, len(schedule.pipes)
            )
        ),
        groups=choice.width,
        allreduce_busy=machine.overlap.allreduce_busy,
        update_s=of_parameters(
            lambda parameters: machine.update_s(parameters / replicas if choice.sharded else parameters)
        ),
    )
