"""What a plan is asked for, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from ..config import Config, load
from ..errors import InputError
from ..predict.footprint import Buffers
from ..predict.machine import Machine, read_machine
from ..predict.planner import SYNCHRONOUS, Space, Tell
from ..predict.work import Work
from ..schedule import ALIASES, SCHEMES, STREAMS, nearest
from ._terminal import bar


@dataclass(frozen=True)
class Asked:
    """A model, a machine, and what may be chosen. `name` is that of the model's configuration, `machine_name` what the
    machine was asked for by."""

    name: str
    machine_name: str
    config: Config
    work: Work
    machine: Machine
    mini_batch: int
    space: Space


CHOSEN = (
    "micro_batches",
    "pairs",
    "concat",
    "chunks",
    "waves",
    "partition",
    "accumulate",
    "order",
)  # keys that are results


TWICE = {  # keys, and the options that would say the same or bound it
    "scheme": "schemes",
    "depth": "depths",
    "mini_batch_size": "mini_batch",
    "micro_batch_size": "max_micro_batch_size",
}


def asked_of(args: argparse.Namespace) -> Asked:
    from ..work import work_of

    machine = read_machine(args.machine)
    wanted = wanted_of(
        args.source, args.overrides, Limits(**{of.name: getattr(args, of.name) for of in fields(Limits)})
    )
    work = work_of(wanted.config, machine.device)
    return Asked(Path(args.source).stem, args.machine, wanted.config, work, machine, wanted.mini_batch, wanted.space)


@dataclass(frozen=True)
class Limits:
    """Options of plan; by default none is given."""

    mini_batch: int | None = None
    schemes: Sequence[str] | None = None
    asynchronous: bool = False
    depths: Sequence[int] | None = None
    max_micro_batch_size: int | None = None


class Wanted(NamedTuple):
    """What may be chosen for a model, whatever the machine."""

    config: Config
    mini_batch: int
    space: Space


def wanted_of(source: str, overrides: Sequence[str], limits: Limits = Limits()) -> Wanted:
    """Raises InputError if these are not what plan takes."""
    given = {override.partition("=")[0] for override in overrides}
    for key in CHOSEN:
        if key in given:
            raise InputError(f"{key} is what plan chooses: leave it out, or give it to train")
    for key, option in TWICE.items():
        if key in given and getattr(limits, option) is not None:
            raise InputError(f"{key}= is given, and --{option.replace('_', '-')} as well: leave one of them out")
    config = load(source, overrides)
    mini_batch = limits.mini_batch or config.mini_batch_size
    if mini_batch is None:
        raise InputError(
            f"{source} has no mini_batch_size: give --mini-batch or mini_batch_size=, the samples of a step"
        )
    space = Space(
        schemes=_schemes(limits, config, given),
        depths=(config.depth,) if "depth" in given else tuple(limits.depths or ()) or None,
        largest_micro_batch=limits.max_micro_batch_size,
        micro_batch_size=config.micro_batch_size if "micro_batch_size" in given else None,
        sharded=config.optimizer_sharding == "replicas",
        fp16=config.precision == "fp16",
        buffers=Buffers(config.receives_ahead, config.bucket_bytes),
    )
    if "recompute" in given:
        space = replace(space, recompute=(config.recompute,))
    if "sync" in given:
        space = replace(space, syncs=(config.sync,))
    return Wanted(config, mini_batch, space)


def _schemes(limits: Limits, config: Config, given: set[str]) -> tuple[str, ...]:
    """Those that are named, in the order of the registry. An asynchronous one needs --asynchronous as well."""
    named = [config.scheme] if "scheme" in given else limits.schemes or [*SYNCHRONOUS, *(STREAMS * limits.asynchronous)]
    for name in named:
        if ALIASES.get(name, name) not in SCHEMES:
            raise InputError(f"unknown scheme '{name}': {nearest(name, [*SCHEMES, *ALIASES])}")
    schemes = {ALIASES.get(name, name) for name in named}
    streams = [scheme for scheme in STREAMS if scheme in schemes]
    if streams and not limits.asynchronous:
        raise InputError(
            f"{streams[0]} is asynchronous, it trains on gradients of older weights: allow --asynchronous, or take "
            "another scheme"
        )
    return tuple(scheme for scheme in SCHEMES if scheme in schemes)


@contextmanager
def progress_bar() -> Iterator[Tell]:
    """On a terminal, a bar that runs while choices are settled."""
    with bar("laying out choices", "TimeElapsedColumn") as tell_bar:

        def tell(settled: int, of: int, best_s: float) -> None:
            best = f", best {best_s:.3g} s" if best_s < float("inf") else ""
            tell_bar(f"{settled:,} of {of:,} choices{best}", settled, of)

        yield tell
