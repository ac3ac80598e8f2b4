"""How the layers of a model are cut into stages, and these into what is computed anew at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..errors import InputError
from ..schedule import Schedule, UnfitDepth
from .costs import Costs

Cuts = Sequence[range]  # of each stage, its layers


@dataclass(frozen=True)
class Recompute:
    """What is forgotten after the forward and computed anew on the way back: nothing, the whole stage, or
    `layers` layers at a time, of which only the input is kept."""

    what: str = "none"  # none, stage or layer
    layers: int = 1

    @classmethod
    def of(cls, asked: str | int) -> Recompute:
        """As a configuration has it: a number is one of layers."""
        return cls("layer", asked) if isinstance(asked, int) else cls(asked)

    def segments(self, layers: range) -> list[range]:
        size = self.layers if self.what == "layer" else len(layers)
        return [layers[start : start + size] for start in range(0, len(layers), size)]


def cut_uniformly(layers: int, stages: int) -> Cuts:
    """Contiguous runs of layers, as equal as can be. Raises InputError if a stage would have none."""
    if stages > layers:
        fault = f"{stages} stages need as many layers, and the model has {layers}"
        raise UnfitDepth(fault, f"try {layers} stages or fewer")
    return _ranges([stage * layers // stages for stage in range(1, stages)], layers)


def cut_at(points: Sequence[int], layers: int, stages: int) -> Cuts:
    """Stages that begin with the layers `points`, and the first with layer 0. Raises InputError."""
    if len(points) != stages - 1 or not all(a < b for a, b in pairwise([0, *points, layers])):
        raise InputError(
            f"partition={list(points)} does not cut {layers} layers into {stages} stages: "
            f"give {stages - 1} rising numbers from 1 to {layers - 1}, or partition=flops"
        )
    return _ranges(points, layers)


def cut_by(costs: Sequence[float], schedule: Schedule) -> Cuts:
    """Cut so that the worker with the most to do has as little as can be found.

    `costs` are the layers', in any unit. What counts is the sum over all stages that a worker holds: in Chimera
    stage s and D-1-s together; of cuts that are equal so, the one with the most even stages. Starts from equal stages
    and moves single cuts as long as that helps.
    """
    points = [cut.start for cut in cut_uniformly(len(costs), schedule.stages)[1:]]
    best = _load(costs, points, schedule)
    improved = True
    while improved:
        improved = False
        for moved in _moves(points, len(costs)):
            load = _load(costs, moved, schedule)
            if load < best:
                points, best, improved = moved, load, True
                break
    return _ranges(points, len(costs))


def stage_costs(costs: Sequence[float], cuts: Cuts) -> list[float]:
    """What the layers of each stage cost together."""
    return _stage_costs(costs, [cut.start for cut in cuts[1:]])


def by_thirds(costs: Sequence[float], recompute: bool = False) -> Costs:
    """Of stages whose forward takes `costs`, in any unit: as long as each half of their backward, but for the first
    stage. Nothing asks for its input's gradient, so all of its backward is its weights'."""
    first, *others = costs
    return Costs(
        forward_s=costs,
        backward_s=[2 * cost for cost in costs],
        input_s=[0, *others],
        weight_s=[2 * first, *others],
        recompute=recompute,
    )


def cut_quickly(costs: Sequence[float], schedule: Schedule) -> Cuts:
    """As `cut_by`, for when many cuts are asked for: less even, as it only takes layers from the busiest worker.

    Starts from stages that end where their share of all layers' costs does, if that is better than equal ones.
    """
    layers = len(costs)
    starts = [cut.start for cut in cut_uniformly(layers, schedule.stages)[1:]], _shared_out(costs, schedule.stages)
    load, points = min((_load(costs, start, schedule), start) for start in starts)
    while True:
        moves = _relieving(points, layers, _busiest_stages(costs, points, schedule))
        lighter, moved = min(((_load(costs, m, schedule), m) for m in moves), default=(load, points))
        if lighter >= load:
            return _ranges(points, layers)
        load, points = lighter, moved


def imbalance(costs: Sequence[float], cuts: Cuts, schedule: Schedule) -> float:
    """The load of the busiest worker over the mean: 1 is even."""
    loads = _loads(costs, [cut.start for cut in cuts[1:]], schedule)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _moves(points: list[int], layers: int) -> Iterator[list[int]]:
    """The cuts with one of them, or two or more in a row, moved by a layer."""
    for first in range(len(points)):
        for last in range(first, len(points)):
            for by in (-1, 1):
                moved = [point + by * (first <= at <= last) for at, point in enumerate(points)]
                yield from _if_rising(moved, layers)


def _shared_out(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts at equal shares of the sum of `costs`, as near as each stage's having a layer allows."""
    sums, layers = list(accumulate(costs)), len(costs)
    points: list[int] = []
    for stage in range(1, stages):
        point = bisect_left(sums, sums[-1] * stage / stages) + 1
        points.append(min(max(point, stage, points[-1] + 1 if points else 1), layers - stages + stage))
    return points


def _busiest_stages(costs: Sequence[float], points: Sequence[int], schedule: Schedule) -> set[int]:
    loads = _loads(costs, points, schedule)
    return {stage for _, stage in schedule.places(loads.index(max(loads)))}


def _relieving(points: list[int], layers: int, stages: set[int]) -> Iterator[list[int]]:
    """The cuts moved so that one of `stages` has a layer less: handed on, one for one, by its neighbours or by more."""
    for stage in stages:
        for first in range(stage):
            yield from _if_rising([p + (first <= at < stage) for at, p in enumerate(points)], layers)
        for last in range(stage, len(points)):
            yield from _if_rising([p - (stage <= at <= last) for at, p in enumerate(points)], layers)


def _if_rising(points: list[int], layers: int) -> Iterator[list[int]]:
    if all(a < b for a, b in pairwise([0, *points, layers])):
        yield points


def _load(costs: Sequence[float], points: Sequence[int], schedule: Schedule) -> tuple[list[float], list[float]]:
    """The workers' loads and the stages', the largest first: to be made small in this order."""
    workers, stages = _loads(costs, points, schedule), _stage_costs(costs, points)
    return sorted(workers, reverse=True), sorted(stages, reverse=True)


def _stage_costs(costs: Sequence[float], points: Sequence[int]) -> list[float]:
    before = [0, *accumulate(costs)]
    return [before[end] - before[start] for start, end in pairwise([0, *points, len(costs)])]


def _loads(costs: Sequence[float], points: Sequence[int], schedule: Schedule) -> list[float]:
    stages = _stage_costs(costs, points)
    loads = [0.0] * schedule.depth
    for pipe in schedule.pipes:
        for stage, worker in enumerate(pipe):
            loads[worker] += stages[stage] / len(schedule.pipes)
    return loads


def _ranges(points: Sequence[int], layers: int) -> list[range]:
    return [range(start, end) for start, end in pairwise([0, *points, layers])]
