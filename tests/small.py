"""A training of seconds, to be started in its folder: `chimera-mpi train small.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chimera_mpi.data import prepare

TEXT = Path(__file__).parents[1] / "data" / "pipelines.txt"
KEYS = {
    "layers": 6, "hidden": 16, "heads": 2, "positions": 16, "sequence_length": 16, "mini_batch_size": 12, "steps": 6,
    "warmup_steps": 2, "eval_every": 3, "spans_every": 2, "data": "corpus.h5",
}  # fmt: skip


def write(folder: Path, **keys: Any) -> Path:
    """Put the configuration, with these `keys` or values, and its token file into a folder, and return that."""
    prepare(folder / "corpus.h5", [TEXT])
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {**KEYS, **keys}.items()]
    (folder / "small.toml").write_text("".join(lines))
    return folder
