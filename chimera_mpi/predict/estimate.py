"""What a choice of scheme, shape and batch comes to on a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add, mul
from typing import Any

from ..schedule import COMPUTE, STREAMS, Schedule, build
from ..schedule.timing import makespan, timed
from .costs import Costs
from .footprint import Buffers, Memory, memory_of
from .machine import Machine
from .partition import Cuts, cut_uniformly
from .performance import Weighted, performance
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
    buffers: Buffers = Buffers()

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
    memory: tuple[Memory, ...]  # of each worker of a group

    @property
    def disagreement(self) -> float:
        """How far the formula is from the simulation, as a share of it."""
        return self.formula_s / self.step_s - 1


def schedule_of(choice: Choice) -> Schedule:
    """One step of the choice. Raises ScheduleError."""
    return _built(choice, choice.micro_batches, choice.micro_batches)


def _built(choice: Choice, micro_batches: int, every: int) -> Schedule:
    """The scheme with so many micro-batches; 2BW updates after every `every` of them."""
    options = dict(choice.options)
    if choice.scheme == "pipedream_2bw":
        options["every"] = every
    return build(choice.scheme, choice.depth, micro_batches * choice.halves, sync=choice.sync, **options)


def stepped(choice: Choice) -> Weighted:
    """Schedules whose weighted sum of times is that of a step: of any number of micro-batches, at a bounded cost.

    A flush is itself, if it is short. From a few rounds on each further round of `2 * depth` micro-batches, which
    all schemes repeat themselves after, takes as long as the one before. A step of a stream is what one more
    update, or as many micro-batches, adds to it.
    """
    if choice.scheme == "pipedream":
        few, more = 2 * choice.depth, 4 * choice.depth
        share = choice.micro_batches / (more - few)
        return [(-share, _built(choice, few, 0)), (share, _built(choice, more, 0))]
    if choice.scheme == "pipedream_2bw":
        return [
            (sign * weight, _built(choice, updates * every, every))
            for weight, every in _rounds(choice)
            for sign, updates in ((-1, 2), (1, 3))
        ]
    return [(weight, _built(choice, micro_batches, 0)) for weight, micro_batches in _rounds(choice)]


def _rounds(choice: Choice) -> list[tuple[float, int]]:
    """Weights and numbers of micro-batches, their sum that of the choice: one alone, or two a round apart."""
    period = 2 * choice.depth
    few = choice.micro_batches % period + ROUNDS * period
    times = (choice.micro_batches - few) // period
    if times < 2:
        return [(1, choice.micro_batches)]
    return [(1 - times, few), (times, few + period)]


ROUNDS = 2  # until rounds are alike


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

    def version_s(parameters: int) -> float:
        return machine.version_s(parameters) if choice.scheme in STREAMS else 0.0

    return Costs(
        forward_s=of_layers(machine.forward_s),
        backward_s=list(map(add, of_layers(machine.backward_s), of_parameters(version_s))),
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
        allreduces_queue=machine.overlap.allreduces_queue,
        update_s=of_parameters(
            lambda parameters: machine.update_s(parameters / replicas if choice.sharded else parameters)
        ),
    )


def estimate(work: Work, machine: Machine, choice: Choice) -> Estimate:
    """Simulate a step of the choice, and ask Eq. 1 as well. Raises InputError if the choice cannot be built.

    A stream's step is one in its midst; a flush's lasts from its first op to its last.
    """
    schedules = stepped(choice)
    costs = costs_of(work, machine, choice, schedules[-1][1])
    runs = [(weight, _simulated(schedule, costs)) for weight, schedule in schedules]
    step_s, busy_s = (sum(weight * run[at] for weight, run in runs) for at in range(2))
    free = replace(costs, allreduce_s=0)
    alone = len(schedules[-1][1].pipes) * choice.width == 1
    free_s = step_s if alone else sum(weight * makespan(schedule, free) for weight, schedule in schedules)
    return Estimate(
        choice,
        step_s,
        performance(schedules, costs).step_s,
        bubble_ratio=1 - busy_s / (choice.depth * step_s),
        exposed_allreduce_s=max(step_s - free_s, 0.0),
        memory=memory_in(work, choice, schedules),
    )


def memory_in(work: Work, choice: Choice, schedules: Weighted) -> tuple[Memory, ...]:
    """What the workers hold in a step: what goes with the number of micro-batches grows evenly; not in a stream."""
    weights = [weight for weight, _ in schedules]
    if sum(weights) < 0.5:
        return memory_of(work, choice, schedules[-1][1])
    held = zip(*(memory_of(work, choice, schedule) for _, schedule in schedules), strict=True)
    return tuple(_weighted(weights, each) for each in held)


def _weighted(weights: Sequence[float], held: Sequence[Memory]) -> Memory:
    return Memory(*(sum(map(mul, weights, column)) for column in zip(*map(astuple, held), strict=True)))


def _simulated(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """The makespan, and the seconds of all workers' computing."""
    end = busy = 0.0
    for _, op, start, until in timed(schedule, costs):
        end = max(end, until)
        if op.kind in COMPUTE:
            busy += until - start
    return end, busy
