"""Train a model. Under mpirun or srun every rank is a worker of a pipeline; alone, it is plain serial training."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import InputError, RunFailed
from ..host import keep_freed_memory
from ..predict import weight_versions
from ..stopping import AGAIN, Signals, Stops, find_limit, save_seconds
from ._devices import find_staging
from ._ranks import ending_together, library_name, refuse_singletons, set_threads

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, Choice
    from ..config import Config
    from ..data import Corpus
    from ..predict.machine import Machine
    from ..prediction import Prediction
    from ..runlog import RunLog
    from ..runtime.grid import Node
    from ..runtime.staging import Staging
    from ..stopping import End
    from ..train import Job, Progress, Run

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
    began_s = time.monotonic()
    if not faulthandler.is_enabled():
        faulthandler.enable()
    with Signals() as signals:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        refuse_singletons(world.size, os.environ)
        with ending_together(world):
            try:
                code = _train(world, args, signals, began_s)
                if code == AGAIN:
                    signals.hush()
                return code
            except InputError:
                if world.rank == 0:
                    raise
                return 2
            except RunFailed:
                if world.rank == 0:
                    raise
                return 1


def _train(world: Any, args: argparse.Namespace, signals: Signals, began_s: float) -> int:
    from ..prediction import predict
    from ..runtime.agreement import agree
    from ..train import Run

    config = agree(world, lambda: _configuration(args))
    asked = _find_asked(world, config)
    if asked.resumed and asked.resumed.step == config.steps:
        if world.rank == 0:
            print(f"{asked.resumed.path} has all {config.steps} steps: raise steps= to go on")
        return 0
    facts = _facts(world, _settle(config, asked.node), asked)
    job = _fitted(world, asked)
    on_rank_0 = partial(_on_rank_0, world)
    limit = agree(world, on_rank_0(lambda: find_limit(config.time_limit, began_s, os.environ, _save_s(job))))
    prediction = agree(world, on_rank_0(lambda: predict(job, asked.staging.device.type, asked.machine)))
    with ExitStack() as stack:
        if config.checkpoint:
            agree(world, on_rank_0(lambda: stack.enter_context(_own_folder(config, asked.choice))))
        log = agree(world, on_rank_0(lambda: _open_log(job, asked, world.size, facts, prediction)))
        profile = _own_profile(world, config, log)
        tell = _Teller() if world.rank == 0 else _tell_nobody
        stops = Stops(signals, limit)
        run = Run(world, job, asked.corpus, asked.validation, log, tell, asked.staging, asked.resumed, stops, profile)
        if world.rank == 0:
            opening = _opening(run, facts["threads"], asked.devices)
            print(*_resuming(asked, config), opening, *filter(None, [prediction]), sep="\n", flush=True)
        with log or nullcontext():
            if log and prediction and prediction.spans:
                log.plan(prediction.spans)
            end = run.run()
            if log is not None:
                log.close(end.reason)
        run.close()
    if world.rank == 0:
        _tell_end(run, end)
    return end.code


def _configuration(args: argparse.Namespace) -> Config:
    from ..config import check_together, load

    config = load(args.source, args.overrides)
    check_together(config)
    return config


class _Asked(NamedTuple):
    """What is to be trained, on what, from where on, and what this rank has for it; all files have been looked at."""

    job: Job
    corpus: Corpus
    validation: Corpus
    choice: Choice
    machine: Machine | None  # on rank 0
    node: Node
    staging: Staging
    devices: str  # of all ranks

    @property
    def resumed(self) -> Checkpoint | None:
        return self.choice.checkpoint


def _find_asked(world: Any, config: Config) -> _Asked:
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
    on_rank_0 = partial(_on_rank_0, world)
    machine = agree(world, on_rank_0(lambda: read_machine(config.machine) if config.machine else None))
    node = find_node(world)
    staging, devices = find_staging(world, node.rank, config)
    data = config.data or DEFAULT_DATA
    agree(world, on_rank_0(lambda: None if config.data else _prepare_default(data)))
    corpus, validation = agree(
        world, lambda: [open_corpus(data, part, config.sequence_length) for part in ("train", "validation")]
    )
    agree(world, lambda: check_vocabulary(job.task, corpus))
    if choice.checkpoint:
        agree(world, on_rank_0(partial(check_resumed, choice.checkpoint, job, corpus)))
    return _Asked(job, corpus, validation, choice, machine, node, staging, devices)


def _settle(config: Config, node: Node) -> int:
    """Give this process its threads, of which there are so many, and its way with memory."""
    threads = set_threads(config.threads, node.threads)
    if config.keep_freed_memory:
        keep_freed_memory()
    return threads


def _fitted(world: Any, asked: _Asked) -> Job:
    """The job, once a user's loss has been tried, cut as layers are measured where that is asked for. Collective."""
    from ..runtime.agreement import agree
    from ..train import measured, reader, try_loss

    read = reader(asked.job, asked.corpus)
    agree(world, _on_rank_0(world, lambda: try_loss(asked.job, read)))
    return measured(world, asked.node.patience, asked.job, read, asked.staging, asked.resumed)


def _tell_end(run: Run, end: End) -> None:
    """What there is of the run, and why it ended early."""
    from .. import report
    from ..runlog import read_run

    lines = ["", *report.summary(read_run(run.log.path)), f"log         {run.log.path}"] if run.log else []
    if run.saver and run.saver.newest:
        lines.append(f"checkpoint  {run.saver.newest}")
    lines += [f"profile     {words}" for words in (run.recorder.told if run.recorder else ())]
    if lines:
        print("\n".join(lines), flush=True)
    if end.code:
        print(f"chimera-mpi: {end.reason}", file=sys.stderr, flush=True)


def _save_s(job: Job) -> float:
    """Seconds that a first checkpoint may take."""
    from ..models import parameter_count

    return save_seconds(parameter_count(job.task.model)) if job.config.checkpoint else 0.0


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


def _own_folder(config: Config, choice: Choice) -> AbstractContextManager[None]:
    """The folder for checkpoints, for this run alone. Raises InputError if another's are in it."""
    from ..checkpoint import found_in, taken
    from ..runlog import locks_wanted

    assert config.checkpoint is not None
    there, begins = found_in(config.checkpoint), choice.checkpoint
    if there and (begins is None or begins.path.parent.resolve() != config.checkpoint.resolve()):
        raise InputError(
            f"{there[0]} is there already, and this run does not go on from it: "
            "set resume=auto, or take another checkpoint="
        )
    return taken(config.checkpoint, locks_wanted(os.environ))


def _open_log(
    job: Job, asked: _Asked, ranks: int, facts: dict[str, Any], prediction: Prediction | None
) -> RunLog | None:
    """A new one; or that of the run that is resumed. Raises InputError."""
    from ..models import parameter_count
    from ..runlog import RunLog, locks_wanted

    config, resumed = job.config, asked.resumed
    if config.log is None:
        return None
    attributes = {
        "config": job.config.model_dump_json(),
        "width": job.width,
        "ranks": ranks,
        "mini_batch_size": sum(job.sizes),
        "parameters": parameter_count(job.task.model),
        "partition": json.dumps([cut.start for cut in job.cuts[1:]]),
        "stage_costs": json.dumps(job.costs),
        "unigram_entropy_nats": asked.validation.unigram_entropy_nats,
        "validation_sha256": asked.validation.sha256,
        **facts,
        **(prediction.attributes if prediction else {}),
    }
    locking = locks_wanted(os.environ)
    path = None if config.log == "auto" else Path(config.log)
    before = resumed.facts["log"] if resumed and config.log == config.resume == "auto" else None
    there = Path(before) if before else path
    if there and config.resume and there.exists():
        _check_log(there, job, asked.validation.sha256, resumed.step if resumed else 0)
        return RunLog.append(there, attributes, ranks, locking=locking)
    create = partial(RunLog.create, attributes=attributes, workers=ranks, locking=locking)
    return create(path) if path else _created_anywhere(create, config.scheme)


def _check_log(path: Path, job: Job, validation_sha256: str, done: int) -> None:
    """Raises InputError if the log is of another run, or its steps after the first `done` would now be others."""
    from ..runlog import read_run
    from ..train import TRAINING, check_same, shape_of

    run = read_run(path)
    there = json.loads(run.sessions[-1].attributes["config"]) if run.sessions else run.config
    here = job.config.model_dump(mode="json")
    check_same(str(path), {**there, **run.attributes}, {**shape_of(job), "validation_sha256": validation_sha256})
    last = int(run.steps["step"][-1]) if len(run.steps["step"]) else -1
    for key in TRAINING:
        if last >= done and there[key] != here[key]:
            raise InputError(
                f"{path} has steps up to {last} with {key}={there[key]}, of which those from {done} on would be done "
                f"anew with {here[key]}: take another log="
            )


def _check_profile(config: Config, rank: int) -> None:
    """Raises InputError if a profile of another run is where this rank's would go."""
    from ..runtime.recorder import place_of

    if config.profile is None or config.resume or config.log in (None, "auto"):
        return
    if (path := place_of(Path(config.log), rank)).exists():
        raise InputError(f"{path} exists and a profile is never overwritten: take another log=, or move it away")


def _own_profile(world: Any, config: Config, log: RunLog | None) -> Path | None:
    """Where this rank's goes, if one is wanted and no earlier session of the run has written it. Collective."""
    from ..runtime.recorder import place_of

    if config.profile is None:
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every rank prints that it begins and ends
    path = place_of(world.bcast(log.path if log else None), world.rank)
    if not any(world.allgather(path.exists())):
        return path
    if world.rank == 0:
        print(f"profile={config.profile}: {path} or one of another rank is there already, and stays", flush=True)
    return None


def _resuming(asked: _Asked, config: Config) -> list[str]:
    """What rank 0 says of the checkpoint that it goes on from."""
    choice = asked.choice
    if choice.checkpoint is None:
        return []
    if choice.checkpoint.weights_only:
        return [*choice.passed_over, _beginning(choice.checkpoint, asked.corpus)]
    there, here = choice.checkpoint.facts["config"], config.model_dump(mode="json")
    keys = (key for key in here if key in there and key not in ("log", "resume") and not key.startswith("checkpoint"))
    changed = [f"{key} {there[key]} -> {here[key]}" for key in keys if there[key] != here[key]]
    told = f"; changed: {', '.join(changed)}" if changed else ""
    return [*choice.passed_over, f"resumed from {choice.checkpoint.path}, {choice.checkpoint.step} steps done{told}"]


def _beginning(checkpoint: Checkpoint, corpus: Corpus) -> str:
    """Of a run that has the weights of one that was trained elsewhere, perhaps on other tokens."""
    there, here = checkpoint.facts["tokenizer"], corpus.tokenizer and corpus.tokenizer.facts
    told = f"begins with the weights of {checkpoint.path}"
    if there and here and there["sha256"] != here["sha256"]:
        told += f"; its tokens are not those of {corpus.path}: prepare the data by --tokenizer {checkpoint.path}"
    return told


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


def _facts(world: Any, threads: int, asked: _Asked) -> dict[str, Any]:
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
        "held_before_bytes": json.dumps(world.allgather(held_bytes(device))),
        "memory_measured": "process" if device.type == "cpu" else "device",
    }


def _opening(run: Run, threads: int, devices: str) -> str:
    """What is trained by what."""
    job, ranks = run.job, run.grid.world.size
    config = job.config
    patience = f"{run.part.patience}, {run.pipeline.worker.gradients.where}"
    patience += ", a thread moves messages" if run.pipeline.progress else ""
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
        if progress.remark:
            print(f"\r\x1b[K{progress.remark}" if self.on_terminal else progress.remark, flush=True)
        if self.on_terminal and progress.validation_loss is None and not last:
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif last or progress.validation_loss is not None or time.monotonic() - self.told_s > self.every_s:
            print(f"\r\x1b[K{line}" if self.on_terminal else line, flush=True)
            self.told_s = time.monotonic()

    def _line(self, progress: Progress) -> str:
        left = round((progress.steps - progress.step - 1) * sum(self.seconds) / len(self.seconds))
        validation = "" if progress.validation_loss is None else f"  validation {progress.validation_loss:.4f}"
        skipped = f"  {progress.skipped} skipped" if progress.skipped else ""
        return (
            f"step {progress.step + 1}/{progress.steps}  loss {progress.loss:.4f}  grad norm {progress.grad_norm:.3f}  "
            f"{progress.samples_per_s:.1f} samples/s  {left // 60}:{left % 60:02} left{validation}{skipped}"
        )
