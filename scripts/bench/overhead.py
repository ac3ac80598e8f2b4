"""Microseconds that the runtime itself takes for an op: stages of one number, so that there is nothing to compute.

A step's seconds over the ops of a worker, messages and waits included, beside what autograd takes for the same op on
the same stage alone in a loop, and beside torch.distributed.pipelining over gloo. Of ours also what rank 0 spends on
its ops, the runtime's own work; the rest are waits for others and the ends of a step. --profile shows where rank 0's
time goes.

  python scripts/bench/overhead.py --depth 2 4 --micro-batches 32
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _bench import run_ours, run_peer, save, show, spread

from chimera_mpi.models import make_layer
from chimera_mpi.models.emulated import Durations, Sleeper, emulated
from chimera_mpi.schedule import COMPUTE, Schedule, build

SCHEMES = ("gpipe", "1f1b", "chimera", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "chimera_zb")
NUMBER_BYTES = 4
PASSES = {"InterleavedZeroBubble": (2, 3), "ZBVZeroBubble": (2, 3), "DualPipeV": (2, 3), "Interleaved1F1B": (2, 2)}


def main() -> None:
    args = arguments()
    if args.rank:
        on_a_rank(json.loads(args.rank))
        return
    alone_us = 1e6 * autograd_s()
    rows: list[dict[str, Any]] = []
    for depth in args.depth:
        found, profile = ours(depth, args)
        theirs = peers(depth, args)
        heads = ["", "step ms", "spread %", "ops", "us / op", "less autograd", "on ops"]
        title = f"D = {depth}, N = {args.micro_batches}; autograd alone {alone_us:.0f} us a micro-batch and stage"
        show(title, heads, [line(row, alone_us) for row in [*found, *theirs]])
        if profile:
            print(profile)
        rows += [{"depth": depth, **row} for row in [*found, *theirs]]
    print("ops: of a worker in a step. less autograd: us / op without what forward and backward take alone.")
    print("on ops: of that, what rank 0 spends on its ops; the rest are waits for others, and the ends of a step.")
    save(args.json, {"autograd_us": alone_us, "rows": rows})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, nargs="+", default=[2, 4], metavar="D")
    parser.add_argument("--micro-batches", type=int, default=32, metavar="N")
    parser.add_argument("--repeat", type=int, default=20, help="measured steps; default: 20")
    parser.add_argument("--profile", action="store_true", help="where rank 0 of ours spends its time, for each depth")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank of ours is to do
    return parser.parse_args()


def line(row: dict[str, Any], alone_us: float) -> tuple[object, ...]:
    us = 1e6 * median(row["steps_s"]) / row["ops"]
    autograd_us = alone_us * row["trips"] / row["ops"]
    milliseconds = f"{1e3 * median(row['steps_s']):.2f}"
    return (
        row["name"],
        milliseconds,
        f"{100 * spread(row['steps_s']):.0f}",
        row["ops"],
        f"{us:.0f}",
        f"{us - autograd_us:.0f}",
        f"{1e6 * median(row['acting_s']) / row['ops'] - autograd_us:.0f}" if "acting_s" in row else "",
    )


def autograd_s(loops: int = 500) -> float:
    """Seconds of forward and backward of one stage and micro-batch, in this process, without a pipeline."""
    layer = make_layer(instant(2), 0, seed=0)

    def trip() -> float:
        start_s = time.perf_counter()
        layer(torch.ones(1, 1, requires_grad=True)).backward(torch.ones(1, 1))
        return time.perf_counter() - start_s

    return median(trip() for _ in range(loops))


def instant(stages: int) -> Any:
    return emulated(stages, Durations(0.0, 0.0, 0.0), NUMBER_BYTES, Sleeper())


def ours(depth: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Rows of the table, and the profile if one was asked for."""
    asked = {"micro_batches": args.micro_batches, "repeat": args.repeat, "profile": args.profile}
    found = json.loads(run_ours(depth, __file__, "--rank", json.dumps(asked)))
    return found["rows"], found["profile"]


def peers(depth: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    asked = {"micro_batches": [args.micro_batches], "message_bytes": [NUMBER_BYTES], "repeat": args.repeat}
    found = run_peer(depth, **asked, forward_ms=0.0, input_ms=0.0, weight_ms=0.0)["rows"]
    rows = []
    for row in found:
        stages, passes = PASSES.get(row["name"], (1, 2))
        trips = stages * args.micro_batches
        rows.append({"name": f"torch {row['name']}", "steps_s": row["steps_s"], "ops": passes * trips, "trips": trips})
    return rows


def on_a_rank(asked: dict[str, Any]) -> None:
    """Take steps of each scheme in turns; rank 0 prints, as JSON, what the table and the profile need."""
    from mpi4py import MPI

    from chimera_mpi.runtime.grid import Grid
    from chimera_mpi.runtime.rehearsal import Emulation, Rehearsal, StepTimer

    torch.set_num_threads(1)
    world, sleeper = MPI.COMM_WORLD, Sleeper()
    grid = Grid(world, world.size)
    step_timer = StepTimer(grid.world, grid.node.patience, sleeper)
    schedules = [build(scheme, world.size, asked["micro_batches"]) for scheme in SCHEMES]
    nothing = Emulation(0.0, 0.0, 0.0, NUMBER_BYTES)
    rehearsals = [Rehearsal(grid, schedule, nothing, sleeper) for schedule in schedules]
    profiler = cProfile.Profile() if asked["profile"] and world.rank == 0 else None
    for rehearsal in rehearsals:
        step_timer.time(rehearsal.step)
    rows = [{"name": schedule.scheme, "steps_s": [], "acting_s": [], **work(schedule)} for schedule in schedules]

    def act(rehearsal: Rehearsal, acting_s: list[float]) -> None:
        spans = profiler.runcall(rehearsal.step) if profiler else rehearsal.step()
        acting_s.append(sum(span.end_s - span.start_s for span in spans if span.op.kind in COMPUTE))

    for _ in range(asked["repeat"]):
        for rehearsal, row in zip(rehearsals, rows, strict=True):
            row["steps_s"].append(step_timer.time(partial(act, rehearsal, row["acting_s"])).seconds)
    if world.rank == 0:
        print(json.dumps({"rows": rows, "profile": top(profiler)}))
    grid.close()


def work(schedule: Schedule) -> dict[str, int]:
    """The ops of a worker, and the trips of a micro-batch through one of its stages and back."""
    ops = max(sum(op.kind in COMPUTE for op in order) for order in schedule.orders)
    return {"ops": ops, "trips": schedule.micro_batches * schedule.stages // schedule.depth}


def top(profiler: cProfile.Profile | None, lines: int = 25) -> str:
    if profiler is None:
        return ""
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return text.getvalue()


if __name__ == "__main__":
    main()
