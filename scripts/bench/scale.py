"""What grows with the size of a job: time to plan, time to set up communicators, memory.

python scripts/bench/scale.py --shapes 64x1024 32x1024x64 --ranks 8 16
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import emulate, run_ours, save, show

from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, Link, simulate
from chimera_mpi.schedule import SCHEMES, build, check

FEW, MANY = 8, 512  # micro-batches between which memory must not grow
SHORT = ("--forward-ms", 0.2, "--repeat", 1)


def main() -> None:
    args = arguments()
    if args.rank:
        communicators_on_a_rank()
        return
    found = {
        "planning": [row for shape in args.shapes for row in planning(args.schemes, *shape)],
        "setup": setting_up(args.ranks),
        "memory": memory(),
    }
    save(args.json, found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=[(64, 1024, 1), (32, 1024, 64)],  # the second one of 2,048 ranks, the paper's largest job
        metavar="DxN[xW]",
        help="depth, micro-batches, width; default: 64x1024 32x1024x64",
    )
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), metavar="SCHEME")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], help="to set up communicators of")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # this is a rank of ours
    return parser.parse_args()


def shape(words: str) -> tuple[int, int, int]:
    depth, micro_batches, *width = map(int, words.split("x"))
    return depth, micro_batches, width[0] if width else 1


def planning(schemes: Sequence[str], depth: int, micro_batches: int, width: int) -> list[dict[str, Any]]:
    """Seconds to build, check and simulate each scheme: what every rank does once."""
    costs = Costs(transfer_s=0.1, gradient_bytes=4_000_000, link=Link(1e-5, 1e-9), groups=width)
    rows = []
    for scheme in schemes:
        start_s = time.perf_counter()
        try:
            schedule = build(scheme, depth, micro_batches)
        except InputError as error:
            print(f"left out: {error}")
            continue
        built_s = time.perf_counter()
        check(schedule)
        checked_s = time.perf_counter()
        simulate(schedule, costs)
        times = {
            "build_s": built_s - start_s,
            "check_s": checked_s - built_s,
            "simulate_s": time.perf_counter() - checked_s,
        }
        ops = sum(map(len, schedule.orders))
        rows.append({"scheme": scheme, "shape": [depth, micro_batches, width], "ops": ops, **times})
    heads = ["scheme", "ops", "build s", "check s", "simulate s", "in all", "us / op"]
    lines = []
    for row in rows:
        seconds = [row["build_s"], row["check_s"], row["simulate_s"]]
        lines.append(
            (row["scheme"], f"{row['ops']:,}", *seconds, sum(seconds), f"{1e6 * sum(seconds) / row['ops']:.1f}")
        )
    title = (
        f"planning D = {depth}, N = {micro_batches}, {depth * width:,} ranks; memory so far {peak_bytes() / 1e6:.0f} MB"
    )
    show(title, heads, lines)
    return rows


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def setting_up(ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds until every rank has the communicators of its grid and of all replicas of its stages."""
    rows = []
    for count in ranks:
        seconds = json.loads(run_ours(count, __file__, "--rank"))
        rows += [{"ranks": count, "scheme": scheme, "set_up_s": s} for scheme, s in seconds.items()]
    heads = ["scheme", "ranks", "ms"]
    show("communicators", heads, [(r["scheme"], r["ranks"], f"{1e3 * r['set_up_s']:.1f}") for r in rows])
    return rows


def communicators_on_a_rank() -> None:
    """Collective; rank 0 prints the seconds of the slowest rank for each scheme as JSON."""
    from mpi4py import MPI

    from chimera_mpi.runtime.grid import Grid, holders

    world, found = MPI.COMM_WORLD, {}
    for scheme in ("1f1b", "chimera", "dualpipe"):
        schedule = build(scheme, world.size, world.size)
        world.Barrier()
        start_s = time.perf_counter()
        grid = Grid(world, world.size)
        for stage in sorted({stage for _, stage in schedule.places(grid.worker)}, reverse=True):
            grid.replicas(holders(schedule, [stage]))
        found[scheme] = max(world.allgather(time.perf_counter() - start_s))
        grid.close()
    if world.rank == 0:
        print(json.dumps(found))


def memory() -> dict[str, Any]:
    """The most memory of a rank of two, with few and with many micro-batches: a job of its own for each."""
    schemes = ("1f1b", "chimera", "zb_v", "chimera_zb")
    most = {
        n: emulate(2, "--schemes", *schemes, "--micro-batches", n, "--message-bytes", 1 << 20, *SHORT)["peak_bytes"]
        for n in (FEW, MANY)
    }
    more_bytes = most[MANY] - most[FEW]
    title = f"memory of a rank of 2, messages of 1 MiB: {', '.join(schemes)}"
    lines = [(n, megabytes(size_bytes)) for n, size_bytes in most.items()]
    show(title, ["N", "MB a rank"], [*lines, ("more", megabytes(more_bytes))])
    print(f"{more_bytes / (MANY - FEW) / 1e3:.1f} KB a micro-batch, all {len(schemes)} schedules in one process")
    return {"schemes": schemes, "peak_bytes": most}


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
