"""Measure this machine for `plan` and `train machine=`: layers of a model, optimizer, messages, all-reduces, overlap.

All ranks measure at once, with the pieces that train: run it as you will train, with as many ranks on a node and on
two nodes if there are several. One rank measures what it can; what is only assumed says so in the file, which is made
to be read and edited. Layers are those of the preset or file, over micro-batches of 1, 2, 4, ... samples up to twice
its micro_batch_size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..draw.chart_svg import chart_svg
from ..errors import InputError, complain
from ..host import keep_freed_memory
from ..predict.calibrated import (
    DEVICE,
    HOST,
    Found,
    LayerReading,
    MessageReading,
    SumReading,
    UpdateReading,
    calibrated,
    counted,
)
from ._calibrated import charts, doubts, summary, tables
from ._devices import find_staging
from ._plan import check_writable, write
from ._ranks import ending_together, laid_out, library_name, refuse_singletons, set_threads

if TYPE_CHECKING:
    from ..config import Config
    from ..runtime.calibration import Effort, Ensemble, Layout, Pair
    from ..runtime.staging import Staging
    from ..tasks import Task

DEFAULT = "gpt-tiny"

EXAMPLE = """\
  mpirun -n 4 chimera-mpi calibrate gpt2-small micro_batch_size=4 -o box.toml --svg box.svg
  srun --mpi=pmi2 -N 2 chimera-mpi calibrate gpt2-paper precision=bf16 -o cluster.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="PRESET|FILE.toml", nargs="?", default=DEFAULT, help=f"whose layers; default: {DEFAULT}"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as sequence_length=128 threads=1")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the machine's TOML file")
    parser.add_argument("--name", help="of the machine; default: that of its first host")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what was measured and what fits it")
    parser.add_argument("--quick", action="store_true", help="a few points, in some ten seconds: for a first look")


def run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    refuse_singletons(world.size, os.environ)
    with ending_together(world):
        try:
            return _calibrate(world, args)
        except InputError:
            if world.rank == 0:
                raise
            return 2


def _calibrate(world: Any, args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..config import load
    from ..runtime.agreement import agree
    from ..work import work_of

    is_override = "=" in args.source
    source, overrides = (DEFAULT, [args.source, *args.overrides]) if is_override else (args.source, args.overrides)
    config = agree(world, lambda: load(source, overrides))
    work = agree(world, lambda: work_of(config))
    agree(world, lambda: check_writable(args.output, args.svg) if world.rank == 0 else None)
    tell = _Teller() if world.rank == 0 else _tell_nobody
    found = measure(world, config, [layer.kind for layer in work.layers], args.quick, args.name, tell)
    if world.rank == 0:
        made = calibrated(found, work.layers)
        write(args.output, made.text)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
        console.print(*tables(found, made), sep="\n")
        print("\n".join([*summary(found, made), *doubts(found)]))
        if args.svg:
            write(args.svg, chart_svg(charts(found, made)))
        print(f"file        {args.output}")
    return 0


class _Bench(NamedTuple):
    """Ranks that measure together, and who is told what they measure."""

    ensemble: Ensemble
    layout: Layout
    staging: Staging
    memory_bytes: float
    host: str  # the first
    source: str  # where and with what, in one line
    tell: Callable[[str], None]


def measure(
    world: Any,
    config: Config,
    kinds: Sequence[str],
    quick: bool = False,
    name: str | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Found:
    """Measure with the layers of a model, which are alike where their `kinds` are. Collective; the same on all ranks.

    Raises InputError.
    """
    from ..runtime.agreement import agree
    from ..tasks import task_of

    task = agree(world, lambda: task_of(config))
    with _bench(world, config, quick, tell) as bench:
        sizes, nodes = bench.layout.sizes, bench.layout.nodes
        layers, updates, slowdown = _compute(bench, config, task, kinds)
        near, moved_near = _messages(bench, bench.layout.neighbours(), max(sizes) > 1)
        far, moved_far = _messages(bench, bench.layout.apart(), nodes > 1)
        return Found(
            name=name or bench.host,
            source=bench.source,
            workers_per_node=max(sizes),
            device=bench.staging.device.type,
            memory_bytes=bench.memory_bytes,
            layers=layers,
            updates=updates,
            slowdown=slowdown,
            near=near,
            far=far,
            moved_near=moved_near,
            moved_far=moved_far,
            sums=tuple(_sums(bench)),
        )


@contextmanager
def _bench(world: Any, config: Config, quick: bool, tell: Callable[[str], None]) -> Iterator[_Bench]:
    """Set ranks up as `train` would. Collective. Raises InputError."""
    from mpi4py import MPI

    from ..runtime.calibration import Ensemble, usable_memory_bytes
    from ..runtime.grid import Grid
    from ..train import patience_of

    grid = Grid(world, 1)
    staging, devices, sharing = find_staging(world, grid.node.rank, config)
    threads = set_threads(config.threads, grid.node.threads)
    if config.keep_freed_memory:
        keep_freed_memory()
    ensemble = Ensemble(grid.world, patience_of(grid, config), effort(config.micro_batch_size, quick))
    memory_bytes = ensemble.least(usable_memory_bytes(staging.device, sharing))
    hosts = world.allgather(MPI.Get_processor_name())
    with laid_out(grid, config) as (layout, has_thread):
        source = _source(config, hosts, threads, devices, has_thread)
        yield _Bench(ensemble, layout, staging, memory_bytes, hosts[0], source, tell)


def effort(micro_batch_size: int, quick: bool) -> Effort:
    """What is measured, and how often."""
    from ..runtime.calibration import Effort

    if quick:
        return Effort((1, 2), (4, 1 << 18, 1 << 20), (1 << 16, 1 << 20), trips=2, repeats=3, point_s=0.1, longest_s=1.0)
    samples = {micro_batch_size} | {2**power for power in range((2 * micro_batch_size - 1).bit_length() + 1)}
    messages, sums = tuple(4**power for power in range(2, 13, 2)), tuple(4**power for power in range(7, 13))
    return Effort(tuple(sorted(samples)), messages, sums, trips=8, repeats=5, point_s=1.0, longest_s=10.0)


def _compute(
    bench: _Bench, config: Config, task: Task, kinds: Sequence[str]
) -> tuple[tuple[LayerReading, ...], tuple[UpdateReading, ...], float]:
    """Layers by themselves, updates, and what a pipeline adds to the layers."""
    from ..runtime.calibration import Manner, read_layers, read_slowdown
    from ..runtime.optimizer import Recipe
    from ..runtime.tensors import PRECISIONS
    from ..tasks import random_corpus
    from ..train import read_micro_batch

    recipe = Recipe(config.optimizer, weight_decay=config.weight_decay, momentum=config.momentum)
    manner = Manner(PRECISIONS[config.precision], recipe, config.clip is not None, bench.staging)
    corpus = random_corpus(config, task)

    def micro_batch(samples: int) -> tuple[Any, Any]:
        return read_micro_batch(task.batches(corpus, (samples,), config.seed), 0, 0)

    layers, updates = read_layers(bench.ensemble, task.model, kinds, micro_batch, manner, bench.tell)
    bench.tell("a pipeline of these layers")
    slowdown = read_slowdown(bench.ensemble, task.model, kinds, layers, micro_batch, manner)
    return tuple(layers), tuple(updates), slowdown


def _sums(bench: _Bench) -> Iterator[SumReading]:
    from ..runtime.calibration import read_sums

    for group in bench.layout.groups():
        bench.tell(f"sums over {group.replicas} ranks")
        yield from read_sums(bench.ensemble, group, bench.staging)


def _messages(bench: _Bench, pair: Pair | None, is_there: bool) -> tuple[tuple[MessageReading, ...], float | None]:
    """All messages between two ranks, if there are two, and the share of a large one that moves under compute.

    Of a device from buffers of the host too, as a part of what its own messages take.
    """
    from ..runtime.calibration import read_messages, read_moved
    from ..runtime.staging import Direct

    if not is_there:
        return (), None
    ensemble, staging = bench.ensemble, bench.staging
    found: list[MessageReading] = []
    if staging.device.type != "cpu":
        bench.tell("messages from host buffers")
        found += read_messages(ensemble, pair, Direct(), HOST)
    bench.tell("messages")
    found += read_messages(ensemble, pair, staging, HOST if staging.device.type == "cpu" else DEVICE)
    bench.tell("a message under compute")
    largest = max((reading for reading in counted(found)), key=lambda reading: reading.size_bytes)
    return tuple(found), read_moved(ensemble, pair, largest.size_bytes, largest.seconds, staging)


def _source(config: Config, hosts: Sequence[str], threads: int, devices: str, progress_thread: bool) -> str:
    """Where and with what this was measured, in one line."""
    from importlib.metadata import version

    library = " ".join(library_name().split())
    shape = f"{config.model} {config.layers} x {config.hidden}" if config.model in ("gpt", "bert") else config.model
    return (
        f"chimera-mpi calibrate, {time.strftime('%Y-%m-%d')}: {len(hosts)} rank(s) on "
        f"{', '.join(dict.fromkeys(hosts))}, {threads} thread(s) each{', a progress thread' * progress_thread}; "
        f"{shape}, sequences of {config.sequence_length}, {config.precision}, {config.optimizer}; "
        f"torch {version('torch')}, {library}; {devices}"
    )


class _Teller:
    """Says on a terminal what is being measured."""

    def __call__(self, words: str) -> None:
        if sys.stderr.isatty():
            complain(f"\r\x1b[K{words} ...", end="")


def _tell_nobody(words: str) -> None:
    pass
