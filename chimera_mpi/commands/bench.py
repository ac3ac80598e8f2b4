"""Measure schedules on this machine and network, without a GPU and without a model.

`emulate` carries out schedules as `train` does, with messages of real size, on stages that sleep instead of computing,
and compares each measured step with what the plan says of these times. Gradients are summed over the replicas of each
stage, and weights updated, in every step. The schemes take turns.

All run the same model: times are those of 1/depth of it, and a scheme whose workers hold several smaller stages has
them shared out over these.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..draw.look import duration
from ..errors import InputError
from ..host import keep_freed_memory, peak_resident_bytes
from ..predict import Costs
from ..schedule import SCHEMES, fit_depth, width_of
from ._plan import Plan, add_order, check_writable, count, parse_scheme, plan, seconds, write
from ._ranks import ending_together, library_name, refuse_singletons, set_threads

if TYPE_CHECKING:
    from ..runtime.rehearsal import Emulation, Measured

EXAMPLE = """\
  mpirun -n 4 chimera-mpi bench emulate --micro-batches 4 8 --message-bytes 65536
  mpirun -n 8 chimera-mpi bench emulate --schemes 1f1b chimera chimera:pairs=2 --forward-ms 20 --json f.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="emulate")
    emulate = actions.add_parser(
        "emulate", help="schedules with real messages, on stages that sleep", description=__doc__, allow_abbrev=False
    )
    emulate.add_argument(
        "--schemes", nargs="+", metavar="SCHEME", help="SCHEME or SCHEME:option=value,...; default: all"
    )
    emulate.add_argument("--depth", type=count, metavar="D", help="workers of a pipeline; default: all ranks")
    emulate.add_argument("--micro-batches", type=count, nargs="+", metavar="N", help="default: D and 2 D")
    emulate.add_argument("--forward-ms", type=seconds, default=10.0, metavar="MS", help="default: 10")
    emulate.add_argument("--backward-ms", type=seconds, metavar="MS", help="default: twice the forward")
    emulate.add_argument(
        "--input-ms", type=seconds, metavar="MS", help="of a backward, for the input's gradient; default: half"
    )
    emulate.add_argument("--recompute", action="store_true", help="each backward does its forward once more")
    emulate.add_argument("--message-bytes", type=count, nargs="+", default=[65536], metavar="BYTES", help="65536")
    emulate.add_argument(
        "--gradient-bytes", type=count, default=4, metavar="BYTES", help="of 1/depth of the model; default: 4"
    )
    emulate.add_argument("--thread", action="store_true", help="let a thread drive MPI beside the compute")
    add_order(emulate)
    emulate.add_argument("--repeat", type=count, default=5, metavar="K", help="measured steps of each; default: 5")
    emulate.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")


def run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    refuse_singletons(world.size, os.environ)
    with ending_together(world):
        try:
            return _emulate(world, args)
        except InputError:
            if world.rank == 0:
                raise
            return 2


class Case(NamedTuple):
    """A scheme and what it comes to under the times asked for, were messages free."""

    scheme: str
    message_bytes: int
    plan: Plan


@dataclass(frozen=True)
class Row:
    """What came of a case. Plans are the critical path, with free messages and with those that were measured;
    ratios are of the median step to them."""

    scheme: str
    micro_batches: int
    message_bytes: int
    median_s: float
    spread: float  # (longest - shortest) / median
    overshoot_s: float  # of a step, median
    plan_s: float
    plan_with_messages_s: float
    ratio: float
    ratio_with_messages: float
    steps_s: list[float]


def _emulate(world: Any, args: argparse.Namespace) -> int:
    from ..runtime.agreement import agree

    depth = args.depth or world.size
    emulations = agree(world, lambda: _emulations(args))
    cases, refused = agree(
        world, lambda: fit_depth(depth, world.size, 0, lambda depth, ranks: _cases(args, depth, ranks, emulations))
    )
    agree(world, lambda: check_writable(args.json) if world.rank == 0 else None)
    turns, links = _measure(world, depth, args, cases, emulations)
    facts = _facts(world)
    if world.rank == 0:
        rows = [_row(case, steps, links) for case, steps in zip(cases, turns, strict=True)]
        found = {
            "ranks": world.size,
            "depth": depth,
            **facts,
            "emulations": [asdict(emulation) for emulation in emulations.values()],
            "transfers_s": links,
            "rows": [asdict(row) for row in rows],
            "refused": refused,
        }
        if args.json:
            write(args.json, json.dumps(found, indent=1))
        _print(rows, refused, links)
    return 0


def _measure(
    world: Any, depth: int, args: argparse.Namespace, cases: Sequence[Case], emulations: Mapping[int, Emulation]
) -> tuple[list[tuple[Measured, ...]], dict[int, list[float]]]:
    """The steps of each case, which take turns, and for each size of message the seconds between neighbours."""
    from ..models.emulated import Sleeper
    from ..runtime.grid import Grid
    from ..runtime.rehearsal import Rehearsal, StepTimer, transfers_s

    grid, sleeper = Grid(world, depth), Sleeper()
    set_threads(None, grid.node.threads)
    keep_freed_memory()
    rehearsals = [Rehearsal(grid, case.plan.schedule, emulations[case.message_bytes], sleeper) for case in cases]
    step_timer = StepTimer(grid.world, grid.node.patience, sleeper)
    if world.rank == 0:
        print(_opening(world.size, depth, args, cases, str(grid.node.patience)), flush=True)
    for rehearsal in rehearsals:  # in a first step torch and MPI set themselves up
        step_timer.time(rehearsal.step)
    turns = [[step_timer.time(rehearsal.step) for rehearsal in rehearsals] for _ in range(args.repeat)]
    links = {size: transfers_s(grid, size) for size in emulations}
    for rehearsal in rehearsals:
        rehearsal.pipeline.close()
    grid.close()
    return list(zip(*turns, strict=True)), links


def _emulations(args: argparse.Namespace) -> dict[int, Emulation]:
    """By bytes of a message. Raises InputError for times that contradict each other."""
    from ..runtime.rehearsal import Emulation

    forward_ms, backward_ms, input_ms = args.forward_ms, args.backward_ms, args.input_ms
    backward_ms = 2 * forward_ms if backward_ms is None else backward_ms
    input_ms = backward_ms / 2 if input_ms is None else input_ms
    if input_ms > backward_ms:
        raise InputError(f"--input-ms {input_ms:g} is a part of the backward: give --backward-ms {input_ms:g} or more")
    if not forward_ms + backward_ms:
        raise InputError("the whole step takes 0 s, so there is nothing to compare: give --forward-ms a time")
    forward_s, input_s, weight_s = (ms / 1e3 for ms in (forward_ms, input_ms, backward_ms - input_ms))
    return {
        size: Emulation(forward_s, input_s, weight_s, size, args.gradient_bytes, args.recompute, args.thread)
        for size in args.message_bytes
    }


def _cases(
    args: argparse.Namespace, depth: int, ranks: int, emulations: Mapping[int, Emulation]
) -> tuple[list[Case], list[str]]:
    """Those that can be had, and why others cannot. Raises InputError if none can."""
    width_of(ranks, depth)
    cases: list[Case] = []
    refused: list[InputError] = []
    specs = {spec: parse_scheme(spec) for spec in args.schemes or SCHEMES}
    costs = _costs(next(iter(emulations.values())))
    for micro_batches in dict.fromkeys(args.micro_batches or (depth, 2 * depth)):
        for spec, (scheme, options) in specs.items():
            try:
                made = plan(scheme, depth, micro_batches, costs, options, same_model=True)
            except InputError as error:
                refused.append(error)
                continue
            if args.order == "costs":
                made = made.reordered(str(options.get("sync", "eager_opt")))
            cases += [Case(spec, size, made) for size in emulations]
    if not cases:
        raise refused[0]
    return cases, list(map(str, refused))


def _costs(emulation: Emulation) -> Costs:
    return Costs(
        forward_s=emulation.forward_s,
        backward_s=emulation.input_s + emulation.weight_s,
        input_s=emulation.input_s,
        weight_s=emulation.weight_s,
        recompute=emulation.recompute,
    )


def _row(case: Case, steps: Sequence[Measured], links: Mapping[int, Sequence[float]]) -> Row:
    steps_s = [step.seconds for step in steps]
    median_s = median(steps_s)
    transfer_s = median(links[case.message_bytes] or [0.0])
    plan_s = float(case.plan.makespan_s)
    with_messages_s = float(replace(case.plan, costs=replace(case.plan.costs, transfer_s=transfer_s)).makespan_s)
    return Row(
        scheme=case.scheme,
        micro_batches=case.plan.schedule.micro_batches,
        message_bytes=case.message_bytes,
        median_s=median_s,
        spread=(max(steps_s) - min(steps_s)) / median_s,
        overshoot_s=median(step.overshoot_s for step in steps),
        plan_s=plan_s,
        plan_with_messages_s=with_messages_s,
        ratio=median_s / plan_s,
        ratio_with_messages=median_s / with_messages_s,
        steps_s=steps_s,
    )


def _facts(world: Any) -> dict[str, Any]:
    """Where this was measured, and the most memory that a rank had. Collective."""
    from mpi4py import MPI

    return {
        "hosts": world.allgather(MPI.Get_processor_name()),
        "mpi_library": library_name(),
        "peak_bytes": max(world.allgather(peak_resident_bytes())),
    }


def _opening(ranks: int, depth: int, args: argparse.Namespace, cases: Sequence[Case], patience: str) -> str:
    emulation = next(iter(_emulations(args).values()))
    passes = f"F {duration(emulation.forward_s)}, I {duration(emulation.input_s)}, W {duration(emulation.weight_s)}"
    total_s = (args.repeat + 1) * sum(float(case.plan.makespan_s) for case in cases)
    return (
        f"{ranks} ranks = depth {depth} x width {ranks // depth}, {patience}; {passes}"
        f"{', recomputed' if args.recompute else ''}\n"
        f"{len(cases)} cases, {args.repeat} steps of each after a first: {total_s:.0f} s at least"
    )


def _print(rows: Sequence[Row], refused: Sequence[str], links: Mapping[int, Sequence[float]]) -> None:
    """A table for each number of micro-batches and size of message, the shortest step first."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    for micro_batches, size in dict.fromkeys((row.micro_batches, row.message_bytes) for row in rows):
        way = f", {duration(median(links[size]), 2)} one way" if links[size] else ""
        print(f"\nN = {micro_batches}, messages of {size:,} bytes{way}")
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("scheme", no_wrap=True)
        for head in ("step", "spread %", "plan", "/ plan", "/ with messages", "overshoot"):
            table.add_column(head, justify="right", no_wrap=True)
        block = [row for row in rows if (row.micro_batches, row.message_bytes) == (micro_batches, size)]
        for row in sorted(block, key=lambda row: row.median_s):
            table.add_row(
                row.scheme,
                _milliseconds(row.median_s),
                f"{100 * row.spread:.1f}",
                _milliseconds(row.plan_s),
                f"{row.ratio:.3f}",
                f"{row.ratio_with_messages:.3f}",
                _milliseconds(row.overshoot_s),
            )
        console.print(table)
    print(
        "Times in ms. plan: the critical path, messages free; / plan: the median step over it; / with messages: over\n"
        "that of a plan whose messages take the time that was measured. spread: longest less shortest step, over the\n"
        "median. overshoot: how much too long the sleeps of a step were, on the rank where they were most."
    )
    for reason in dict.fromkeys(refused):
        print(f"left out: {reason}")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
