"""Choose scheme, depth, width, micro-batch, recomputation and partition for a model on a machine, and predict the step.

The machine is one that comes with the package, or a file that `chimera-mpi calibrate` has written. All that fits is
compared by simulation; beside it stands what Eq. 1 of the Chimera paper says. With several numbers of workers the
mini-batch grows with them (weak scaling), or stays as it is (--strong).

KEY=VALUE are keys of train: of the model, its precision and its optimizer. scheme, depth, micro_batch_size, recompute
and sync, given so, are no longer chosen. Micro-batches of unequal size are meant to be: B is the largest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import InputError
from ..predict.machine import machines
from ..predict.planner import search
from ..schedule import STREAMS
from ._asked import asked_of, progress_bar
from ._plan import check_writable, count, counts, write
from ._planned import configuration, figures, told
from ._scaled import scale

EXAMPLE = """\
  chimera-mpi plan gpt2-paper --machine piz-daint --workers 512 --mini-batch 512 -o plan.toml
  chimera-mpi plan bert-48 --machine piz-daint --workers 32 --mini-batch 512 --schemes chimera,1f1b,gpipe
  chimera-mpi plan gpt2-paper --machine piz-daint --workers 512,2048,8192 --mini-batch 512 --svg scaling.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="PRESET|FILE.toml", help="what train takes: gpt2-paper, or a file of keys")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as precision=bf16")
    parser.add_argument("--machine", required=True, metavar="NAME|FILE", help=f"{', '.join(machines())}, or a file")
    parser.add_argument("--workers", type=counts, required=True, metavar="P,...", help="one number of ranks or several")
    parser.add_argument("--mini-batch", type=count, metavar="M", help="samples of a step; by default the source's")
    space = parser.add_argument_group("what may be chosen")
    space.add_argument("--schemes", type=_names, metavar="NAME,...", help="default: all synchronous ones")
    space.add_argument(
        "--asynchronous", action="store_true", help=f"also {', '.join(STREAMS)}, whose gradients are of older weights"
    )
    space.add_argument("--depths", type=counts, metavar="D,...", help="default: all that divide the workers")
    space.add_argument("--max-micro-batch-size", type=count, metavar="B", help="default: what memory has room for")
    scaling = parser.add_argument_group("several numbers of workers")
    scaling.add_argument("--strong", action="store_true", help="the same mini-batch for all of them")
    scaling.add_argument("--svg", type=Path, metavar="FILE", help="also draw the scaling")
    output = parser.add_argument_group("output", "files that exist are replaced")
    output.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help="the best as a configuration for train")
    output.add_argument("--best", type=count, default=10, metavar="K", help="lines of the table; default: 10")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    asked = asked_of(args)
    check_writable(args.output, args.svg)
    if len(args.workers) > 1:
        return scale(asked, args)
    if args.svg:
        raise InputError("--svg draws how a model scales: give --workers several numbers, such as 512,1024,2048")
    with progress_bar() as tell:
        outcome = search(asked.work, asked.machine, args.workers[0], asked.mini_batch, asked.space, args.best, tell)
    if args.output:
        write(args.output, configuration(asked, outcome, args.workers[0]))
    if args.json:
        print(json.dumps(figures(asked, outcome), indent=1))
    else:
        print("\n".join(told(asked, outcome, args.workers[0])))
        if args.output:
            print(f"\nmpirun -n {args.workers[0]} chimera-mpi train {args.output}")
    return 0


def _names(words: str) -> list[str]:
    return words.split(",")
