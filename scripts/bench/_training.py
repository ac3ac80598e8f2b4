"""One rank of a family of contenders: `_training.py ours|torch|alone [RANK]`.

All train the same model from the same weights on the same mini-batches, with the same optimizer: the losses of
ours and torch's must agree.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import cache

import torch
from _contenders import BIG_BLOCKS, RANKS, SOCKET, Line, Shape, Turn, connect
from torch import nn

from chimera_mpi.host import keep_freed_memory
from chimera_mpi.models import GPT, Model, gpt, make_layer
from chimera_mpi.predict.partition import Cuts, by_thirds, cut_by, stage_costs
from chimera_mpi.runtime.mailbox import Spec
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.stage import trace
from chimera_mpi.schedule import Schedule, build

SEED, RATE = 0, 1e-3
Step = Callable[[int], dict[str, float]]  # a step by its number; what came of it, this rank's part
Builder = Callable[[Turn], AbstractContextManager[Step]]


@cache
def model_of(shape: Shape) -> Model:
    return gpt(GPT(shape.layers, shape.hidden, shape.heads, shape.vocabulary, shape.sequence, tied=False, dropout=0.0))


@cache
def mini_batch(shape: Shape, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [micro_batches * samples, sequence] each."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(shape.vocabulary, (micro_batches * shape.samples, shape.sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def flops_of(shape: Shape) -> tuple[int, ...]:
    """Of each layer's forward."""
    return trace(model_of(shape), (Spec((shape.samples, shape.sequence), torch.int64),)).flops


def cuts_of(turn: Turn, schedule: Schedule) -> Cuts:
    """The stages' layers, by FLOPs: even stages, or even sums of each worker's."""
    even = schedule if turn.cuts == "workers" else build("1f1b", schedule.stages, schedule.stages)
    return cut_by(flops_of(turn.shape), even)


def modules(shape: Shape, layers: range) -> nn.Sequential:
    return nn.Sequential(*(make_layer(model_of(shape), index, SEED) for index in layers))


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The one that ours uses, at the same rate."""
    optimizer = Recipe().build(parameters)
    assert optimizer
    for group in optimizer.param_groups:
        group["lr"] = RATE
    return optimizer


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@contextmanager
def ours(turn: Turn) -> Iterator[Step]:
    """A scheme over MPI, two deep; `depth1` is data parallelism alone."""
    from mpi4py import MPI

    from chimera_mpi.runtime.grid import Grid
    from chimera_mpi.runtime.pipeline import Pipeline, Settings
    from chimera_mpi.runtime.worker import MicroBatch
    from chimera_mpi.timeline import breakdown

    depth, scheme = (1, "1f1b") if turn.contender == "depth1" else (2, turn.contender)
    options = dict(turn.options)
    scheme_options = {key: options.pop(key) for key in ("sync",) if key in options}
    alone = options.pop("alone", False)
    unknown = set(options) - {f.name for f in fields(Settings)}
    if unknown:
        raise ValueError(f"Settings has no {', '.join(sorted(unknown))}")
    micro_batches = turn.micro_batches * depth // MPI.COMM_WORLD.size
    schedule = build(scheme, depth, micro_batches, **scheme_options)
    cuts = cuts_of(turn, schedule)
    if turn.order == "costs":
        costs = by_thirds(stage_costs(flops_of(turn.shape), cuts))
        schedule = build(scheme, depth, micro_batches, costs=costs, **scheme_options)
    grid = (lonely(Grid) if alone else Grid)(MPI.COMM_WORLD, depth)
    specs = [[Spec((turn.shape.samples, turn.shape.sequence), torch.int64)]] * schedule.micro_batches
    settings = Settings(SEED, cuts=tuple(cuts), **options)
    pipeline = Pipeline(grid, schedule, model_of(turn.shape), specs, settings)
    inputs, targets = (t.split(turn.shape.samples) for t in mini_batch(turn.shape, turn.micro_batches))
    first = grid.replica * schedule.micro_batches

    def step(number: int) -> dict[str, float]:
        def feed(index: int) -> MicroBatch:
            at = first + index
            return MicroBatch(number, at, lambda: ((inputs[at],), targets[at]))

        start = time.perf_counter()
        spans, (sums,) = pipeline.run(feed, number, lambda step: RATE)
        loss = sums.loss / (turn.micro_batches * turn.shape.samples * turn.shape.sequence)
        return {"loss": loss, **breakdown(spans, start)._asdict()}

    yield step
    grid.close()


def lonely(grid: type) -> type:
    """A grid whose replicas do not know of each other: what a step takes without any sum of gradients."""

    class Lonely(grid):
        def replicas(self, workers):
            own = (self.world.rank,)
            if own not in self._groups:
                self._groups[own] = self.world.Create_group(self.world.group.Incl(own))
            return self._groups[own]

    return Lonely


@contextmanager
def torchs(turn: Turn) -> Iterator[Step]:
    """A schedule of torch.distributed.pipelining, or DDP, over gloo."""
    inputs, targets = mini_batch(turn.shape, turn.micro_batches)
    yield (ddp if turn.contender == "ddp" else pipelined)(turn, inputs, targets)


def pipelined(turn: Turn, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    from torch.distributed import pipelining

    name, placed_as = TORCH_SCHEDULES[turn.contender]
    kind = getattr(pipelining, name)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    placed = build(placed_as, ranks, turn.micro_batches)
    cuts = cuts_of(turn, placed)
    here = sorted(stage for _, stage in placed.places(rank))
    parts = [modules(turn.shape, cuts[stage]) for stage in here]
    stages = [
        pipelining.PipelineStage(part, stage, placed.stages, torch.device("cpu"))
        for part, stage in zip(parts, here, strict=True)
    ]
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], turn.micro_batches, loss_fn=mean_loss)
    optimizer = optimizer_of(p for part in parts for p in part.parameters())
    entering = (inputs,) if 0 in here else ()
    ends = placed.stages - 1 in here

    def step(number: int) -> dict[str, float]:
        losses: list[torch.Tensor] | None = [] if ends else None
        schedule.step(*entering, target=targets if ends else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": sum(loss.item() for loss in losses or ()) / turn.micro_batches}

    return step


TORCH_SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "gpipe"),
    "1f1b": ("Schedule1F1B", "1f1b"),
    "interleaved": ("ScheduleInterleaved1F1B", "interleaved"),
    "interleaved_zb": ("ScheduleInterleavedZeroBubble", "interleaved"),
    "zb_v": ("ScheduleZBVZeroBubble", "zb_v"),
    "dualpipe_v": ("ScheduleDualPipeV", "dualpipe_v"),
}


def ddp(turn: Turn, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    """Each rank takes its share of the micro-batches, and sums gradients with the other in the last of them."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = modules(turn.shape, range(len(model_of(turn.shape).layers)))
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return accumulating(turn, replica, replica.no_sync, range(rank, turn.micro_batches, ranks), inputs, targets)


@contextmanager
def alone(turn: Turn) -> Iterator[Step]:
    """One process and a plain loop: over its half of the micro-batches, or with two threads over all of them."""
    inputs, targets = mini_batch(turn.shape, turn.micro_batches)
    threads = turn.options.get("threads", 1)
    model = modules(turn.shape, range(len(model_of(turn.shape).layers)))
    mine = range(turn.micro_batches if threads > 1 else turn.micro_batches // 2)
    torch.set_num_threads(threads)
    yield accumulating(turn, model, nullcontext, mine, inputs, targets)
    torch.set_num_threads(1)


def accumulating(
    turn: Turn,
    model: nn.Module,
    without_sync: Callable[[], AbstractContextManager],
    mine: range,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> Step:
    """Steps over the micro-batches `mine`, whose gradients are added up, the last of them with a sync."""
    optimizer = optimizer_of(model.parameters())
    batches = list(zip(inputs.split(turn.shape.samples), targets.split(turn.shape.samples), strict=True))

    def step(number: int) -> dict[str, float]:
        losses = []
        for at in mine:
            with nullcontext() if at == mine[-1] else without_sync():
                loss = mean_loss(model(batches[at][0]), batches[at][1])
                (loss / len(mine)).backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": sum(loss.item() for loss in losses) / turn.micro_batches}

    return step


def serve(line: Line, builder: Builder) -> None:
    """Take turns until the other end hangs up."""
    while (asked := line.receive()) is not None:
        turn = Turn(**{**asked, "shape": Shape(**asked["shape"])})
        with ExitStack() as stack:
            try:
                step = stack.enter_context(builder(turn))
            except ValueError as why:
                line.send({"told": str(why)})
                continue
            for number in range(turn.warm_up):
                step(number)
            line.send({"told": None})
            assert line.receive() == "go"
            told = take(step, range(turn.warm_up, turn.warm_up + turn.steps))
        del step
        gc.collect()
        line.send({"told": told})


def take(step: Step, numbers: range) -> dict:
    seconds, rows = [], []
    for number in numbers:
        start = time.perf_counter()
        rows.append(step(number))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "numbers": {name: [row[name] for row in rows] for name in rows[0]}}


def main(family: str, rank: str = "") -> None:
    torch.set_num_threads(1)
    if os.environ.items() >= BIG_BLOCKS.items():
        keep_freed_memory()
    if family == "ours":
        from mpi4py import MPI

        serve(connect(MPI.COMM_WORLD.rank), ours)
    elif family == "torch":
        meeting = f"file://{os.environ[SOCKET]}.meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=RANKS)
        serve(connect(int(rank)), torchs)
        torch.distributed.destroy_process_group()
    else:
        serve(connect(int(rank)), alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
