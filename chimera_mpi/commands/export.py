"""Write the model of a checkpoint as a folder that `from_pretrained` of Hugging Face's transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = """\
  chimera-mpi export runs/checkpoints -o exported                  the newest of a folder of checkpoints
  chimera-mpi export runs/checkpoints/step-00000080 -o exported    one of them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="one, or a folder of them")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="for transformers; must not exist"
    )


def run(args: argparse.Namespace) -> int:
    from ..trained import export_model, open_trained

    trained = open_trained(args.checkpoint)
    made = export_model(trained, args.output)
    print(f"{made.folder}: {', '.join(made.files)}, of {trained.checkpoint.path}")
    return 0
