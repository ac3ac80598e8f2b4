"""What is to be trained, as the command line asks for it: found, checked, and fitted to the ranks that are there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import InputError
from ..host import keep_freed_memory
from ._devices import find_staging
from ._ranks import library_name, set_threads
from ._terminal import say

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, Choice
    from ..config import Config
    from ..data import Corpus
    from ..predict.machine import Machine
    from ..runtime.grid import Node
    from ..runtime.staging import Staging
    from ..train import Job

T = TypeVar("T")

POLL_S = 0.5  # between looks at whether another run has made the default data


class Asked(NamedTuple):
    """What is to be trained, on what, from where on, and what this rank has for it; all files have been looked at."""

    job: Job
    corpus: Corpus
    validation: Corpus
    choice: Choice
    machine: Machine | None  # on rank 0
    node: Node
    staging: Staging
    devices: str  # of all ranks
    sharing: int  # so many of them the one of this rank

    @property
    def resumed(self) -> Checkpoint | None:
        return self.choice.checkpoint


def find_asked(world: Any, config: Config) -> Asked:
    """Touches nothing but the default data. Collective. Raises InputError on all ranks."""
    from ..config import DEFAULT_DATA
    from ..data import open_corpus
    from ..predict.machine import read_machine
    from ..runtime.agreement import agree
    from ..runtime.grid import find_node
    from ..saving import find
    from ..tasks import check_vocabulary
    from ..train import check_resumed, plan_job, steps_done

    agree(world, lambda: _check_profile(config, world.rank))
    choice = find(world, config.resume, config.checkpoint)
    done = agree(world, lambda: steps_done(choice.checkpoint, config))
    job = agree(world, lambda: plan_job(config, world.size, done))
    first = partial(on_rank_0, world)
    machine = agree(world, first(lambda: read_machine(config.machine) if config.machine else None))
    node = find_node(world)
    staging, devices, sharing = find_staging(world, node.rank, config)
    data = config.data or DEFAULT_DATA
    agree(world, first(lambda: None if config.data else _prepare_default(data)))
    least = {"train": 1, "validation": 1 if config.eval_every else 0}
    corpus, validation = agree(
        world, lambda: [open_corpus(data, part, config.sequence_length, samples) for part, samples in least.items()]
    )
    agree(world, lambda: check_vocabulary(job.task, corpus))
    if choice.checkpoint:
        agree(world, first(partial(check_resumed, choice.checkpoint, job, corpus)))
    return Asked(job, corpus, validation, choice, machine, node, staging, devices, sharing)


def settle(config: Config, node: Node) -> int:
    """Give this process its threads, of which there are so many, and its way with memory."""
    threads = set_threads(config.threads, node.threads)
    if config.keep_freed_memory:
        keep_freed_memory()
    return threads


def fitted(world: Any, asked: Asked) -> Job:
    """The job, once a user's loss has been tried, cut as layers are measured where that is asked for. Collective."""
    from ..runtime.agreement import agree
    from ..train import measured, reader, try_loss

    read = reader(asked.job, asked.corpus)
    agree(world, on_rank_0(world, lambda: try_loss(asked.job, read)))
    return measured(world, asked.node.patience, asked.job, read, asked.staging, asked.resumed)


def facts_of(world: Any, threads: int, asked: Asked) -> dict[str, Any]:
    """Where and with what this run runs, and what each rank has in memory before its part of the model is built.
    Collective."""
    from importlib.metadata import version

    from mpi4py import MPI

    from ..runtime.device import held_bytes

    packages = ("chimera-mpi", "torch", "mpi4py", "numpy", "h5py")
    slurm = {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID") if name in os.environ}
    device = asked.staging.device
    return {
        "hosts": json.dumps(world.allgather(MPI.Get_processor_name())),
        "mpi_library": library_name(),
        "versions": json.dumps({package: version(package) for package in packages}),
        "slurm": json.dumps(slurm),
        "threads": threads,
        "devices": asked.devices,
        "held_before_bytes": json.dumps(world.allgather(held_bytes(device))[: world.size - asked.job.config.spares]),
        "memory_measured": "process" if device.type == "cpu" else "device",
    }


def _check_profile(config: Config, rank: int) -> None:
    """Raises InputError if a profile of another run is where this rank's would go."""
    from ..runtime.recorder import place_of

    if config.profile is None or config.resume or config.log in (None, "auto"):
        return
    if os.path.exists(path := place_of(Path(config.log), rank)):
        raise InputError(f"{path} exists and a profile is never overwritten: give another log=FILE, or move it away")


def _prepare_default(path: Path) -> None:
    """Without a data file of the user's, train on the texts that every Python carries. Of runs that start together one
    prepares them, and the others wait for it."""
    from ..data import BeingPrepared, prepare
    from .data import describe

    waits_for = ""
    while not path.exists():
        make_folder(path.parent, "data")
        try:
            say(describe(prepare(path)))
        except BeingPrepared as error:
            if error.holder != waits_for:
                say(f"{path} is being prepared by {error.holder}, for whose end this run waits")
            waits_for = error.holder
            time.sleep(POLL_S)
        except InputError:
            if not path.exists():  # another was faster
                raise


def make_folder(folder: Path, key: str) -> None:
    """The folder where what the key names is, by default. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder.absolute()} cannot be made ({error.strerror}): ask for the right to write there, or give {key}="
        ) from error


def on_rank_0(world: Any, act: Callable[[], T]) -> Callable[[], T | None]:
    return lambda: act() if world.rank == 0 else None
