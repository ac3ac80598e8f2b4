"""Draw a schedule, and say how long it takes, how much of it is bubble and what it keeps in memory.

The schedule is built from the name of a scheme, or read from a CSV file: a line for each worker, a cell such as
2F0 for each op (stage, kind, micro-batch), in the notation of torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from .. import draw
from ..draw.look import duration, percent
from ..errors import InputError
from ..predict import steady_step_s
from ..schedule import ALIASES, SCHEMES, Progress, Schedule, build, check, dumps, read
from ..timeline import Timeline
from ._plan import (
    Plan,
    add_costs,
    add_order,
    add_scheme_options,
    costs_of,
    count,
    parse_scheme,
    printable,
    scheme_options,
    seconds,
    under,
    write,
)
from ._terminal import add_terminal, columns, speaks_unicode, wants_color

EXAMPLE = """\
  chimera-mpi show chimera --depth 4 --micro-batches 4 --backward 2
  chimera-mpi show 1f1b --depth 8 --micro-batches 16 --transfer 0.1 --html 1f1b.html
  chimera-mpi show chimera --depth 4 --micro-batches 8 --backward 2 --order costs --improve 5 --csv better.csv
  chimera-mpi show better.csv --backward 2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scheme", metavar="SCHEME|FILE.csv", help=", ".join([*SCHEMES, *ALIASES]))
    parser.add_argument("--depth", type=count, metavar="D", help="workers of the pipeline")
    parser.add_argument("--micro-batches", type=count, metavar="N", help="micro-batches of a step")
    add_costs(parser)
    add_scheme_options(parser)
    add_drawing(parser)


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """The options of a command that shows one schedule."""
    search = add_order(parser)
    search.add_argument("--improve", type=seconds, metavar="SECONDS", help="search so long for a better order")
    search.add_argument("--moves", type=count, default=2000, metavar="M", help="of the search, at most; default: 2000")
    parser.add_argument("--steps", type=count, default=1, metavar="K", help="so many steps in a row; default: 1")
    output = add_files(parser)
    output.add_argument("--csv", type=Path, metavar="FILE", help="also write the schedule itself")
    output.add_argument("--json", action="store_true", help="print figures and spans as JSON, draw nothing")
    add_terminal(output)


def add_files(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The options of a command that draws."""
    output = parser.add_argument_group("output", "files that exist are replaced")
    for suffix, what in _FILES.items():
        output.add_argument(f"--{suffix}", type=Path, metavar="FILE", help=what)
    return output


_FILES = {
    "svg": "also draw it as SVG",
    "png": "also draw it as PNG (needs matplotlib)",
    "html": "also write a page to zoom and point at",
    "trace": "also write a Chrome trace, for ui.perfetto.dev",
}


def write_files(timelines: Timeline | Mapping[str, Timeline], args: argparse.Namespace) -> None:
    """Draw into the files that the command line names."""
    if args.png:  # first, since it alone may not be possible at all
        draw.png(timelines, args.png)
    for path, drawing in (args.svg, draw.svg), (args.html, draw.html), (args.trace, draw.chrome_trace):
        if path:
            write(path, drawing(timelines))


def run(args: argparse.Namespace) -> int:
    schedule, sync = _schedule(args)
    show(schedule, args, sync)
    return 0


def _schedule(args: argparse.Namespace) -> tuple[Schedule, str | None]:
    """What is to be drawn, and when its all-reduces start if that was asked for."""
    shape = {"--depth": args.depth, "--micro-batches": args.micro_batches}
    if args.scheme.lower().endswith(".csv"):
        given = [option for option, value in shape.items() if value is not None]
        given += [f"--{option}" for option in scheme_options(args) if option != "sync"]
        if given:
            raise InputError(f"{args.scheme} has a shape of its own: leave out {' and '.join(given)}")
        return from_file(args.scheme, args.sync), args.sync
    scheme, options = parse_scheme(args.scheme)
    missing = [option for option, value in shape.items() if value is None]
    if missing:
        raise InputError(f"the following arguments are required: {', '.join(missing)}: see chimera-mpi show --help")
    apart = scheme_options(args)
    if twice := [option for option in options if option in apart]:
        raise InputError(f"{args.scheme} has its own {twice[0]}: leave out --{twice[0]}")
    options |= apart
    return check(build(scheme, args.depth, args.micro_batches, **options)), options.get("sync")


def from_file(path: str, sync: str | None, scheme: str | None = None) -> Schedule:
    """The schedule in a CSV file, named after it unless it is to be held to what a scheme promises."""
    schedule = read(path, **{name: word for name, word in (("scheme", scheme), ("sync", sync)) if word})
    return schedule if scheme else replace(schedule, scheme=printable(Path(path).name))


def show(schedule: Schedule, args: argparse.Namespace, sync: str | None) -> None:
    """Draw a schedule that is known to be sound under the costs of the command line, and sum it up.

    In another order its all-reduces start by `sync`.
    """
    made = once = _searched(under(costs_of(args), schedule), args, sync or "eager_opt")
    if args.steps > 1:
        made = once.repeated(args.steps)
    write_files(made.timeline, args)
    if args.csv:
        write(args.csv, dumps(made.schedule))
    if args.json:
        print(json.dumps(_figures(made, once, args), indent=1))
        return
    width = columns(args.width)
    print(draw.text(made.timeline, width, wants_color(args.color), ascii=not speaks_unicode()))
    print()
    print("\n".join(_summary(made, once, args, width)))


def _searched(made: Plan, args: argparse.Namespace, sync: str) -> Plan:
    if args.order == "costs":
        made = made.reordered(sync)
    if args.improve is not None:
        with _progress(args.improve) as progress:
            made = made.improved(sync, args.moves, args.improve, args.seed or 0, progress)
    return made


@contextmanager
def _progress(limit_s: float) -> Iterator[Progress | None]:
    """On a terminal, a bar that runs while the search does."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=limit_s)

        def tell(tried: int, best_s: float, bound_s: float) -> None:
            words = f"{tried} moves, {duration(best_s)}, bound {duration(bound_s)}"
            bar.update(task, completed=bar.tasks[0].elapsed, description=words)

        yield tell


def _summary(made: Plan, once: Plan, args: argparse.Namespace, width: int) -> Iterator[str]:
    figures = {"makespan": duration(made.makespan_s)}
    if args.order == "costs" or args.improve is not None:
        figures["lower bound"] = f"{duration(once.bound_s)}, the order takes {percent(_above_bound(once))} more"
    if args.steps > 1:
        figures["steady step"] = duration(_steady_step_s(once, args))
    figures["bubble ratio"] = percent(made.bubble_ratio)
    figures["critical path"] = ", ".join(f"{name} = {number}" for name, number in made.passes().items())
    if made.costs.allreduce_s or made.costs.gradient_bytes:
        figures["all-reduce"] = f"{duration(made.exposed_allreduce_s)} exposed"
    for name, words in figures.items():
        yield from wrap(f"{name:18}{words}", max(width, 30), subsequent_indent=" " * 18)
    yield ""
    yield from _per_worker(made, width)


def _above_bound(made: Plan) -> float:
    return float(made.makespan_s / made.bound_s) - 1 if made.bound_s else 0.0


def _steady_step_s(once: Plan, args: argparse.Namespace) -> float:
    return steady_step_s(once.schedule, once.costs, args.steps)


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


def _figures(made: Plan, once: Plan, args: argparse.Namespace) -> dict[str, object]:
    schedule, timeline = made.schedule, made.timeline
    return {
        "scheme": schedule.scheme,
        "depth": schedule.depth,
        "micro_batches": schedule.micro_batches,
        "pipes": schedule.pipes,
        "makespan_s": float(made.makespan_s),
        "lower_bound_s": float(once.bound_s),
        "steady_step_s": float(_steady_step_s(once, args)) if args.steps > 1 else None,
        "bubble_ratio": made.bubble_ratio,
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
