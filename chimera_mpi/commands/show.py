"""Draw a schedule, and say how long it takes, how much of it is bubble and what it keeps in memory."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import draw
from ..draw.look import duration, percent
from ..schedule import ALIASES, SCHEMES
from ._plan import Plan, add_costs, add_scheme_options, costs_of, count, plan, scheme_options, write

EXAMPLE = """\
  chimera-mpi show chimera --depth 4 --micro-batches 4 --backward 2
  chimera-mpi show 1f1b --depth 8 --micro-batches 16 --transfer 0.1 --html 1f1b.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scheme", metavar="SCHEME", help=", ".join([*SCHEMES, *ALIASES]))
    parser.add_argument("--depth", type=count, required=True, metavar="D", help="workers of the pipeline")
    parser.add_argument("--micro-batches", type=count, required=True, metavar="N", help="micro-batches of a step")
    add_costs(parser)
    add_scheme_options(parser)
    output = parser.add_argument_group("output", "files that exist are replaced")
    for suffix, what in _FILES.items():
        output.add_argument(f"--{suffix}", type=Path, metavar="FILE", help=what)
    output.add_argument("--json", action="store_true", help="print figures and spans as JSON, draw nothing")
    output.add_argument("--width", type=count, metavar="COLUMNS", help="default: the terminal's, 80 without one")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")


_FILES = {
    "svg": "also draw it as SVG",
    "png": "also draw it as PNG (needs matplotlib)",
    "html": "also write a page to zoom and point at",
    "trace": "also write a Chrome trace, for ui.perfetto.dev",
}


def run(args: argparse.Namespace) -> int:
    made = plan(args.scheme, args.depth, args.micro_batches, costs_of(args), scheme_options(args))
    _write_files(made, args)
    if args.json:
        print(json.dumps(_figures(made), indent=1))
        return 0
    width = args.width or shutil.get_terminal_size().columns
    print(draw.text(made.timeline, width, _wants_color(args.color), ascii=not _speaks_unicode()))
    print()
    print("\n".join(_summary(made, width)))
    return 0


def _write_files(made: Plan, args: argparse.Namespace) -> None:
    if args.png:  # first, since it alone may not be possible at all
        draw.png(made.timeline, args.png)
    for path, drawing in (args.svg, draw.svg), (args.html, draw.html), (args.trace, draw.chrome_trace):
        if path:
            write(path, drawing(made.timeline))


def _wants_color(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return when == "always"


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _summary(made: Plan, width: int) -> Iterator[str]:
    timeline = made.timeline
    yield f"makespan          {duration(timeline.makespan_s)}"
    yield f"bubble ratio      {percent(timeline.bubble_ratio)}"
    yield "critical path     " + ", ".join(f"{name} = {number}" for name, number in made.passes().items())
    if made.costs.allreduce_s:
        yield f"all-reduce        {duration(made.exposed_allreduce_s)} exposed"
    yield ""
    yield from _per_worker(made, width)


def _per_worker(made: Plan, width: int) -> Iterator[str]:
    """Workers across, as many as the width takes in one go."""
    rows = {
        "worker": [f"P{worker}" for worker in range(made.schedule.depth)],
        "live activations": [f"{number:g}" for number in made.activations],
        "stages of weights": [f"{number:g}" for number in made.weights],
        "bubble %": [f"{100 * float(ratio):.1f}" for ratio in made.timeline.idle_ratios],
        "messages sent": [str(number) for number in made.messages],
    }
    name = max(map(len, rows))
    cell = 2 + max(len(word) for row in rows.values() for word in row)
    at_once = max((width - name) // cell, 1)
    for first in range(0, made.schedule.depth, at_once):
        if first:
            yield ""
        for title, row in rows.items():
            yield title.ljust(name) + "".join(word.rjust(cell) for word in row[first : first + at_once])


def _figures(made: Plan) -> dict[str, object]:
    schedule, timeline = made.schedule, made.timeline
    return {
        "scheme": schedule.scheme,
        "depth": schedule.depth,
        "micro_batches": schedule.micro_batches,
        "pipes": schedule.pipes,
        "makespan_s": float(timeline.makespan_s),
        "bubble_ratio": float(timeline.bubble_ratio),
        **made.passes(),
        "exposed_allreduce_s": float(made.exposed_allreduce_s),
        "critical_path": [str(span.op) for span in timeline.critical_path],
        "workers": [
            {"worker": worker, "bubble_ratio": float(idle), "live_activations": live, "weights": weights, "sent": sent}
            for worker, (idle, live, weights, sent) in enumerate(
                zip(timeline.idle_ratios, made.activations, made.weights, made.messages, strict=True)
            )
        ],
        "spans": [[s.worker, str(s.op), float(s.start_s), float(s.end_s)] for row in timeline.rows for s in row],
    }
