"""Continue a text by a trained GPT, on one process and without MPI. The text is printed as it comes into being."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..trained import Trained

EXAMPLE = """\
  chimera-mpi generate runs/checkpoints --prompt "def " --tokens 200 --temperature 0.8
  echo "A pipeline is" | chimera-mpi generate runs/gpt2-pretrained --prompt - --temperature 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="one, or a folder of which the newest")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what is continued; -: what stands on stdin")
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="at most so many; a document may end before"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws: the same text again for the same seed")
    parser.add_argument(
        "--data", type=Path, metavar="CORPUS.h5", help="take its tokenizer, where the checkpoint has none"
    )


def run(args: argparse.Namespace) -> int:
    from ..trained import Sampling, continued, open_trained

    trained = _with_tokenizer(open_trained(args.checkpoint), args.data)
    tokenizer = trained.tokenizer
    assert tokenizer is not None
    if args.tokens < 1:
        raise InputError(f"--tokens={args.tokens} is below 1: try --tokens 200")
    text = _prompt(args.prompt)
    before = [int(number) for ids in tokenizer.encode([text]) for number in ids] or [tokenizer.end_of_document]
    sampling = Sampling(args.temperature, args.top_k, args.seed)
    ids = continued(trained, before, args.tokens, sampling)
    last = text
    print(text, end="", flush=True)
    for piece in tokenizer.decoded(before, ids):
        print(piece, end="", flush=True)
        last = piece or last
    if not last.endswith("\n"):
        print()
    return 0


def _prompt(asked: str) -> str:
    content = sys.stdin.buffer.read() if asked == "-" else os.fsencode(asked)
    return content.decode("utf-8", "replace")


def _with_tokenizer(trained: Trained, data: Path | None) -> Trained:
    """The checkpoint's own, which is that of its data, or the data's. Raises InputError."""
    if data is None and trained.tokenizer is None:
        raise InputError(
            f"{trained.checkpoint.path} has no tokenizer: give --data, a token file that was made by the right one"
        )
    if data is None:
        return trained
    from ..data import open_corpus

    theirs = open_corpus(data, sequence_length=1).tokenizer
    if trained.tokenizer and theirs and trained.tokenizer.facts["sha256"] != theirs.facts["sha256"]:
        raise InputError(
            f"{data} has another tokenizer than {trained.checkpoint.path} was trained by: leave out --data"
        )
    return replace(trained, tokenizer=theirs)
