"""Compare all schemes, or those named, for one depth and one or more numbers of micro-batches.

All run the same model: the costs are those of 1/depth of it, and a scheme whose workers hold several smaller
stages has them shared out over these. Weights and live activations are those of the worker that has most, in
whole stages (1/depth of the model); messages are those that the busiest worker sends. `*` marks the best of a
column.

Gradients are summed over all replicas of a stage: a scheme has one for each of its pipelines, times --groups. Over
one replica that takes no time; over more it takes --allreduce, or with --gradient-bytes and --link what the paper's
model says for that many.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from ..draw.look import duration
from ..errors import InputError, complain
from ..schedule import SCHEMES, paused_collector
from ..timeline import Timeline
from ._plan import Plan, add_costs, add_order, costs_of, count, counts, parse_scheme, plan
from ._terminal import columns
from .show import add_files, write_files

EXAMPLE = """\
  chimera-mpi compare --depth 8 --micro-batches 8,16,32 --backward 2 --transfer 0.1
  chimera-mpi compare 1f1b chimera chimera:pairs=2 --depth 8 --micro-batches 16 --csv > table.csv
  chimera-mpi compare chimera chimera:concat=doubling --depth 4 --micro-batches 8 --backward 2 --svg both.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scheme", nargs="*", metavar="SCHEME", help="SCHEME or SCHEME:option=value,...; default: all")
    parser.add_argument("--depth", type=count, required=True, metavar="D", help="workers of the pipeline")
    parser.add_argument("--micro-batches", type=counts, required=True, metavar="N,...", help="one number or several")
    add_costs(parser)
    add_order(parser)
    add_files(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--csv", action="store_true", help="print CSV instead of a table")


@paused_collector()
def run(args: argparse.Namespace) -> int:
    specs = {spec: parse_scheme(spec) for spec in args.scheme or SCHEMES}
    draws = any((args.svg, args.png, args.html, args.trace))
    if draws and len(args.micro_batches) > 1:
        raise InputError(f"a drawing is of one number of micro-batches, not of {len(args.micro_batches)}: give one")
    rows: list[Row] = []
    refused: list[Refusal] = []
    timelines: dict[str, Timeline] = {}
    for micro_batches in args.micro_batches:
        for spec, (scheme, options) in specs.items():
            try:
                made = _plan(scheme, micro_batches, options, args)
            except InputError as error:
                refused.append(Refusal(spec, micro_batches, str(error)))
                continue
            rows.append(_row(spec, made))
            if draws:
                timelines[spec] = made.timeline
    if not rows:
        raise InputError(refused[0].reason)
    if draws:
        write_files(timelines, args)
    printer = _json if args.json else _csv if args.csv else _table
    printer(rows, refused)
    return 0


def _plan(scheme: str, micro_batches: int, options: Mapping[str, Any], args: argparse.Namespace) -> Plan:
    made = plan(scheme, args.depth, micro_batches, costs_of(args), options, same_model=True)
    return made.reordered(str(options.get("sync", "eager_opt"))) if args.order == "costs" else made


class Row(NamedTuple):
    """The figures of one scheme at one number of micro-batches."""

    scheme: str
    micro_batches: int
    makespan_s: float
    bubble_ratio: float
    weights: float
    live_activations: float
    messages: int
    exposed_allreduce_s: float


class Refusal(NamedTuple):
    """A scheme that cannot have the shape, and why."""

    scheme: str
    micro_batches: int
    reason: str


def _row(spec: str, made: Plan) -> Row:
    return Row(
        scheme=spec,
        micro_batches=made.schedule.micro_batches,
        makespan_s=float(made.makespan_s),
        bubble_ratio=made.bubble_ratio,
        weights=max(made.weights),
        live_activations=max(made.activations),
        messages=max(made.messages),
        exposed_allreduce_s=float(made.exposed_allreduce_s),
    )


def _json(rows: list[Row], refused: list[Refusal]) -> None:
    found = {"schemes": [row._asdict() for row in rows], "refused": [refusal._asdict() for refusal in refused]}
    print(json.dumps(found, indent=1))


def _csv(rows: list[Row], refused: list[Refusal]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    for refusal in refused:
        complain(f"chimera-mpi: left out: {refusal.reason}")


def _table(rows: list[Row], refused: list[Refusal]) -> None:
    """A block for each number of micro-batches, the shortest step first."""
    width = columns(None)
    blocks = {n: sorted((r for r in rows if r.micro_batches == n), key=lambda row: row.makespan_s)
              for n in sorted({row.micro_batches for row in rows})}  # fmt: skip
    shown = {n: [list(_words(row, block)) for row in block] for n, block in blocks.items()}
    numbers = zip(*(words[1:] for block in shown.values() for words in block), strict=True)
    widths = [max(map(len, (*head, *column))) for head, column in zip(HEADS, numbers, strict=True)]
    room = width - sum(2 + each for each in widths)
    names = {row.scheme: _folded(row.scheme, room) for row in rows}
    widths.insert(0, max(len(line) for lines in names.values() for line in lines))
    for n, block in shown.items():
        print(f"N = {n}")
        for line in zip(("", "scheme"), *HEADS, strict=True):
            print(_aligned(line, widths))
        for name, *words in block:
            first, *others = names[name]
            print(_aligned([first, *words], widths), *others, sep="\n")
        print()
    notes = [
        "* best of its column. Weights and live activations of the fullest worker, in stages (1/depth of the model).",
        *(f"left out: {reason}" for reason in dict.fromkeys(refusal.reason for refusal in refused)),
    ]
    for note in notes:
        print(fill(note, max(width, 30), subsequent_indent="  ", break_on_hyphens=False))


HEADS = (  # of the numbers, in two lines
    ("", "makespan"), ("bubble", "%"), ("", "weights"), ("live", "act."), ("", "messages"), ("exposed", "all-reduce"),
)  # fmt: skip


def _folded(scheme: str, width: int) -> list[str]:
    """In lines of this width, where its options are not longer."""
    lines = [""]
    for part in re.findall("[^,]+,?", scheme):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("  ")
        lines[-1] += part
    return lines


def _aligned(words: Sequence[str], widths: Sequence[int]) -> str:
    """The first to the left, numbers and what stands above them to the right."""
    first, *others = words
    cells = [first.ljust(widths[0]), *(word.rjust(width) for word, width in zip(others, widths[1:], strict=True))]
    return "  ".join(cells).rstrip()


def _words(row: Row, block: list[Row]) -> Iterator[str]:
    yield row.scheme
    shown = {
        "makespan_s": duration(row.makespan_s),
        "bubble_ratio": f"{100 * row.bubble_ratio:.1f}",
        "weights": f"{row.weights:g}",
        "live_activations": f"{row.live_activations:g}",
        "messages": str(row.messages),
        "exposed_allreduce_s": duration(row.exposed_allreduce_s),
    }
    for name, words in shown.items():
        of_all = [getattr(other, name) for other in block]
        best = getattr(row, name) == min(of_all) < max(of_all)
        yield words + ("*" if best else " ")
