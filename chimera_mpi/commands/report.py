"""Say what the log of a run holds, or compare several.

One run: losses and throughput over time, where the time of each worker goes, bubble and memory beside what was planned,
the sessions, and a step as it was planned with what was measured above the one that was. A run that was resumed in
another layout is told of by the sessions of its last one.

Several: a table, repeats of a configuration together (they may differ in seed and files), and how they scale where
they differ in ranks. Steps of the warm-up are left out; ± is half of a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import draw
from ..draw.chart import Drawn
from ..draw.chart_svg import chart_svg
from ..draw.chart_text import chart_text
from ..draw.look import ASCII
from ..draw.table import Table, table_text
from ..errors import InputError, complain
from ._plan import write
from ._terminal import add_terminal, columns, speaks_unicode, wants_color

if TYPE_CHECKING:
    from ..report import Report
    from ..runlog import Run
    from ..timeline import Timeline

EXAMPLE = """\
  chimera-mpi report runs/20261130-091500-chimera.h5
  chimera-mpi report RUN.h5 --step 19 --svg step.svg --html run.html
  chimera-mpi report runs/scaling/*/*/log.h5 --plot scaling.pdf"""

PLOTS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="RUN.h5", help="the log of a run, also of one in progress; or several"
    )
    one = parser.add_argument_group("one run")
    one.add_argument("--session", type=int, metavar="N", help="which to tell of; by default those of the last layout")
    one.add_argument("--step", type=int, metavar="K", help="which sampled step to draw; by default the last")
    several = parser.add_argument_group("several runs")
    several.add_argument("--different", action="store_true", help="compare them though their models are not the same")
    output = parser.add_argument_group("output", "files that exist are replaced, logs never")
    output.add_argument("--svg", type=_picture, metavar="FILE", help="draw steps as SVG")
    output.add_argument("--plot", type=_plot, metavar="FILE", help="draw charts, as .png, .pdf (matplotlib) or .svg")
    output.add_argument("--html", type=_picture, metavar="FILE", help="write all of it as a page to point at")
    output.add_argument("--trace", type=_picture, metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    output.add_argument("--tensorboard", type=Path, metavar="DIR", help="write events for TensorBoard (tensorboard)")
    output.add_argument("--json", action="store_true", help="print figures as JSON, draw nothing")
    add_terminal(output)


def run(args: argparse.Namespace) -> int:
    _check_outputs(args)
    told = _one(args) if len(_paths(args)) == 1 else _several(args)
    _write_files(told, args)
    print(json.dumps(_plain(told.figures), indent=1) if args.json else _text(told, args))
    return 0


class _Told(NamedTuple):
    """All that there is to say and to draw."""

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Drawn]
    timelines: Mapping[str, Timeline]
    figures: dict[str, Any]
    heading: str  # of the drawn steps
    run: Run | None  # the only one
    runs: Mapping[str, Run]  # or several, by name


def _check_outputs(args: argparse.Namespace) -> None:
    logs = {path.resolve() for path in args.logs}
    for path in (args.svg, args.plot, args.html, args.trace):
        if path and path.resolve() in logs:
            raise InputError(f"{path} is a log that is reported, and never overwritten: name another file")


# ---- what is told


def _paths(args: argparse.Namespace) -> list[Path]:
    """Each file once."""
    return list({path.resolve(): path for path in args.logs}.values())


def _one(args: argparse.Namespace) -> _Told:
    from .. import report
    from ..runlog import read_run

    (path,) = _paths(args)
    log = read_run(path)
    made = report.report_of(log, args.session)
    drawn = made.steps(args.step).titled if made.drawable or args.step is not None or args.svg else {}
    figures = {"runs": [made.figures()], "left_out": []}
    return _Told(path.name, made.lines(), made.tables(), made.charts(), drawn, figures, "One step", log, {})


def _several(args: argparse.Namespace) -> _Told:
    from .. import report

    for option in ("session", "step", "trace"):
        if getattr(args, option) is not None:
            raise InputError(f"--{option} is of one run, not of {len(_paths(args))}: give one log")
    reports, left_out = _read(_paths(args))
    for reason in left_out.values():
        complain(f"chimera-mpi: left out: {reason}")
    if not reports:
        raise InputError(f"none of the {len(left_out)} logs has a step to compare")
    comparison = report.compared(reports, args.different)
    drawn = comparison.drawn()
    if args.svg and not drawn:
        raise InputError(f"{args.svg}: no run has spans yet, so there is no step to draw")
    told = [{"path": path, "reason": reason} for path, reason in left_out.items()]
    figures = {"runs": [made.figures() for made in reports], **comparison.figures(), "left_out": told}
    tables, charts = comparison.tables(), comparison.charts()
    heading = "A measured step of each configuration"
    return _Told(f"{len(reports)} runs", [], tables, charts, drawn, figures, heading, None, _named(reports))


def _read(paths: Sequence[Path]) -> tuple[list[Report], dict[str, str]]:
    """What can be compared, and why the others cannot."""
    from .. import report
    from ..runlog import read_run

    reports, left_out = [], {}
    for path in paths:
        try:
            made = report.report_of(read_run(path))
            if not made.has_steps:
                raise InputError(f"{path} has no step yet")
            reports.append(made)
        except InputError as error:
            left_out[str(path)] = str(error)
    return reports, left_out


def _named(reports: Sequence[Report]) -> dict[str, Run]:
    """By as much of their paths as it takes to tell them apart, or by number where that is not enough."""
    paths = [made.run.path.resolve().with_suffix("").parts[1:] for made in reports]
    tried = (["-".join(path[-parts:]) for path in paths] for parts in range(1, max(map(len, paths)) + 1))
    numbers = [str(number) for number in range(1, len(paths) + 1)]
    names = next((names for names in tried if len(set(names)) == len(names)), numbers)
    return {name: made.run for name, made in zip(names, reports, strict=True)}


# ---- how


def _text(told: _Told, args: argparse.Namespace) -> str:
    width, ascii = columns(args.width), not speaks_unicode()
    blocks = [
        "\n".join(
            line
            for long in told.lines
            for line in wrap(long, width, subsequent_indent=" " * 12, break_on_hyphens=False)
        ),
        *(table_text(table, width) for table in told.tables),
        *("\n".join([*wrap(chart.title, width), chart_text(chart, width, ascii=ascii)]) for chart in told.charts),
    ]
    if told.run and told.timelines:
        blocks.append(draw.text(told.timelines, width, wants_color(args.color), ascii))
    text = "\n\n".join(block for block in blocks if block)
    return text.translate(ASCII) if ascii else text


def _plain(value: Any) -> Any:
    """What is not a number is null in JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_files(told: _Told, args: argparse.Namespace) -> None:
    if args.svg:
        write(args.svg, draw.svg(told.timelines))
    if args.plot:
        _draw_charts(told.charts, args.plot)
    if args.html:
        from ..report.page import report_page

        page = report_page(told.title, told.lines, told.charts, told.tables, told.timelines, told.heading)
        write(args.html, page)
    if args.trace and told.run:
        from ..sampled import trace_of

        write(args.trace, trace_of(told.run, args.step))
    if args.tensorboard:
        from ..report.events import write_events

        folder = args.tensorboard
        write_events({folder: told.run} if told.run else {folder / name: run for name, run in told.runs.items()})


def _draw_charts(charts: Sequence[Drawn], path: Path) -> None:
    if not charts:
        raise InputError(f"{path}: no step yet, so there is nothing to plot")
    if path.suffix.lower() == ".svg":
        write(path, chart_svg(charts))
    else:
        from ..draw.plot import plot

        plot(charts, path)


def _picture(word: str) -> Path:
    """A file to write, for argparse; not a log."""
    path = Path(word)
    if path.suffix.lower() in (".h5", ".hdf5"):
        raise argparse.ArgumentTypeError(
            f"'{word}' is the name of a log, which is never overwritten: name another file"
        )
    return path


def _plot(word: str) -> Path:
    path = _picture(word)
    if path.suffix.lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"'{word}' must end with {', '.join(PLOTS)}")
    return path
