"""Check a schedule that is written in a CSV file, and draw it as `show` does.

A line for each worker, a cell for each op: 2F0 is the forward (F; B backward, I input gradient, W weight gradient) of
micro-batch 0 at stage 2, 2F0@1 the same on pipeline 1. It is the notation that torch.distributed.pipelining writes
("compute_only") and `chimera-mpi show SCHEME ... --csv FILE`. All-reduces and updates are put in if there are none.

Sound is a schedule that does each op once, after all it needs, without a deadlock however its messages travel, and
in which workers start the all-reduces that they share in one order. If it is not, the exit code is 2 and the fault is
shown in the rows round it.
"""

from __future__ import annotations

import argparse

from ..schedule import ALIASES, SCHEMES, SYNCS, Schedule
from ._plan import add_costs, printable
from .show import add_drawing, from_file, show

EXAMPLE = """\
  chimera-mpi check mine.csv --backward 2
  chimera-mpi check torch.csv --as interleaved --html torch.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.csv")
    parser.add_argument(
        "--as",
        dest="scheme",
        choices=[*SCHEMES, *ALIASES],
        metavar="SCHEME",
        help="hold it to where this scheme has its stages, and to its promises of memory and weight versions",
    )
    parser.add_argument("--sync", choices=SYNCS, help="when all-reduces start that are put in; default: eager_opt")
    add_costs(parser)
    add_drawing(parser)


def run(args: argparse.Namespace) -> int:
    schedule = from_file(args.file, args.sync, ALIASES.get(args.scheme, args.scheme))
    if not args.json:
        print(f"{printable(args.file)} is sound: {_shape(schedule)}\n")
    show(schedule, args, args.sync)
    return 0


def _shape(schedule: Schedule) -> str:
    counts = {
        "worker": schedule.depth,
        "stage": schedule.stages,
        "pipeline": len(schedule.pipes),
        "micro-batch": schedule.micro_batches,
        "update": schedule.updates,
        "op": sum(map(len, schedule.orders)),
    }
    ends = {"micro-batch": "es"}
    return ", ".join(f"{n} {name}{ends.get(name, 's') if n > 1 else ''}" for name, n in counts.items())
