"""Make the token file that `train` reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import unwritable
from ._terminal import bar

if TYPE_CHECKING:
    from ..data import Prepared

EXAMPLE = """\
  chimera-mpi data prepare -o data/corpus.h5                 the texts that every Python carries
  chimera-mpi data prepare -o data/mine.h5 notes.txt docs/   texts of your own
  chimera-mpi data prepare -o data/web.h5 'crawl/**/*.jsonl.gz' --field text --tokenizer bpe:16000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare")
    prepare = actions.add_parser("prepare", help="turn texts into one HDF5 file of tokens")
    prepare.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="must not exist")
    prepare.add_argument(
        "sources",
        type=Path,
        nargs="*",
        help="texts, JSON lines (.jsonl), either gzipped or not, folders or globs; without any, Python's own",
    )
    prepare.add_argument(
        "--tokenizer",
        default="byte",
        metavar="byte|bpe:SIZE|tokenizer.json",
        help="a byte a token; byte-level BPE of so many tokens, learnt from the texts; or one that is given",
    )
    prepare.add_argument("--end-token", metavar="TOKEN", help="of a given tokenizer: what closes a document")
    prepare.add_argument("--field", default="text", metavar="NAME", help="of JSON lines: where the text is")
    prepare.add_argument(
        "--errors",
        default="replace",
        metavar="replace|skip|strict",
        help="what is not UTF-8 becomes U+FFFD, keeps its document out, or is refused",
    )
    prepare.add_argument("--validation-fraction", type=float, default=0.1, metavar="SHARE")
    prepare.add_argument("--seed", type=int, default=0, help="of the split into training and validation documents")


def run(args: argparse.Namespace) -> int:
    from ..data import Rules, prepare

    rules = Rules(
        args.seed,
        args.validation_fraction,
        tokenizer=args.tokenizer,
        end_name=args.end_token,
        field=args.field,
        errors=args.errors,
    )
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(args.output, error) from error
    with bar("texts", "DownloadColumn", "TimeRemainingColumn") as tell:
        made = prepare(args.output, args.sources, rules, tell)
    print(describe(made))
    return 0


def describe(made: Prepared) -> str:
    """What `prepare` made, in a line; and in another what it left out or changed."""
    told = (
        f"{made.path}: {made.documents} documents, {made.train_tokens:,} tokens to train on and "
        f"{made.validation_tokens:,} to validate with, vocabulary {made.vocabulary}, "
        f"unigram entropy {made.unigram_entropy_nats:.4f} nats"
    )
    left_out = [f"{count:,} {reason}" for reason, count in made.left_out.items() if count]
    remarks = [f"left out: {', '.join(left_out)}"] if left_out else []
    if made.broken:
        remarks.append(f"{made.broken:,} places that were not UTF-8 replaced by U+FFFD")
    return "\n".join([told, "; ".join(remarks)] if remarks else [told])
