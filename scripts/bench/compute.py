"""Real compute on two cores: samples/s of our schemes and of torch's, as shares of what two processes reach alone.

    python scripts/bench/compute.py --micro-batches 2 4 8 --rounds 5 --steps 8

Two ranks of one thread each train one GPT. A step is N micro-batches for the two together: forward, backward, sync
of the gradients and optimizer; N/2 a rank for data parallelism, and for the ceiling: two processes that train
whole models of their own by a plain loop, with the same optimizer. Turns of a few steps alternate; each is compared
with the ceiling's turns just before and after it. What is compared trains the same: the losses after the last step
are in the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

from _contenders import (
    BIG_BLOCKS,
    Group,
    Refused,
    Shape,
    Spread,
    Turn,
    alternating,
    around,
    by_themselves,
    group,
    over_mpi,
    record,
    spread,
    tell,
)
from rich.console import Console
from rich.table import Table

OURS = (
    "chimera",
    "chimera_zb",
    "1f1b",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "zb_v",
    "zb_h1",
    "dualpipe_v",
    "hanayo",
    "depth1",
)
TORCHS = ("1f1b", "gpipe", "interleaved", "interleaved_zb", "zb_v", "dualpipe_v", "ddp")
CONTENDERS = [
    name
    for pair in zip_longest((f"ours/{name}" for name in OURS), (f"torch/{name}" for name in TORCHS))
    for name in pair
    if name
]
TWO_THREADS, CEILING = "alone/two-threads", "alone/ceiling"


@dataclass
class Row:
    """What one contender reached with N micro-batches, a number for each round."""

    contender: str
    micro_batches: int
    samples_per_s: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)  # of the ceiling
    loss: float | None = None  # in the last step
    refused: str | None = None


def main() -> None:
    args = arguments()
    shape = Shape(args.layers, args.hidden, args.head_size, args.sequence, args.vocabulary, args.samples)
    with ExitStack() as stack:
        groups = start({name.split("/")[0] for name in args.contenders} | {"alone"}, args.mallopt, stack)
        rows: list[Row] = []
        for micro_batches in args.micro_batches:
            rows += contest(groups, args.contenders, micro_batches, shape, args)
    tables = [results(rows), pairings(rows)]
    Console(width=120).print(*(table for table in tables if table.row_count))
    record(args, rows, shape=asdict(shape))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=even, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="in a turn, after one that does not count")
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS, TWO_THREADS], metavar="FAMILY/NAME")
    parser.add_argument("--ceiling-every", type=int, default=3, help="contenders between two turns of the ceiling")
    parser.add_argument("--cuts", choices=["stages", "workers"], default="stages", help="what the partition makes even")
    parser.add_argument(
        "--order", choices=["drawn", "costs"], default="drawn", help="of our ops: drawn, or the best for the FLOPs"
    )
    parser.add_argument(
        "--mallopt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let glibc keep freed memory, for all alike",
    )
    parser.add_argument("--json", type=Path, default="runs/bench-compute.json", metavar="FILE")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    unknown = set(args.contenders) - {*CONTENDERS, TWO_THREADS}
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join([*CONTENDERS, TWO_THREADS])}")
    return args


def even(text: str) -> int:
    if int(text) < 2 or int(text) % 2:
        raise argparse.ArgumentTypeError(f"{text} micro-batches are not two ranks' equal shares: give an even number")
    return int(text)


def start(families: set[str], big_blocks: bool, stack: ExitStack) -> dict[str, Group]:
    commands = {family: over_mpi() if family == "ours" else by_themselves(family) for family in sorted(families)}
    environment = BIG_BLOCKS if big_blocks else {}
    return {family: stack.enter_context(group(family, command, **environment)) for family, command in commands.items()}


def contest(
    groups: dict[str, Group], contenders: Sequence[str], micro_batches: int, shape: Shape, args: argparse.Namespace
) -> list[Row]:
    """All rounds with N micro-batches, every other one backwards."""
    rows = {name: Row(name, micro_batches) for name in (*contenders, CEILING)}
    for number in range(args.rounds):
        able = [name for name in contenders if rows[name].refused is None]
        tell(f"N={micro_batches}, round {number + 1} of {args.rounds}")
        turns = alternating(able[::-1] if number % 2 else able, CEILING, args.ceiling_every)
        rates = [rate_of(groups, rows[name], shape, args) for name in turns]
        for at, (name, rate) in enumerate(zip(turns, rates, strict=True)):
            if rate is not None and name != CEILING:
                rows[name].share.append(rate / around(turns, rates, CEILING, at))
    return list(rows.values())


def rate_of(groups: dict[str, Group], row: Row, shape: Shape, args: argparse.Namespace) -> float | None:
    """Samples/s of one turn; None where the contender refuses."""
    family, name = row.contender.split("/")
    options = {"threads": 2} if row.contender == TWO_THREADS else {}
    turn = Turn(name, row.micro_batches, shape, args.steps, cuts=args.cuts, order=args.order, options=options)
    try:
        told = groups[family].take(turn, ranks=1 if options else 2)
    except Refused as why:
        row.refused = str(why)
        return None
    spent = [sum(rank.seconds) for rank in told]
    # Two processes that know nothing of each other do half of the samples each, in times of their own.
    rate = sum(turn.samples / 2 / s for s in spent) if row.contender == CEILING else turn.samples / max(spent)
    row.samples_per_s.append(rate)
    row.loss = sum(rank.numbers["loss"][-1] for rank in told)
    tell(f"  {row.contender:22} {rate:8.2f} samples/s, loss {row.loss:.4f}")
    return rate


def results(rows: Sequence[Row]) -> Table:
    table = Table("contender", "N", "samples/s", "share of the ceiling", "loss", title="median (least to most)")
    for row in rows:
        if row.refused:
            table.add_row(row.contender, str(row.micro_batches), "-", row.refused, "")
        else:
            share = spread(row.share).show(3) if row.share else "1"
            loss = f"{row.loss:.4f}"
            table.add_row(row.contender, str(row.micro_batches), spread(row.samples_per_s).show(2), share, loss)
    return table


def pairings(rows: Sequence[Row]) -> Table:
    """Our rates over torch's, round by round: the same scheme, and both kinds of Chimera."""
    done = {(row.contender, row.micro_batches): row for row in rows if row.share}
    mine = ("chimera", "chimera_zb", "depth1")
    table = Table("peer", "N", *(f"{name} / peer" for name in mine), "same scheme / peer", title="ours over torch's")
    for (name, n), peer in done.items():
        if name.startswith("torch/"):
            same = [f"ours/{name.removeprefix('torch/')}"]
            cells = [ratio(done.get((our, n)), peer) for our in [*(f"ours/{m}" for m in mine), *same]]
            table.add_row(name, str(n), *(cell.show(2) if cell else "-" for cell in cells))
    return table


def ratio(ours: Row | None, peer: Row) -> Spread | None:
    """Of shares of the ceiling: what slows a whole round down is in neither."""
    return spread([a / b for a, b in zip(ours.share, peer.share, strict=True)]) if ours else None


if __name__ == "__main__":
    main()
