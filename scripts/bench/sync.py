"""What the sum of gradients costs a step beyond its compute: its exposed seconds, by the kind of sync.

    python scripts/bench/sync.py --megabytes 11 200 --rounds 5
    sudo python scripts/bench/sync.py --netns          # over a link of 1 Gbit/s and 1 ms

Chimera on two ranks of one thread each, whose stages both ranks hold. Turns of a few steps alternate with the
reference, the same step in which each rank keeps its gradients to itself; the exposed seconds are the difference.
A sharded optimizer updates half as much as the reference, so its may be below zero.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _contenders import (
    BIG_BLOCKS,
    Group,
    Refused,
    Shape,
    Turn,
    alternating,
    around,
    group,
    over_mpi,
    record,
    spread,
    tell,
)
from _link import linked
from rich.console import Console
from rich.table import Table

# Of float32 gradients in all, by the hidden size of 8 layers with a vocabulary of 1024.
HIDDEN = {11: 160, 42: 320, 200: 704}
REFERENCE = "no sync"
# Two namespaces are two nodes: no memory is shared.
APART = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}


@dataclass
class Row:
    """What a kind of sync costs, in seconds a step, a number for each round: the median of its turn's steps."""

    link: str
    megabytes: int
    sync: str
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    allreduce_wait_s: list[float] = field(default_factory=list)  # of the rank that waits longer
    update_s: list[float] = field(default_factory=list)
    refused: str | None = None


def main() -> None:
    args = arguments()
    kinds = kinds_of(args.bucket_bytes)
    rows: list[Row] = []
    with places(args) as groups:
        for link, ranks in groups.items():
            for megabytes in args.megabytes:
                rows += contest(ranks, kinds, link, megabytes, args)
    Console(width=120).print(results(rows))
    record(args, rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", choices=sorted(HIDDEN), default=[11, 200])
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2, help="in a micro-batch, of 128 tokens")
    parser.add_argument("--bucket-bytes", type=int, nargs="*", default=[], help="all-reduces of at most so many bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in a turn, after one that does not count")
    parser.add_argument("--netns", action="store_true", help="also between two network namespaces; needs root")
    parser.add_argument("--gigabits", type=float, default=1.0, help="per second, of the link between them")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way, of the link between them")
    parser.add_argument(
        "--mallopt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let glibc keep freed memory, for all alike",
    )
    parser.add_argument("--json", type=Path, default="runs/bench-sync.json", metavar="FILE")
    return parser.parse_args()


def kinds_of(bucket_bytes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Kinds of sync by name, as options of a turn."""
    kinds: dict[str, dict[str, Any]] = {sync: {"sync": sync} for sync in ("lazy", "eager", "eager_opt")}
    kinds["eager, thread"] = {"sync": "eager", "progress_thread": True}
    kinds["sharded"] = {"sync": "eager_opt", "sharded": True}
    for limit in bucket_bytes:
        kinds[f"eager, {limit} B"] = {"sync": "eager", "bucket_bytes": limit}
        kinds[f"sharded, {limit} B"] = {"sync": "eager_opt", "sharded": True, "bucket_bytes": limit}
    return kinds


@contextmanager
def places(args: argparse.Namespace) -> Iterator[dict[str, Group]]:
    """The ranks, by what is between them."""
    environment = BIG_BLOCKS if args.mallopt else {}
    with ExitStack() as stack:
        groups = {"shared memory": stack.enter_context(group("ours", over_mpi(), **environment))}
        if args.netns:
            names = stack.enter_context(linked(args.gigabits * 1e9, args.delay_ms * 1e-3))
            command = over_mpi(*(["ip", "netns", "exec", name] for name in names))
            name = f"{args.gigabits:g} Gbit/s, {args.delay_ms:g} ms"
            groups[name] = stack.enter_context(group("ours", command, **environment, **APART))
        yield groups


def contest(
    ranks: Group, kinds: dict[str, dict[str, Any]], link: str, megabytes: int, args: argparse.Namespace
) -> list[Row]:
    """All rounds over one link, every other one backwards."""
    shape = Shape(hidden=HIDDEN[megabytes], head_size=32, vocabulary=1024, samples=args.samples)
    options = {**kinds, REFERENCE: {"alone": True}}
    rows = {name: Row(link, megabytes, name) for name in options}
    for number in range(args.rounds):
        able = [name for name in kinds if rows[name].refused is None]
        tell(f"{link}, {megabytes} MB, round {number + 1} of {args.rounds}")
        turns = alternating(able[::-1] if number % 2 else able, REFERENCE, every=1)
        seconds = [
            seconds_of(ranks, rows[name], Turn("chimera", args.micro_batches, shape, args.steps, options=options[name]))
            for name in turns
        ]
        for at, (name, step_s) in enumerate(zip(turns, seconds, strict=True)):
            if step_s is not None and name != REFERENCE:
                rows[name].exposed_s.append(step_s - around(turns, seconds, REFERENCE, at))
    return list(rows.values())


def seconds_of(ranks: Group, row: Row, turn: Turn) -> float | None:
    """A step's seconds in one turn; None where it is refused."""
    try:
        told = ranks.take(turn)
    except Refused as why:
        row.refused = str(why)
        return None
    step_s = max(statistics.median(rank.seconds) for rank in told)
    row.step_s.append(step_s)
    row.allreduce_wait_s.append(max(statistics.median(rank.numbers["allreduce_wait_s"]) for rank in told))
    row.update_s.append(max(statistics.median(rank.numbers["update_s"]) for rank in told))
    tell(f"  {row.sync:24} {step_s * 1e3:9.2f} ms")
    return step_s


def results(rows: Sequence[Row]) -> Table:
    table = Table("link", "MB", "sync", "step ms", "exposed ms", "wait ms", "update ms", title="median (least to most)")
    for row in rows:
        columns = (row.step_s, row.exposed_s, row.allreduce_wait_s, row.update_s)
        cells = [spread([1e3 * s for s in column]).show(1) if column else "-" for column in columns]
        table.add_row(row.link, str(row.megabytes), row.sync, *([row.refused, "", "", ""] if row.refused else cells))
    return table


if __name__ == "__main__":
    main()
