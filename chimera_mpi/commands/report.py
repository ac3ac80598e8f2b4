"""Sum up a run, and draw the planned and the measured step one above the other."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from .. import draw
from ._plan import count, write

EXAMPLE = """\
  chimera-mpi report runs/20261130-091500-chimera.h5
  chimera-mpi report RUN.h5 --step 19 --svg step.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="RUN.h5", help="the log of a run, also of one in progress")
    parser.add_argument("--step", type=int, help="which sampled step to draw; by default the last")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the step as SVG")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="also write sampled steps as a Chrome trace, for ui.perfetto.dev"
    )
    parser.add_argument("--width", type=count, metavar="COLUMNS", help="default: the terminal's, 80 without one")


def run(args: argparse.Namespace) -> int:
    from .. import report
    from ..runlog import read_run
    from ..sampled import trace_of

    log = read_run(args.log)
    if args.trace:
        write(args.trace, trace_of(log, args.step))
    wanted = args.svg is not None or args.step is not None
    steps = report.steps_of(log, args.step).titled if log.sampled_steps or wanted else {}
    print("\n".join(report.summary(log)))
    if not steps:
        return 0
    if args.svg:
        write(args.svg, draw.svg(steps))
    print()
    print(draw.text(steps, args.width or shutil.get_terminal_size().columns, sys.stdout.isatty()))
    return 0
