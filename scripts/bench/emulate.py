"""Ours beside torch.distributed.pipelining over gloo, on stages that sleep: same times, messages, depth, micro-batches.

The two take turns on this machine, a job of each in every round; in a job its schedules take turns. Ours sum gradients
over the replicas of each stage, which bidirectional schedules have two of, and both update their weights.

  python scripts/bench/emulate.py --depth 4 8 --micro-batches D 2D --message-kb 64 4096 --rounds 5
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from _bench import emulate, run_peer, save, show, spread

from chimera_mpi.schedule import SCHEMES, STREAMS

TWINS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
OURS = [*(scheme for scheme in SCHEMES if scheme not in STREAMS), "chimera:pairs=2", "chimera_zb:pairs=2"]


class Cell(NamedTuple):
    depth: int
    micro_batches: int
    message_bytes: int


Times = dict[Cell, dict[str, list[float]]]  # all measured steps of a schedule, seconds


def main() -> None:
    args = arguments()
    ours: Times = defaultdict(lambda: defaultdict(list))
    theirs: Times = defaultdict(lambda: defaultdict(list))
    plans: dict[Cell, dict[str, float]] = defaultdict(dict)
    refused: list[str] = []
    for _ in range(args.rounds):
        for depth in args.depth:
            micro_batches = [in_depths(words, depth) for words in args.micro_batches]
            sizes = [1024 * kb for kb in args.message_kb]
            measure_ours(args, depth, micro_batches, sizes, ours, plans)
            refused += measure_theirs(args, depth, micro_batches, sizes, theirs)
    summary = [summed_up(cell, ours[cell], theirs[cell], plans[cell]) for cell in ours]
    print("Ours include the all-reduce of gradients over a stage's replicas; both update their weights.")
    for reason in dict.fromkeys(refused):
        print(f"left out: {reason}")
    save(
        args.json, {"cells": summary, "refused": list(dict.fromkeys(refused)), "arguments": {**vars(args), "json": ""}}
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, nargs="+", default=[4], metavar="D")
    parser.add_argument(
        "--micro-batches", nargs="+", default=["D"], metavar="N", help="numbers, D, 2D, ...; default: D"
    )
    parser.add_argument("--message-kb", type=int, nargs="+", default=[64], metavar="KB", help="in KiB; default: 64")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each side; default: 5")
    parser.add_argument("--repeat", type=int, default=1, help="measured steps of each in a job; default: 1")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--input-ms", type=float, default=20.0)
    parser.add_argument("--weight-ms", type=float, default=20.0)
    parser.add_argument("--schemes", nargs="+", default=OURS, help="of ours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def in_depths(words: str, depth: int) -> int:
    """`2D` at depth 4 is 8."""
    return int(words) if words.isdigit() else int(words.removesuffix("D") or 1) * depth


def measure_ours(
    args: argparse.Namespace, depth: int, micro_batches: list[int], sizes: list[int], times: Times, plans: dict
) -> None:
    found = emulate(
        depth,
        *("--schemes", *args.schemes, "--micro-batches", *micro_batches, "--message-bytes", *sizes),
        *("--forward-ms", args.forward_ms, "--backward-ms", args.input_ms + args.weight_ms),
        *("--input-ms", args.input_ms, "--repeat", args.repeat),
    )
    for row in found["rows"]:
        cell = Cell(depth, row["micro_batches"], row["message_bytes"])
        times[cell][row["scheme"]] += row["steps_s"]
        plans[cell][row["scheme"]] = row["plan_s"]


def measure_theirs(
    args: argparse.Namespace, depth: int, micro_batches: list[int], sizes: list[int], times: Times
) -> list[str]:
    """Returns why schedules were left out."""
    found = run_peer(
        depth,
        micro_batches=micro_batches,
        message_bytes=sizes,
        forward_ms=args.forward_ms,
        input_ms=args.input_ms,
        weight_ms=args.weight_ms,
        repeat=args.repeat,
    )
    for row in found["rows"]:
        times[Cell(depth, row["micro_batches"], row["message_bytes"])][row["name"]] += row["steps_s"]
    return [f"torch, D = {depth}: {reason}" for reason in found["refused"]]


def summed_up(
    cell: Cell, ours: dict[str, list[float]], theirs: dict[str, list[float]], plans: dict[str, float]
) -> dict[str, Any]:
    """Print the tables of a cell; its figures, for JSON."""
    title = f"D = {cell.depth}, N = {cell.micro_batches}, messages of {cell.message_bytes:,} bytes"
    rows = []
    for scheme, steps_s in sorted(ours.items(), key=lambda item: median(item[1])):
        twin = theirs.get(TWINS.get(scheme, ""))
        pair = f"{median(steps_s) / median(twin):.3f}" if twin else ""
        rows.append((scheme, *figures(steps_s), median(steps_s) / plans[scheme], pair))
    show(f"ours: {title}", ["scheme", "step ms", "spread %", "/ plan", "/ torch's"], rows)
    peers = sorted(theirs.items(), key=lambda item: median(item[1]))
    show(
        f"torch.distributed.pipelining: {title}",
        ["schedule", "step ms", "spread %"],
        [(n, *figures(s)) for n, s in peers],
    )
    best = min(ours, key=lambda scheme: median(ours[scheme]))
    print(f"best of ours, {best}, over best of theirs, {peers[0][0]}: {median(ours[best]) / median(peers[0][1]):.3f}\n")
    return {
        **cell._asdict(),
        "ours": {name: of_side(steps_s) for name, steps_s in ours.items()},
        "plans_s": plans,
        "torch": {name: of_side(steps_s) for name, steps_s in theirs.items()},
        "pairs": {s: median(ours[s]) / median(theirs[t]) for s, t in TWINS.items() if s in ours and t in theirs},
        "best": {"ours": best, "torch": peers[0][0], "ratio": median(ours[best]) / median(peers[0][1])},
    }


def figures(steps_s: list[float]) -> tuple[str, str]:
    return f"{1e3 * median(steps_s):.1f}", f"{100 * spread(steps_s):.1f}"


def of_side(steps_s: list[float]) -> dict[str, Any]:
    return {"median_s": median(steps_s), "spread": spread(steps_s), "steps_s": steps_s}


if __name__ == "__main__":
    main()
