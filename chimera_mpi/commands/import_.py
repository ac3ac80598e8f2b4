"""Make a checkpoint of a GPT-2 or BERT as Hugging Face keeps it, for `train resume=` and `generate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trained import Imported

EXAMPLE = """\
  chimera-mpi import gpt2/ -o runs/gpt2-pretrained
  mpirun -n 4 chimera-mpi train gpt2-small scheme=chimera depth=4 resume=runs/gpt2-pretrained data=data/mine.h5"""

PRESETS = {"gpt": "gpt2-small", "bert": "bert-base"}  # with learning rates for models of such kinds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="FOLDER|FILE.safetensors",
        help="with a config.json in the folder, and a tokenizer.json where there is one",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="CHECKPOINT", help="a folder that must not exist"
    )


def run(args: argparse.Namespace) -> int:
    from ..trained import import_model

    print(describe(import_model(args.source, args.output)))
    return 0


def describe(made: Imported) -> str:
    """What was made, and how it is trained on."""
    config = made.checkpoint.facts["config"]
    keys = " ".join(f"{key}={str(value).lower()}" for key, value in config.items() if key not in ("model", "dropout"))
    tokens = f"a tokenizer of {made.tokenizer.vocabulary} tokens" if made.tokenizer else "no tokenizer"
    return (
        f"{made.checkpoint.path}: the weights of a {config['model']} of {config['layers']} layers, {tokens}\n"
        f"to train it: chimera-mpi train {PRESETS[config['model']]} {keys} "
        f"sequence_length={config['positions']} resume={made.checkpoint.path}"
    )
