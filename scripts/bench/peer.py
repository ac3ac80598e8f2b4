"""One rank of torch.distributed.pipelining over gloo, on the same sleeping stages as `chimera-mpi bench emulate`.

Started by _bench.run_peer, with what to do as JSON in its only argument. Rank 0 writes found.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from chimera_mpi.models import Model, make_layer
from chimera_mpi.models.emulated import Durations, Sleeper, emulated

HEAD_START_S = 5e-3


def one(rank: int, depth: int) -> list[int]:
    return [rank]


def in_turns(rank: int, depth: int) -> list[int]:
    return [rank, rank + depth]


def vee(rank: int, depth: int) -> list[int]:
    return [rank, 2 * depth - 1 - rank]


SCHEDULES: dict[str, Callable[[int, int], list[int]]] = {  # and the stages that a rank has
    "GPipe": one,
    "1F1B": one,
    "Interleaved1F1B": in_turns,
    "InterleavedZeroBubble": in_turns,
    "ZBVZeroBubble": vee,
    "DualPipeV": vee,
}


@dataclass
class Case:
    """A schedule, built; a step as ours: all micro-batches and an update of the weights (learning rate 0)."""

    name: str
    micro_batches: int
    message_bytes: int
    model: Model
    rank: int
    depth: int
    steps_s: list[float] = field(default_factory=list)
    overshoots_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        placed = SCHEDULES[self.name](self.rank, self.depth)
        layers = [make_layer(self.model, stage, seed=0) for stage in placed]
        self.stages = [
            pipelining.PipelineStage(layer, stage, len(self.model.layers), torch.device("cpu"))
            for layer, stage in zip(layers, placed, strict=True)
        ]
        self.optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.0, fused=True)
        make = getattr(pipelining.schedules, f"Schedule{self.name}")
        self.schedule = make(
            self.stages[0] if len(placed) == 1 else self.stages, self.micro_batches, self._loss, scale_grads=False
        )

    def step(self) -> None:
        whole = (self.micro_batches, 1)
        # The input asks for a gradient, so that the first stage's backward is as long as any other's.
        inputs = [torch.ones(whole, requires_grad=True)] if any(stage.is_first for stage in self.stages) else []
        last = any(stage.is_last for stage in self.stages)
        self.schedule.step(*inputs, **({"target": torch.zeros(whole), "losses": []} if last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.model.loss(output, target)[0]


def time_step(case: Case, sleeper: Sleeper) -> tuple[float, float]:
    """Seconds from the moment when all ranks begin until the last is done, and the most that a rank overslept."""
    begin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(begin, dist.ReduceOp.MAX)
    start_s = begin.item() + HEAD_START_S
    sleeper.until(start_s)
    overslept_s = sleeper.overshoot_s
    case.step()
    end = torch.tensor([time.perf_counter() - start_s, sleeper.overshoot_s - overslept_s], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    seconds, overshoot_s = end.tolist()
    return seconds, overshoot_s


def cases_of(asked: dict[str, Any], rank: int, depth: int, sleeper: Sleeper) -> Iterator[Case | str]:
    """The cases, and for those that torch refuses, why."""
    for name, micro_batches, size in product(SCHEDULES, asked["micro_batches"], asked["message_bytes"]):
        stages = depth * len(SCHEDULES[name](rank, depth))
        share = depth / stages / 1e3
        durations = Durations(asked["forward_ms"] * share, asked["input_ms"] * share, asked["weight_ms"] * share)
        try:
            yield Case(name, micro_batches, size, emulated(stages, durations, size, sleeper), rank, depth)
        except ValueError as error:
            yield f"{name}, N = {micro_batches}: {' '.join(str(error).split())}"


def main() -> None:
    asked = json.loads(sys.argv[1])
    rank, depth = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{asked['folder']}/store", rank=rank, world_size=depth)
    sleeper = Sleeper()
    made = list(cases_of(asked, rank, depth, sleeper))
    cases = [case for case in made if isinstance(case, Case)]
    for case in cases:  # a first step finds out shapes
        time_step(case, sleeper)
    for _, case in product(range(asked["repeat"]), cases):
        seconds, overshoot_s = time_step(case, sleeper)
        case.steps_s.append(seconds)
        case.overshoots_s.append(overshoot_s)
    if rank == 0:
        names = ("name", "micro_batches", "message_bytes", "steps_s", "overshoots_s")
        rows = [{name: getattr(case, name) for name in names} for case in cases]
        refused = [reason for reason in made if isinstance(reason, str)]
        Path(asked["folder"], "found.json").write_text(json.dumps({"rows": rows, "refused": refused}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
