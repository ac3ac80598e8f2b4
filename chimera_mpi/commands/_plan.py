"""What the commands share that plan without running: options of schemes and costs, and what a plan comes to."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ..errors import InputError, cut, unwritable
from ..predict import Costs, Link, peak_activations, simulate, weight_versions
from ..predict.costs import PER_STAGE, TIMES, per_stage
from ..schedule import (
    ALIASES,
    SCHEMES,
    STREAMS,
    SYNCS,
    Kind,
    Progress,
    Schedule,
    build,
    check,
    improve,
    lower_bound,
    messages,
    nearest,
    options_of,
    ordered_for,
    repeat,
    without_updates,
)
from ..schedule.weave import within_reach
from ..timeline import Span, Timeline

# ---- costs: an option for each field of Costs


def add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs", "seconds; one number, or one for each stage, separated by commas")
    for name, option, default in _times():
        shown = "half the backward" if default is None else default
        group.add_argument(option, dest=name, type=_per_stage, metavar="S", help=f"default: {shown}")
    further = parser.add_argument_group("further costs")
    for name, (words, kind, metavar) in _FURTHER.items():
        how: dict[str, Any] = {"type": kind, "metavar": metavar} if kind else {"action": "store_const", "const": True}
        further.add_argument("--" + name.replace("_", "-"), help=words, **how)


def costs_of(args: argparse.Namespace) -> Costs:
    """The costs that the command line gives; the defaults of `Costs` for the others. Raises InputError."""
    given = {name: getattr(args, name) for name in (*TIMES, *_FURTHER)}
    for name, links in _TRAVELS.items():
        if given[name] is not None and all(given[link] is None for link in links):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} takes no time without a link: give --link A,B as well, or leave {option} out")
    return Costs(**{name: value for name, value in given.items() if value is not None})


def _times() -> list[tuple[str, str, Any]]:
    defaults = {field.name: field.default for field in fields(Costs)}
    return [(name, "--" + name.removesuffix("_s").replace("_", "-"), defaults[name]) for name in TIMES]


def _per_stage(words: str) -> float | list[float]:
    numbers = [_number(word) for word in words.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


LONGEST_NUMBER = 1000  # characters; Python reads no whole number of some thousands


def _number(word: str) -> float:
    """Exactly what was written: 0.1 as 1/10. Then sums are exact, and ties on the critical path are ties."""
    try:
        near = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{cut(word)}' is no number of seconds or bytes") from None
    if near and not 1e-15 <= near <= 1e15:
        raise argparse.ArgumentTypeError(f"must be 0 or between 1e-15 and 1e15, not {cut(word)}")
    if len(word) > LONGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"must have at most {LONGEST_NUMBER} characters, not '{cut(word)}'")
    value = Fraction(word) if near else Fraction(0)
    return value.numerator if value.denominator == 1 else cast(float, value)


def _link(words: str) -> Link:
    numbers = [_number(word) for word in words.split(",")]
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"takes seconds and seconds per byte, such as 1e-6,1e-10, not '{words}'")
    return Link(*numbers)


MOST = 10**15  # that can be counted: beyond it floats are no longer exact


def count(word: str) -> int:
    """A whole number of 1 or more, for argparse."""
    is_short = len(word) <= len(str(MOST))
    if not word.isdecimal() or (is_short and int(word) < 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not '{cut(word)}'")
    if not is_short or int(word) > MOST:
        raise argparse.ArgumentTypeError(f"must be {MOST:,} or less, not '{cut(word)}'")
    return int(word)


def counts(words: str) -> list[int]:
    """Such numbers, separated by commas, each once."""
    return list(dict.fromkeys(count(word) for word in words.split(",")))


_FURTHER: dict[str, tuple[str, Callable[[str], Any] | None, str]] = {
    "recompute": ("each backward does its forward once more", None, ""),
    "message_bytes": ("of a stage's output, for --link", _per_stage, "BYTES"),
    "link": ("a message of n bytes takes A + n * B seconds", _link, "A,B"),
    "node_link": ("the same within a node; default: --link", _link, "A,B"),
    "workers_per_node": ("default: 1", count, "K"),
    "sends_block": ("a worker is busy while what it sends is on its way", None, ""),
    "gradient_bytes": ("of a stage, for its all-reduce over --link", _per_stage, "BYTES"),
    "groups": (
        "groups of workers that train side by side, over which gradients are summed too; default: 1",
        count,
        "W",
    ),
    "allreduce_busy": ("share of an all-reduce's time that it takes from its worker; default: 0", _number, "SHARE"),
    "allreduces_queue": ("a worker's all-reduces take turns, as on one network port", None, ""),
    "jitter": ("ops take longer or shorter by up to this share, by chance", _number, "SHARE"),
    "seed": ("of chance, in jitter and search; default: 0", int, "SEED"),
}


_TRAVELS = {"message_bytes": ("link", "node_link"), "gradient_bytes": ("link",)}  # bytes, and what they travel over


def add_order(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Whether to order the ops anew."""
    search = parser.add_argument_group("order")
    search.add_argument(
        "--order",
        choices=("drawn", "costs"),
        default="drawn",
        help="as the scheme draws it, or the best that list scheduling finds for the costs; default: drawn",
    )
    return search


def seconds(word: str) -> float:
    """A time limit, for argparse."""
    return float(_number(word))


# ---- schemes and their options


def add_scheme_options(parser: argparse.ArgumentParser) -> None:
    """An option for each that a scheme of the registry has."""
    group = parser.add_argument_group("options of the schemes")
    group.add_argument("--sync", metavar="WHEN", help=f"when the all-reduces start: {', '.join(SYNCS)}")
    for option, (of, default) in _scheme_options().items():
        usual = "" if default is None else f"; default {default}"
        kind = type(default) if isinstance(default, (int, float)) else str
        group.add_argument(f"--{option}", type=kind, metavar=kind.__name__.upper(), help=f"{', '.join(of)}{usual}")


def scheme_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given."""
    options = {name: getattr(args, name) for name in ("sync", *_scheme_options())}
    return {name: value for name, value in options.items() if value is not None}


def _scheme_options() -> dict[str, tuple[list[str], Any]]:
    """Option: the schemes that have it and its default. Only what can be written on a command line."""
    options: dict[str, tuple[list[str], Any]] = {}
    for scheme in SCHEMES:
        parameters = inspect.signature(SCHEMES[scheme]).parameters
        for option in options_of(scheme):
            default = parameters[option].default
            if isinstance(default, (int, float, str)):
                options.setdefault(option, ([], default))[0].append(scheme)
    return options


_FOR_FILES = {
    ".csv": "a schedule in a file is for show FILE.csv or check FILE.csv, and has no options",
    ".h5": "logs of runs are compared by chimera-mpi report",
}


def parse_scheme(spec: str) -> tuple[str, dict[str, Any]]:
    """`chimera` or `chimera:pairs=2,concat=doubling` as a scheme and its options."""
    scheme, colon, rest = spec.partition(":")
    known = {"sync": ([], "lazy"), **_scheme_options()}
    if (name := ALIASES.get(scheme, scheme)) not in SCHEMES:
        remedy = _FOR_FILES.get(Path(scheme).suffix.lower()) or nearest(scheme, [*SCHEMES, *ALIASES])
        raise InputError(f"unknown scheme '{scheme}': {remedy}")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if option not in ("sync", *options_of(name)) or option not in known or not equals:
            raise InputError(
                f"'{part}' is no option of {name}: write {name}:option=value, with option one of "
                f"{', '.join(['sync', *options_of(name)])}"
            )
        if option in options:
            raise InputError(f"{spec} gives {option} twice: leave one of them out")
        default = known[option][1]
        try:
            options[option] = type(default)(value)
        except ValueError:
            raise InputError(f"{name}: {option} must be {type(default).__name__}, not '{value}'") from None
    refuse_sync(name, options)
    return name, options


def refuse_sync(scheme: str, options: Mapping[str, Any]) -> None:
    """Raises InputError if a stream is told when to update."""
    if scheme in STREAMS and "sync" in options:
        raise InputError(f"{scheme} updates each stage as soon as its gradients are whole: leave out sync")


# ---- what a plan comes to


@dataclass(frozen=True)
class Plan:
    """A schedule under costs, and its figures. Those of weights and activations are in whole stages: one is
    what a stage has where each worker holds one stage, 1/depth of the model."""

    schedule: Schedule
    costs: Costs

    @cached_property
    def ticks(self) -> tuple[Timeline, int]:
        """The times of all ops in ticks, whole numbers, and the ticks of a second."""
        costs, per_s = self._costs_in_ticks
        return simulate(self.schedule, costs), per_s

    @cached_property
    def _costs_in_ticks(self) -> tuple[Costs, int]:
        return self.costs.on(self.schedule).in_ticks()

    @cached_property
    def timeline(self) -> Timeline:
        """The same in seconds."""
        timeline, per_s = self.ticks
        spans = (Span(worker, op, start / per_s, end / per_s) for worker, op, start, end in timeline.spans)
        return Timeline(self.schedule, tuple(spans))

    @property
    def makespan_s(self) -> float:
        timeline, per_s = self.ticks
        return timeline.makespan_s / per_s

    @cached_property
    def bubble_ratio(self) -> float:
        return round(float(self.ticks[0].bubble_ratio), 12)

    @cached_property
    def weights(self) -> list[float]:
        """Stages of weights of each worker, all versions counted."""
        held = [len(self.schedule.places(worker)) for worker in range(self.schedule.depth)]
        return [self._whole(n * v) for n, v in zip(held, weight_versions(self.schedule), strict=True)]

    @cached_property
    def activations(self) -> list[float]:
        """The most micro-batch activations that each worker holds at once."""
        return [self._whole(peak) for peak in peak_activations(self.schedule)]

    @cached_property
    def messages(self) -> list[int]:
        """Messages that each worker sends."""
        sent = Counter(message.source for message in messages(self.schedule) if message.source != message.target)
        return [sent[worker] for worker in range(self.schedule.depth)]

    @cached_property
    def exposed_allreduce_s(self) -> float:
        """How much sooner the step would end if all-reduces were free."""
        costs, per_s = self._costs_in_ticks
        if not costs.allreduce_s:
            return 0
        free = simulate(self.schedule, replace(costs, allreduce_s=0))
        return (self.ticks[0].makespan_s - free.makespan_s) / per_s

    @cached_property
    def bound_s(self) -> float:
        """Seconds below which no order of these ops is (see `lower_bound`)."""
        costs, per_s = self._costs_in_ticks
        return lower_bound(self.schedule, costs) / per_s

    def reordered(self, sync: str) -> Plan:
        """The same ops in the best order found for the costs; a stream stays as it is."""
        if self.schedule.updates > 1:
            return self
        costs, _ = self._costs_in_ticks
        return replace(self, schedule=check(ordered_for(costs, without_updates(self.schedule), sync)))

    def improved(self, sync: str, moves: int, seconds: float, seed: int, progress: Progress | None) -> Plan:
        """The same ops in the order that a search ends with (see `improve`). Progress is told in seconds."""
        costs, per_s = self._costs_in_ticks

        def tell(tried: int, best: float, bound: float) -> None:
            if progress:
                progress(tried, best / per_s, bound / per_s)

        found = improve(self.schedule, costs, sync=sync, moves=moves, seconds=seconds, seed=seed, progress=tell)
        return replace(self, schedule=check(found.schedule))

    def repeated(self, steps: int) -> Plan:
        """So many steps, one after the other without a barrier."""
        stages, micro_batches = self.schedule.stages, self.schedule.micro_batches
        what = f"{steps} steps of {self.schedule.scheme}"
        within_reach(what, stages, steps * micro_batches, {"--steps ": stages * micro_batches})
        return replace(self, schedule=check(repeat(self.schedule, steps)))

    def passes(self) -> dict[str, int]:
        """The passes on the critical path: C_f and C_b of the paper's Section 3.4; C_i, C_w of split backwards."""
        names = {"C_f": Kind.FORWARD, "C_b": Kind.BACKWARD, "C_i": Kind.INPUT, "C_w": Kind.WEIGHT}
        kinds = {op.kind for order in self.schedule.orders for op in order}
        return {name: self.ticks[0].on_critical_path(kind) for name, kind in names.items() if kind in kinds}

    def _whole(self, stages: int) -> float:
        share = Fraction(stages * self.schedule.depth, self.schedule.stages)
        return share.numerator if share.denominator == 1 else float(share)


def shared_out(costs: Costs, parts: Fraction) -> Costs:
    """The costs of a stage that is one of `parts` equal parts of what `costs` are for. Messages stay whole."""
    shared = (name for name in PER_STAGE if name not in ("transfer_s", "message_bytes"))
    given = {name: value for name in shared if (value := getattr(costs, name)) is not None}
    changes: dict[str, Any] = {name: per_stage(lambda number: number / parts, value) for name, value in given.items()}
    return replace(costs, **changes)


def plan(
    scheme: str, depth: int, micro_batches: int, costs: Costs, options: Mapping[str, Any], same_model: bool = False
) -> Plan:
    """Build, check and simulate. Raises InputError when the shape, the options or the costs do not fit.

    `costs` are those of a stage of this scheme; with `same_model`, those of 1/depth of a model, so that they
    are shared out over the smaller stages of a scheme that has more stages than workers.
    """
    schedule = check(build(scheme, depth, micro_batches, **options))
    parts = Fraction(schedule.stages, depth) if same_model else Fraction(1)
    return under(costs, schedule, parts)


def under(costs: Costs, schedule: Schedule, parts: Fraction = Fraction(1)) -> Plan:
    """A plan of `schedule`, each of whose stages is one of `parts` parts of what `costs` are for."""
    for name in PER_STAGE:
        value = getattr(costs, name)
        if isinstance(value, Sequence) and len(value) != schedule.stages:
            option = "--" + name.removesuffix("_s").replace("_", "-")
            raise InputError(
                f"{option} has {len(value)} values, but {schedule.scheme} has {schedule.stages} stages: "
                f"give one for each stage, or a single one"
            )
    made = Plan(schedule, costs if parts == 1 else shared_out(costs, parts))
    if not made.makespan_s:
        raise InputError("the whole step takes 0 s, so there is nothing to draw or compare: give --forward a time")
    return made


def write(path: Path, words: str) -> None:
    """Write a file, or say in a line why not. What is there stays until its successor is whole."""
    coded = words.encode("utf-8", "replace")  # a name need not be UTF-8
    try:
        if _is_replaceable(path):
            _replace(path, coded)
        else:
            path.write_bytes(coded)
    except OSError as error:
        raise unwritable(path, error) from None


def _is_replaceable(path: Path) -> bool:
    """Not what is no plain file, such as a pipe or a link, nor what must not be written."""
    is_free = os.access(path, os.W_OK) and not path.is_symlink() if path.is_file() else not os.path.lexists(path)
    return is_free and os.access(path.parent, os.W_OK)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(*paths: Path | None) -> None:
    """Raises InputError now, not after all has been found out; what is in a file stays until then."""
    for path in filter(None, paths):
        is_new = not os.path.lexists(path)
        try:
            path.open("a").close()
        except OSError as error:
            raise unwritable(path, error) from None
        if is_new:
            path.unlink()
