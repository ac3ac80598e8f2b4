"""What the planner has found, in words, as JSON and as a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..draw.look import percent
from ..errors import counted
from ..predict.anatomy import Anatomy, anatomy
from ..predict.estimate import Choice, Estimate
from ..predict.planner import RIVAL, Outcome, described, fullest_bytes, gigabytes
from ..schedule import STREAMS
from ._asked import CHOSEN, Asked


def told(asked: Asked, outcome: Outcome, workers: int) -> Iterator[str]:
    limit = asked.machine.memory_bytes
    yield (
        f"{asked.name} on {counted(workers, 'worker')} of {asked.machine.name}, "
        f"{counted(outcome.mini_batch, 'sample')} of {counted(asked.config.sequence_length, 'token')} "
        f"a step, at most {gigabytes(limit)} a worker"
    )
    yield ""
    yield from columns([TABLE, *(_row(asked, outcome, at, found) for at, found in enumerate(outcome.best, 1))])
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
        gigabytes(fullest_bytes(found)),
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
    rows = [
        [name, described(shown[name].choice), *(f"{round(seconds, 9) + 0.0:.3g}" for seconds in of), f"{of.step_s:.4g}"]
        for name, of in parts.items()
    ]
    yield from columns([["", "choice", *PARTS, "step"], *rows])
    best_s = outcome.best[0].step_s
    for name, found in list(shown.items())[1:]:
        yield f"{name} takes {found.step_s / best_s - 1:.1%} longer: {_losses(parts['1'], parts[name])}"
    yield _certainty(outcome)
    if outcome.unfit:
        found, lacking = outcome.unfit
        yield (
            f"nearest that does not fit: {described(found.choice)} would take {1 - found.step_s / best_s:.1%} less, "
            f"{found.step_s:.4g} s, and lacks {lacking:,.0f} bytes ({gigabytes(lacking)}) on its fullest worker"
        )
    else:
        yield "found no choice that does not fit and would be faster"
    yield f"{outcome.considered:,} choices, {outcome.simulated:,} of them simulated, the rest settled by bounds"


PARTS = ("compute", "recompute", "update", "uneven", "bubble", "messages", "all-reduce")


def _losses(best: Anatomy, other: Anatomy) -> str:
    """The largest differences between two steps, in words."""
    differences = sorted(
        ((o - b, name) for b, o, name in zip(best, other, PARTS, strict=True)), key=lambda d: -abs(d[0])
    )
    telling = [(by, name) for by, name in differences if abs(by) > abs(other.step_s - best.step_s) / 10]
    return (
        ", ".join(f"{abs(by):.3g} s {'more' if by > 0 else 'less'} {name}" for by, name in telling[:4])
        or "nothing much"
    )


def _certainty(outcome: Outcome) -> str:
    best = outcome.best[0]
    return f"simulation and Eq. 1 differ by {abs(best.disagreement):.1%} on the best"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not any(row[column][:1].isdigit() for row in rows[1:]) or column < 2 for column in range(len(widths))]
    for row in rows:
        cells = (
            word.ljust(w) if to_left else word.rjust(w) for word, w, to_left in zip(row, widths, left, strict=True)
        )
        yield "  ".join(cells).rstrip()


# ---- as JSON


def figures(asked: Asked, outcome: Outcome) -> dict[str, Any]:
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
        "memory_bytes": fullest_bytes(found),
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
    if asked.config.scheme in STREAMS and asked.config.clip is None:
        del values["clip"]  # which follows from the scheme, and that is chosen
    values |= {
        "scheme": choice.scheme,
        "depth": choice.depth,
        "micro_batches": choice.micro_batches,
        "mini_batch_size": outcome.mini_batch,
        "recompute": choice.recompute,
        "sync": choice.sync,
        "partition": _partition(choice),
        "machine": asked.machine_name,  # by which train predicts its steps
        **dict(choice.options),
    }
    unset = [name for name, value in values.items() if value is None]
    lines = [
        f"# Planned from {_in_a_line(asked.name)} for {counted(workers, 'rank')} of {_in_a_line(asked.machine.name)}: "
        f"D={choice.depth}, W={choice.width}.",
        f"# A step of {counted(outcome.mini_batch, 'sample')} is to take {best.step_s:.4g} s "
        f"(Eq. 1: {best.formula_s:.4g} s),",
        f"# and at most {fullest_bytes(best) / 1e9:.4g} GB on a worker.",
        *(f"# TOML has no word for none: give train {name}=none as well." for name in unset),
        *(f"{name} = {_literal(value)}" for name, value in values.items() if value is not None),
    ]
    return "\n".join(lines) + "\n"


def _in_a_line(name: str) -> str:
    """A name as a comment can have it: what is behind the end of a line would be keys."""
    return "".join(letter if letter.isprintable() else " " for letter in name)


def _literal(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (bool, list, tuple)):
        return json.dumps(value)
    return repr(value)
