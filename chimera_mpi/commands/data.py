"""Make the token file that `train` reads."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = """\
  chimera-mpi data prepare -o data/corpus.h5                 the texts that every Python carries
  chimera-mpi data prepare -o data/mine.h5 notes.txt docs/   texts of your own"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare")
    prepare = actions.add_parser("prepare", help="turn texts into one HDF5 file of byte tokens")
    prepare.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="must not exist")
    prepare.add_argument("sources", type=Path, nargs="*", help="texts or folders; without any, Python's own")
    prepare.add_argument("--validation-fraction", type=float, default=0.1, metavar="SHARE")
    prepare.add_argument("--seed", type=int, default=0, help="of the split into training and validation documents")


def run(args: argparse.Namespace) -> int:
    from ..data import prepare

    args.output.parent.mkdir(parents=True, exist_ok=True)
    made = prepare(args.output, args.sources, args.seed, args.validation_fraction)
    print(describe(made))
    return 0


def describe(made) -> str:
    """What `prepare` made, in a line."""
    return (
        f"{made.path}: {made.documents} documents, {made.train_tokens:,} tokens to train on and "
        f"{made.validation_tokens:,} to validate with, unigram entropy {made.unigram_entropy_nats:.4f} nats"
    )
