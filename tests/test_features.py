"""What can be asked of which scheme: the README's table, found by trying.

`mpiexec -n 4 python tests/test_features.py` writes it into the README.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from chimera_mpi.config import Config
from chimera_mpi.data import Corpus
from chimera_mpi.errors import InputError
from chimera_mpi.predict import weight_versions
from chimera_mpi.schedule import SCHEMES, build
from chimera_mpi.train import Run, plan_job

README = Path(__file__).parents[1] / "README.md"
BETWEEN = re.compile(r"(?<=<!-- features -->\n).*?(?=<!-- /features -->)", re.DOTALL)
VOCABULARY, SEQUENCE = 11, 4
SMALL = {
    "layers": 6, "hidden": 8, "heads": 2, "vocabulary": VOCABULARY, "positions": SEQUENCE, "sequence_length": SEQUENCE,
    "tied": False, "clip": None, "micro_batches": 2, "micro_batch_size": 1, "steps": 2, "warmup_steps": 0,
    "eval_mini_batches": 1,
}  # fmt: skip

# What is asked for; of `depth` ranks, or of as many as are named.
SHAPES = {"N < D": {"depth": 4, "micro_batches": 2}, "odd D": {"depth": 3, "micro_batches": 3}}
EXTRAS = {  # at depth 2, where they go together
    "N not a multiple of D": {"micro_batches": 3},
    "W > 1": {"ranks": 4},
    "recompute": {"recompute": "layer"},
    "tied weights": {"tied": True},
    "clip": {"clip": 1.0},
    "sharded optimizer": {"optimizer_sharding": "replicas", "ranks": 4},
    "fp16": {"precision": "fp16"},
    "accumulate": {"accumulate": 2},
}
DEPTH = 4
READ_OFF = {
    "split backward": lambda schedule: "yes" if schedule.split else "no",
    "pipelines": lambda schedule: str(len(schedule.pipes)),
    f"weight versions, D = {DEPTH}": lambda schedule: str(max(weight_versions(schedule))),
}


def trains(comm, scheme, depth=2, ranks=None, **asked):
    """Whether two steps on the first ranks can be done, or are refused. Any other error is one."""
    config = Config(scheme=scheme, depth=depth, **{**SMALL, **asked})
    some = comm.Split(comm.rank >= (ranks or depth))
    done = _trains(some, config) if comm.rank < (ranks or depth) else None
    some.Free()
    return comm.bcast(done)


def _trains(comm, config):
    corpus = Corpus(Path("made"), "train", SEQUENCE, VOCABULARY, np.arange(200, dtype=np.uint16) % VOCABULARY, 0.0, "")
    told = []
    try:
        run = Run(comm, plan_job(config, comm.size), corpus, corpus, tell=told.append)
    except InputError:
        return False
    run.run()
    run.pipeline.check_replicas()
    run.close()
    assert comm.rank or [math.isfinite(progress.loss) for progress in told] == [True, True]
    return True


def found(comm):
    """Of each scheme, what is in its row of the table, by column."""
    return {scheme: {**tried(comm, scheme), **read_off(build(scheme, DEPTH, 2 * DEPTH))} for scheme in SCHEMES}


def tried(comm, scheme):
    """What can be had at once is not tried one by one."""
    at_once = trains(comm, scheme, **{key: value for asked in EXTRAS.values() for key, value in asked.items()})
    can = {column: trains(comm, scheme, **asked) for column, asked in SHAPES.items()}
    can.update({column: at_once or trains(comm, scheme, **asked) for column, asked in EXTRAS.items()})
    return {column: "yes" if it_can else "**no**" for column, it_can in can.items()}


def read_off(schedule):
    return {column: read(schedule) for column, read in READ_OFF.items()}


def written(table):
    """`found` in Markdown."""
    columns = ["scheme", *SHAPES, *EXTRAS, *READ_OFF]
    rows = [columns, ["---"] * len(columns)]
    rows += [[f"`{scheme}`", *(cells[column] for column in columns[1:])] for scheme, cells in table.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def read(markdown):
    """The cells of a table by (row, column)."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    return {(row[0], column): cell for row in rows for column, cell in zip(header, row, strict=True)}


@pytest.mark.mpi(4)
def test_the_readme_says_what_each_scheme_can_do(comm):
    right = written(found(comm))
    there, wanted = read(BETWEEN.search(README.read_text(encoding="utf-8")).group()), read(right)
    wrong = [key for key in {**there, **wanted} if there.get(key) != wanted.get(key)]
    assert not wrong, f"in the README, {wrong} should be {[wanted.get(key) for key in wrong]}; the table:\n{right}"


if __name__ == "__main__":
    from mpi4py import MPI

    table = written(found(MPI.COMM_WORLD))
    if MPI.COMM_WORLD.rank == 0:
        text = README.read_text(encoding="utf-8")
        README.write_text(BETWEEN.sub(table, text), encoding="utf-8")
