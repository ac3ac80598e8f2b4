"""How a plan scales with the number of workers, in words, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..draw.chart import Chart, Series
from ..draw.chart_svg import chart_svg
from ..draw.chart_text import chart_text
from ..draw.look import percent
from ..errors import InputError, counted
from ..predict.estimate import Estimate
from ..predict.planner import RIVAL, Outcome, described, search
from ._asked import Asked, progress_bar
from ._plan import write
from ._planned import columns, figures
from ._terminal import speaks_unicode


class Scale(NamedTuple):
    """What a number of workers comes to, or why it comes to nothing."""

    workers: int
    mini_batch: int
    outcome: Outcome | None
    refusal: str = ""


def scale(asked: Asked, args: argparse.Namespace) -> int:
    if args.output:
        raise InputError("-o writes the plan for one number of workers: give --workers one")
    rows = [_scaled(asked, workers, args) for workers in args.workers]
    if not any(row.outcome for row in rows):
        raise InputError(rows[0].refusal)
    if args.svg:
        write(args.svg, chart_svg(_charts(asked, rows, args.strong)))
    if args.json:
        print(json.dumps([_scale_figures(asked, row) for row in rows], indent=1))
    else:
        print("\n".join(_scale_told(asked, rows, args.strong)))
    return 0


def _scaled(asked: Asked, workers: int, args: argparse.Namespace) -> Scale:
    first = args.workers[0]
    mini_batch = asked.mini_batch if args.strong else max(asked.mini_batch * workers // first, 1)
    try:
        with progress_bar() as tell:
            found = search(asked.work, asked.machine, workers, mini_batch, asked.space, 1, tell)
    except InputError as error:
        return Scale(workers, mini_batch, None, str(error))
    return Scale(workers, mini_batch, found)


def _scale_told(asked: Asked, rows: Sequence[Scale], strong: bool) -> Iterator[str]:
    kind = "strong" if strong else "weak"
    yield f"{asked.name} on {asked.machine.name}, {kind} scaling"
    yield ""
    heads = ["workers", "mini-batch", "best choice", "step s", "Eq. 1", "samples/s", "efficiency", "bubble",
             "all-reduce", f"{RIVAL} samples/s"]  # fmt: skip
    efficiency = dict(_efficiency(rows, lambda outcome: outcome.best[0]))
    yield from columns([heads, *(_scale_row(row, efficiency) for row in rows if row.outcome)])
    for row in rows:
        if row.refusal:
            yield f"{counted(row.workers, 'worker')}: {row.refusal}"
    yield ""
    if len(efficiency) > 1:
        yield chart_text(_charts(asked, rows, strong)[1], ascii=not speaks_unicode())


def _scale_row(row: Scale, efficiency: dict[float, float]) -> list[str]:
    assert row.outcome
    best, rival = row.outcome.best[0], row.outcome.rival
    return [
        str(row.workers),
        str(row.mini_batch),
        described(best.choice),
        f"{best.step_s:.4g}",
        f"{best.formula_s:.4g}",
        f"{row.outcome.samples_per_s(best):.5g}",
        f"{efficiency[row.workers]:.1f} %",
        percent(best.bubble_ratio),
        f"{best.exposed_allreduce_s:.3g} s",
        f"{row.outcome.samples_per_s(rival):.5g}" if rival else "-",
    ]


def _efficiency(rows: Sequence[Scale], of: Callable[[Outcome], Estimate | None]) -> list[tuple[float, float]]:
    """Samples per second and worker, in per cent of those on the fewest workers that can."""
    found = [(row, estimate) for row in rows if row.outcome and (estimate := of(row.outcome))]
    per_worker = [(row.workers, row.mini_batch / estimate.step_s / row.workers) for row, estimate in found]
    first = min(per_worker)[1] if per_worker else 1
    return [(workers, 100 * each / first) for workers, each in per_worker]


def _charts(asked: Asked, rows: Sequence[Scale], strong: bool) -> list[Chart]:
    of: dict[str, Callable[[Outcome], Estimate | None]] = {"best": lambda o: o.best[0], RIVAL: lambda o: o.rival}
    throughput, shares = [], []
    for name, pick in of.items():
        found = [(row, e) for row in rows if row.outcome and (e := pick(row.outcome))]
        if found:
            throughput.append(Series(name, [(row.workers, row.mini_batch / e.step_s) for row, e in found]))
            shares.append(Series(name, _efficiency(rows, pick)))
    first, per_worker = min((x, y / x) for x, y in throughput[0].points)
    last = max(x for x, _ in throughput[0].points)
    ideal = Series("ideal", [(first, first * per_worker), (last, last * per_worker)], guide=True)
    title = f"{asked.name} on {asked.machine.name}, {'strong' if strong else 'weak'} scaling"
    return [
        Chart(title, "workers", "samples/s", [*throughput, ideal], log_y=True),
        Chart("Throughput of a worker", "workers", "% of the first", shares),
    ]


def _scale_figures(asked: Asked, row: Scale) -> dict[str, Any]:
    if row.outcome is None:
        return {"workers": row.workers, "mini_batch": row.mini_batch, "refused": row.refusal}
    return {"workers": row.workers, **figures(asked, row.outcome)}
