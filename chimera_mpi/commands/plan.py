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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..draw.chart import Chart, Series, chart_svg, chart_text
from ..draw.look import percent
from ..errors import InputError
from ..predict.anatomy import Anatomy, anatomy
from ..predict.estimate import Choice, Estimate
from ..predict.machine import Machine, machines, read_machine
from ..predict.planner import RIVAL, SYNCHRONOUS, Outcome, Space, described, gigabytes, needed_of, search
from ..predict.work import Work
from ..schedule import ALIASES, SCHEMES, STREAMS, nearest
from ._plan import count, write

if TYPE_CHECKING:
    from ..config import Config

EXAMPLE = """\
  chimera-mpi plan gpt2-paper --machine piz-daint --workers 512 --mini-batch 512 -o plan.toml
  chimera-mpi plan bert-48 --machine piz-daint --workers 32 --mini-batch 512 --schemes chimera,1f1b,gpipe
  chimera-mpi plan gpt2-paper --machine piz-daint --workers 512,2048,8192 --mini-batch 512 --svg scaling.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="PRESET|FILE.toml", help="what train takes: gpt2-paper, or a file of keys")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as precision=bf16")
    parser.add_argument("--machine", required=True, metavar="NAME|FILE", help=f"{', '.join(machines())}, or a file")
    parser.add_argument("--workers", type=_counts, required=True, metavar="P,...", help="one number of ranks or several")
    parser.add_argument("--mini-batch", type=count, metavar="M", help="samples of a step; by default the source's")
    space = parser.add_argument_group("what may be chosen")
    space.add_argument("--schemes", type=_names, metavar="NAME,...", help="default: all synchronous ones")
    space.add_argument(
        "--asynchronous", action="store_true", help=f"also {', '.join(STREAMS)}, whose gradients are of older weights"
    )
    space.add_argument("--depths", type=_counts, metavar="D,...", help="default: all that divide the workers")
    space.add_argument("--max-micro-batch-size", type=count, metavar="B", help="default: what memory has room for")
    scaling = parser.add_argument_group("several numbers of workers")
    scaling.add_argument("--strong", action="store_true", help="the same mini-batch for all of them")
    scaling.add_argument("--svg", type=Path, metavar="FILE", help="also draw the scaling")
    output = parser.add_argument_group("output", "files that exist are replaced")
    output.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help="the best as a configuration for train")
    output.add_argument("--best", type=count, default=10, metavar="K", help="lines of the table; default: 10")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    asked = _asked(args)
    if len(args.workers) > 1:
        return _scale(asked, args)
    if args.svg:
        raise InputError("--svg draws how a model scales: give --workers several numbers, such as 512,1024,2048")
    with _bar() as tell:
        outcome = search(asked.work, asked.machine, args.workers[0], asked.mini_batch, asked.space, args.best, tell)
    if args.output:
        write(args.output, configuration(asked, outcome, args.workers[0]))
    if args.json:
        print(json.dumps(_figures(asked, outcome), indent=1))
    else:
        print("\n".join(_told(asked, outcome, args.workers[0])))
        if args.output:
            print(f"\nmpirun -n {args.workers[0]} chimera-mpi train {args.output}")
    return 0


# ---- what is asked for


@dataclass(frozen=True)
class Asked:
    """A model, a machine, and what may be chosen. `name` is that of the model's configuration."""

    name: str
    config: Config
    work: Work
    machine: Machine
    mini_batch: int
    space: Space


CHOSEN = ("micro_batches", "pairs", "concat", "chunks", "waves", "partition", "accumulate")  # keys that are results


def _asked(args: argparse.Namespace) -> Asked:
    from ..config import load
    from ..work import work_of

    machine = read_machine(args.machine)
    given = {override.partition("=")[0] for override in args.overrides}
    for key in CHOSEN:
        if key in given:
            raise InputError(f"{key} is what plan chooses: leave it out, or give it to train")
    config = load(args.source, args.overrides)
    mini_batch = args.mini_batch or config.mini_batch_size
    if mini_batch is None:
        raise InputError(f"{args.source} has no mini_batch_size: give --mini-batch, the samples of a step")
    space = Space(
        schemes=_schemes(args, config, given),
        depths=(config.depth,) if "depth" in given else args.depths and tuple(args.depths),
        largest_micro_batch=args.max_micro_batch_size,
        micro_batch_size=config.micro_batch_size if "micro_batch_size" in given else None,
        sharded=config.optimizer_sharding == "replicas",
        fp16=config.precision == "fp16",
    )
    if "recompute" in given:
        space = replace(space, recompute=(config.recompute,))
    if "sync" in given:
        space = replace(space, syncs=(config.sync,))
    return Asked(Path(args.source).stem, config, work_of(config), machine, mini_batch, space)


def _schemes(args: argparse.Namespace, config: Config, given: set[str]) -> tuple[str, ...]:
    """Those that are named, in the order of the registry. An asynchronous one needs --asynchronous as well."""
    named = [config.scheme] if "scheme" in given else args.schemes or [*SYNCHRONOUS, *(STREAMS * args.asynchronous)]
    for name in named:
        if ALIASES.get(name, name) not in SCHEMES:
            raise InputError(f"unknown scheme '{name}': {nearest(name, [*SCHEMES, *ALIASES])}")
    schemes = {ALIASES.get(name, name) for name in named}
    streams = [scheme for scheme in STREAMS if scheme in schemes]
    if streams and not args.asynchronous:
        raise InputError(f"{streams[0]} is asynchronous, it trains on gradients of older weights: allow --asynchronous")
    return tuple(scheme for scheme in SCHEMES if scheme in schemes)


def _counts(words: str) -> list[int]:
    return [count(word) for word in words.split(",")]


def _names(words: str) -> list[str]:
    return words.split(",")


@contextmanager
def _bar() -> Iterator[Callable[[int, int, float], None]]:
    """On a terminal, a bar that runs while choices are settled."""
    if not sys.stderr.isatty():
        yield lambda settled, of, best_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, told = bar.add_task("laying out choices", total=None), [0.0]

        def tell(settled: int, of: int, best_s: float) -> None:
            if time.monotonic() - told[0] > 0.1:
                told[0] = time.monotonic()
                best = f", best {best_s:.3g} s" if best_s < float("inf") else ""
                bar.update(task, completed=settled, total=of, description=f"{settled:,} of {of:,} choices{best}")

        yield tell


# ---- one number of workers, in words


def _told(asked: Asked, outcome: Outcome, workers: int) -> Iterator[str]:
    limit = asked.machine.memory_bytes
    yield (
        f"{asked.name} on {workers} workers of {asked.machine.name}, {outcome.mini_batch} samples of "
        f"{asked.config.sequence_length} tokens a step, at most {gigabytes(limit)} a worker"
    )
    yield ""
    yield from _columns([TABLE, *(_row(asked, outcome, at, found) for at, found in enumerate(outcome.best, 1))])
    yield ""
    if any(found.choice.scheme in STREAMS for found in outcome.best):
        yield "* asynchronous: its gradients are of older weights, so it does not equal serial training"
    yield from _reasons(asked, outcome)
    for reason in outcome.left_out:
        yield f"left out: {reason}"


TABLE = ["", "scheme", "D", "W", "B", "N", "recompute", "sync", "stages",
         "step s", "Eq. 1", "differ", "samples/s", "bubble", "all-reduce", "memory"]  # fmt: skip


def _row(asked: Asked, outcome: Outcome, at: int, found: Estimate) -> list[str]:
    choice = found.choice
    return [
        str(at),
        _scheme_words(choice),
        *map(str, (choice.depth, choice.width, choice.micro_batch_size, choice.micro_batches)),
        str(choice.recompute),
        choice.sync if choice.scheme not in STREAMS else "-",
        "uniform" if choice.cuts is None else "balanced",
        f"{found.step_s:.4g}",
        f"{found.formula_s:.4g}",
        f"{100 * found.disagreement:+.1f} %",
        f"{outcome.samples_per_s(found):.4g}",
        percent(found.bubble_ratio),
        f"{found.exposed_allreduce_s:.3g} s",
        gigabytes(needed_of(asked.work, choice)),
    ]


def _scheme_words(choice: Choice) -> str:
    options = ",".join(f"{name}={value}" for name, value in choice.options)
    return choice.scheme + (f":{options}" if options else "") + ("*" if choice.scheme in STREAMS else "")


def _reasons(asked: Asked, outcome: Outcome) -> Iterator[str]:
    """Why the best is best, how sure that is, and what would be better still."""
    shown = {"1": outcome.best[0]}
    if len(outcome.best) > 1:
        shown["2"] = outcome.best[1]
    if outcome.rival and outcome.rival not in shown.values():
        shown[f"best {RIVAL}"] = outcome.rival
    parts = {name: anatomy(asked.work, asked.machine, found.choice) for name, found in shown.items()}
    yield "where the seconds of a step go, on the average worker:"
    yield from _columns([["", "choice", *PARTS, "step"], *(
        [name, described(shown[name].choice), *(f"{s:.3g}" for s in of), f"{of.step_s:.4g}"] for name, of in parts.items()
    )])  # fmt: skip
    best_s = outcome.best[0].step_s
    for name, found in list(shown.items())[1:]:
        yield f"{name} takes {found.step_s / best_s - 1:.1%} longer: {_losses(parts['1'], parts[name])}"
    yield _certainty(asked, outcome)
    if outcome.unfit:
        found, lacking = outcome.unfit
        yield (
            f"nearest that does not fit: {described(found.choice)} would take {1 - found.step_s / best_s:.1%} less, "
            f"{found.step_s:.4g} s, and lacks {lacking:,.0f} bytes ({gigabytes(lacking)}) on its fullest worker"
        )
    else:
        yield "no choice that does not fit would be faster"
    yield f"{outcome.considered:,} choices, {outcome.simulated:,} of them simulated, the others ruled out by bounds or memory"


PARTS = ("compute", "recompute", "update", "uneven", "bubble", "messages", "all-reduce")


def _losses(best: Anatomy, other: Anatomy) -> str:
    """The largest differences between two steps, in words."""
    differences = sorted(((o - b, name) for b, o, name in zip(best, other, PARTS, strict=True)), key=lambda d: -abs(d[0]))
    telling = [(by, name) for by, name in differences if abs(by) > abs(other.step_s - best.step_s) / 10]
    return ", ".join(f"{abs(by):.3g} s {'more' if by > 0 else 'less'} {name}" for by, name in telling[:4]) or "nothing much"


def _certainty(asked: Asked, outcome: Outcome) -> str:
    best = outcome.best[0]
    return f"simulation and Eq. 1 differ by {abs(best.disagreement):.1%} on the best"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not any(row[column][:1].isdigit() for row in rows[1:]) or column < 2 for column in range(len(widths))]
    for row in rows:
        cells = (word.ljust(w) if l else word.rjust(w) for word, w, l in zip(row, widths, left, strict=True))
        yield "  ".join(cells).rstrip()


# ---- as JSON


def _figures(asked: Asked, outcome: Outcome) -> dict[str, Any]:
    return {
        "machine": asked.machine.name,
        "memory_bytes": asked.machine.memory_bytes,
        "mini_batch": outcome.mini_batch,
        "considered": outcome.considered,
        "simulated": outcome.simulated,
        "best": [_figures_of(asked, outcome, found) for found in outcome.best],
        "best_1f1b": outcome.rival and _figures_of(asked, outcome, outcome.rival),
        "nearest_unfit": outcome.unfit
        and {**_figures_of(asked, outcome, outcome.unfit.estimate), "lacking_bytes": outcome.unfit.lacking_bytes},
        "left_out": outcome.left_out,
    }


def _figures_of(asked: Asked, outcome: Outcome, found: Estimate) -> dict[str, Any]:
    choice = found.choice
    return {
        "scheme": choice.scheme,
        "options": dict(choice.options),
        "asynchronous": choice.scheme in STREAMS,
        "depth": choice.depth,
        "width": choice.width,
        "micro_batch_size": choice.micro_batch_size,
        "micro_batches": choice.micro_batches,
        "recompute": choice.recompute,
        "sync": choice.sync,
        "partition": _partition(choice),
        "optimizer_sharding": "replicas" if choice.sharded else "none",
        "step_s": found.step_s,
        "formula_s": found.formula_s,
        "samples_per_s": outcome.samples_per_s(found),
        "bubble_ratio": found.bubble_ratio,
        "exposed_allreduce_s": found.exposed_allreduce_s,
        "memory_bytes": needed_of(asked.work, choice),
        "seconds": anatomy(asked.work, asked.machine, choice)._asdict(),
    }


def _partition(choice: Choice) -> str | list[int]:
    return "uniform" if choice.cuts is None else [cut.start for cut in choice.cuts[1:]]


# ---- as a configuration


def configuration(asked: Asked, outcome: Outcome, workers: int) -> str:
    """A TOML file that train takes as it is, on so many ranks: the source's keys and what was chosen."""
    best = outcome.best[0]
    choice = best.choice
    values = {
        name: getattr(asked.config, name)
        for name in type(asked.config).model_fields
        if name in asked.config.model_fields_set and name not in (*CHOSEN, "micro_batch_size", "mini_batch_size")
    }
    values |= {
        "scheme": choice.scheme,
        "depth": choice.depth,
        "micro_batches": choice.micro_batches,
        "mini_batch_size": outcome.mini_batch,
        "recompute": choice.recompute,
        "sync": choice.sync,
        "partition": _partition(choice),
        **dict(choice.options),
    }
    unset = [name for name, value in values.items() if value is None]
    return "\n".join(
        [
            f"# Planned from {asked.name} for {workers} ranks of {asked.machine.name}: D={choice.depth} x W={choice.width}.",
            f"# A step of {outcome.mini_batch} samples is to take {best.step_s:.4g} s (Eq. 1: {best.formula_s:.4g} s) and at most",
            f"# {needed_of(asked.work, choice) / 1e9:.4g} GB on a worker.",
            *(f"# The source has no {name}: give train {name}=none as well." for name in unset),
            *(f"{name} = {_literal(value)}" for name, value in values.items() if value is not None),
            "",
        ]
    )


def _literal(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (bool, list, tuple)):
        return json.dumps(value)
    return repr(value)


# ---- several numbers of workers


class Scale(NamedTuple):
    """What a number of workers comes to, or why it comes to nothing."""

    workers: int
    mini_batch: int
    outcome: Outcome | None
    refusal: str = ""


def _scale(asked: Asked, args: argparse.Namespace) -> int:
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
        with _bar() as tell:
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
    yield from _columns([heads, *(_scale_row(row, efficiency) for row in rows if row.outcome)])
    for row in rows:
        if row.refusal:
            yield f"{row.workers} workers: {row.refusal}"
    yield ""
    if len(efficiency) > 1:
        yield chart_text(_charts(asked, rows, strong)[1], ascii=not _speaks_unicode())


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
    return {"workers": row.workers, **_figures(asked, row.outcome)}


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
