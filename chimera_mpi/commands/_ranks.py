"""The MPI job around a command: all ranks start together and end together."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RunFailed, complain
from ._terminal import ReaderLeft, printing, say

if TYPE_CHECKING:
    from ..config import Config
    from ..runtime.calibration import Layout
    from ..runtime.grid import Grid

# What launchers tell a process of the number of its like, and what to try when MPI sees only one.
SRUN = "srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI (srun --mpi=list shows both)"
LAUNCHERS = {  # the nearest first: an mpiexec inside of a job script counts its own
    "OMPI_COMM_WORLD_SIZE": "the mpiexec of the MPI library that mpi4py uses, or MPI4PY_MPIABI=openmpi",
    "PMI_SIZE": f"the mpiexec of the MPI library that mpi4py uses, MPI4PY_MPIABI=mpich, or {SRUN}",
    "SLURM_STEP_NUM_TASKS": SRUN,
    "SLURM_NTASKS": f"{SRUN}; srun -n 1 for one rank",
}


def refuse_singletons(size: int, environment: Mapping[str, str]) -> None:
    """Raise InputError if MPI has not brought together all the processes that a launcher started.

    Then each believes to be alone, or to belong to a smaller job than it does.
    """
    for name, remedy in LAUNCHERS.items():
        tasks = environment.get(name, "")
        if tasks.isdigit():
            # A job may start fewer ranks than it has tasks; a launcher's own number is that of its ranks.
            few = size == 1 if name == "SLURM_NTASKS" else size < int(tasks)
            if few and int(tasks) > 1:
                raise InputError(
                    f"{name}={tasks}, but MPI sees {size} rank{'s' * (size > 1)}: "
                    f"launcher and MPI library do not match; try {remedy}"
                )
            return


def library_name() -> str:
    """The MPI library in a line; Open MPI's own has a NUL at its end, which HDF5 takes in no text."""
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip(" \t\0")


@contextmanager
def ending_together(world: Any) -> Iterator[None]:
    """An exception on one rank prints its traceback and ends all ranks; InputError passes, all ranks have it, and so
    does a RunFailed that all have. One of a rank alone is one line, and none where nobody reads on."""
    try:
        with printing():
            yield
    except InputError:
        raise
    except ReaderLeft:
        if world.size > 1:
            end_all(world, 1, "")
        raise
    except RunFailed as error:
        if not error.on_all and world.size > 1:
            end_all(world, 1, f"chimera-mpi: {error}")
        raise
    except KeyboardInterrupt:
        end_all(world, 130, "interrupted" if world.rank == 0 else "")
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        end_all(world, 1, "\n".join(f"rank {world.rank}: {line}" for line in text.splitlines()))
        raise


def end_all(world: Any, code: int, text: str) -> None:
    """End all ranks, once `text` is told."""
    say("", end="")
    if text:
        complain(text)
    time.sleep(0.3)  # launchers drop what a rank wrote just before it aborts
    world.Abort(code)


@contextmanager
def laid_out(grid: Grid, config: Config) -> Iterator[tuple[Layout, bool]]:
    """The ranks of a grid on their nodes, and whether a thread moves their messages, as in a training. Collective.

    At the end all of it is closed, the grid too; not after an exception, when other ranks may not come to that.
    """
    from ..runtime.agreement import agree
    from ..runtime.calibration import Layout
    from ..runtime.progress import ProgressThread
    from ..train import wants_thread

    layout = Layout(grid)
    thread = agree(grid.world, lambda: ProgressThread(grid.world) if wants_thread(grid, config) else None)
    with thread or nullcontext():
        yield layout, thread is not None
    layout.close()
    if thread:
        thread.close()
    grid.close()


def set_threads(asked: int | None, share: int) -> int:
    """Give each rank the threads asked for, or its share of the cores unless the environment says otherwise."""
    import torch

    threads = asked or (None if "OMP_NUM_THREADS" in os.environ else share)
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()
