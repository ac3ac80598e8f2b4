"""Train a model. Under mpirun or srun every rank is a worker of a pipeline; alone, it is plain serial training."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError
from ..host import keep_freed_memory
from ..predict import weight_versions
from ._devices import find_staging
from ._ranks import ending_together, refuse_singletons, set_threads

if TYPE_CHECKING:
    from ..prediction import Prediction
    from ..runlog import RunLog
    from ..train import Job, Progress

T = TypeVar("T")

EXAMPLE = """\
  mpirun -n 4 chimera-mpi train gpt-tiny scheme=chimera depth=4 steps=60
  chimera-mpi train my.toml learning_rate=1e-3 log=runs/mine.h5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="PRESET|FILE.toml", help="gpt-tiny, gpt2-small, gpt2-paper, or a file of keys"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as depth=4; see below")


def run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    refuse_singletons(world.size, os.environ)
    with ending_together(world):
        try:
            return _train(world, args)
        except InputError:
            if world.rank == 0:
                raise
            return 2


def _train(world: Any, args: argparse.Namespace) -> int:
    from .. import report
    from ..config import DEFAULT_DATA, load
    from ..data import open_corpus
    from ..prediction import predict
    from ..runlog import read_run
    from ..runtime.agreement import agree
    from ..runtime.grid import find_node
    from ..tasks import check_vocabulary
    from ..train import Run, measured, plan_job, reader, try_loss

    config = agree(world, lambda: load(args.source, args.overrides))
    job = agree(world, lambda: plan_job(config, world.size))
    node = find_node(world)
    staging, devices = find_staging(world, node.rank, config)
    data = config.data or DEFAULT_DATA
    on_rank_0 = partial(_on_rank_0, world)
    agree(world, on_rank_0(lambda: None if config.data else _prepare_default(data)))
    corpus, validation = agree(
        world, lambda: [open_corpus(data, part, config.sequence_length) for part in ("train", "validation")]
    )
    agree(world, lambda: check_vocabulary(job.task, corpus))
    threads = set_threads(config.threads, node.threads)
    if config.keep_freed_memory:
        keep_freed_memory()
    held = _held(world, staging.device)
    agree(world, on_rank_0(lambda: try_loss(job, reader(job, corpus))))
    job = measured(world, node.patience, job, reader(job, corpus), staging)
    prediction = agree(world, on_rank_0(lambda: predict(job, staging.device.type)))
    facts = {**_facts(world, threads), **held, "devices": devices}
    log = agree(world, on_rank_0(lambda: _create_log(job, validation, world.size, facts, prediction)))
    run = Run(world, job, corpus, validation, log, _Teller() if world.rank == 0 else _tell_nobody, staging)
    if world.rank == 0:
        told = f"{run.part.patience}, {run.pipeline.worker.gradients.where}"
        told += ", a thread moves messages" if run.pipeline.progress else ""
        print(_opening(job, world.size, threads, devices, told), *filter(None, [prediction]), sep="\n", flush=True)
    with log or nullcontext():
        if log and prediction and prediction.spans:
            log.plan(prediction.spans)
        run.run()
    run.close()
    if log is not None:
        print("\n".join(["", *report.summary(read_run(log.path)), f"log         {log.path}"]), flush=True)
    return 0


def _on_rank_0(world: Any, act: Callable[[], T]) -> Callable[[], T | None]:
    return lambda: act() if world.rank == 0 else None


def _tell_nobody(progress: Progress) -> None:
    pass


def _prepare_default(path: Path) -> None:
    """Without a data file of the user's, train on the texts that every Python carries."""
    from ..data import prepare
    from .data import describe

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(describe(prepare(path)), flush=True)


def _create_log(
    job: Job, corpus: Any, ranks: int, facts: dict[str, Any], prediction: Prediction | None
) -> RunLog | None:
    from ..models import parameter_count
    from ..runlog import RunLog, locks_wanted

    if job.config.log is None:
        return None
    attributes = {
        "config": job.config.model_dump_json(),
        "width": job.width,
        "ranks": ranks,
        "mini_batch_size": sum(job.sizes),
        "parameters": parameter_count(job.task.model),
        "partition": json.dumps([cut.start for cut in job.cuts[1:]]),
        "stage_costs": json.dumps(job.costs),
        "unigram_entropy_nats": corpus.unigram_entropy_nats,
        "validation_sha256": corpus.sha256,
        **facts,
        **(prediction.attributes if prediction else {}),
    }
    create = partial(RunLog.create, attributes=attributes, workers=ranks, locking=locks_wanted(os.environ))
    return _created_anywhere(create, job.config.scheme) if job.config.log == "auto" else create(Path(job.config.log))


def _created_anywhere(create: Callable[[Path], RunLog], scheme: str) -> RunLog:
    """A log of a name that no other run has, though it may have begun in the same second."""
    folder, name = Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{scheme}"
    folder.mkdir(exist_ok=True)
    for path in (folder / f"{name}{suffix}.h5" for suffix in ("", *(f"-{n}" for n in range(2, 100)))):
        try:
            return create(path)
        except InputError:
            if not path.exists():
                raise
    raise InputError(f"{folder} has 99 logs of {name}: name one by log=")


def _held(world: Any, device: Any) -> dict[str, Any]:
    """What each rank has in memory before its part of the model is built, and of what. Collective."""
    from ..runtime.device import held_bytes

    return {
        "held_before_bytes": json.dumps(world.allgather(held_bytes(device))),
        "memory_measured": "process" if device.type == "cpu" else "device",
    }


def _facts(world: Any, threads: int) -> dict[str, Any]:
    """Where and with what this run runs. Collective."""
    from importlib.metadata import version

    from mpi4py import MPI

    packages = ("chimera-mpi", "torch", "mpi4py", "numpy", "h5py")
    slurm = {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID") if name in os.environ}
    return {
        "hosts": json.dumps(world.allgather(MPI.Get_processor_name())),
        "mpi_library": MPI.Get_library_version().splitlines()[0].strip(),
        "versions": json.dumps({package: version(package) for package in packages}),
        "slurm": json.dumps(slurm),
        "threads": threads,
    }


def _opening(job: Job, ranks: int, threads: int, devices: str, patience: str) -> str:
    config = job.config
    return (
        f"{config.model} with {config.scheme}: {ranks} ranks = depth {config.depth} x width {job.width}, "
        f"{threads} thread{'s' * (threads > 1)} each, {devices}, {patience}; "
        f"{sum(job.sizes)} samples a step in {len(job.sizes)} micro-batches\n"
        f"stages of {', '.join(str(len(cut)) for cut in job.cuts)} layers; "
        f"the busiest worker has {job.imbalance:.2f} times the mean {job.balanced}{_staleness(job)}"
    )


def _staleness(job: Job) -> str:
    """What a user of an asynchronous scheme must know."""
    if job.plan.schedule.updates == 1:
        return ""
    versions = max(weight_versions(job.plan.schedule))
    return (
        f"\n{job.config.scheme} is asynchronous: gradients are those of weights up to {versions - 1} updates old, "
        f"so it does not equal serial training; it flushes every {job.plan.steps} steps"
    )


class _Teller:
    """Lines while the run goes on: on a terminal one that is written over, else one every few seconds."""

    def __init__(self, every_s: float = 2.0):
        self.every_s, self.seconds = every_s, [0.0]
        self.told_s = time.monotonic()
        self.on_terminal = sys.stdout.isatty()

    def __call__(self, progress: Progress) -> None:
        self.seconds = [*self.seconds[-19:], progress.seconds]
        last = progress.step + 1 == progress.steps
        line = self._line(progress)
        if self.on_terminal and progress.validation_loss is None and not last:
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif last or progress.validation_loss is not None or time.monotonic() - self.told_s > self.every_s:
            print(f"\r\x1b[K{line}" if self.on_terminal else line, flush=True)
            self.told_s = time.monotonic()

    def _line(self, progress: Progress) -> str:
        left = round((progress.steps - progress.step - 1) * sum(self.seconds) / len(self.seconds))
        validation = "" if progress.validation_loss is None else f"  validation {progress.validation_loss:.4f}"
        return (
            f"step {progress.step + 1}/{progress.steps}  loss {progress.loss:.4f}  grad norm {progress.grad_norm:.3f}  "
            f"{progress.samples_per_s:.1f} samples/s  {left // 60}:{left % 60:02} left{validation}"
        )
