"""Train a model. Under mpirun or srun every rank is a worker of a pipeline; alone, it is plain serial training."""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ..errors import InputError, RunFailed
from ..host import keep_freed_memory
from ..predict import weight_versions
from ..stopping import AGAIN, End, Signals, Stops, find_limit, save_seconds, share_limit
from ._devices import find_staging
from ._keys import listed
from ._ranks import end_all, ending_together, library_name, refuse_singletons, set_threads

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, Choice
    from ..config import Config
    from ..data import Corpus
    from ..predict.machine import Machine
    from ..prediction import Prediction
    from ..runlog import RunLog
    from ..runtime.grid import Node
    from ..runtime.staging import Staging
    from ..survival import Recovery
    from ..train import Begun, Job, Progress, Run

T = TypeVar("T")
HANG_S = 300.0  # that ranks may take to find out who lives, where watchdog_s says nothing; layers take time beside it

EXAMPLE = """\
  mpirun -n 4 chimera-mpi train gpt-tiny scheme=chimera depth=4 steps=60
  chimera-mpi train my.toml learning_rate=1e-3 log=runs/mine.h5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="PRESET|FILE.toml", help="gpt-tiny, gpt2-small, gpt2-paper, or a file of keys"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as depth=4")
    parser.add_argument_group("keys and their defaults", listed())


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


@contextmanager
def _before_the_first_step(world: Any) -> Iterator[None]:
    """Tell in a line that a rank has died before others can survive it, and end all."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
            raise
        end_all(world, 1, "chimera-mpi: a rank has died before the first step: start the job again")


def _train(world: Any, args: argparse.Namespace, signals: Signals, began_s: float) -> int:
    from ..runtime.agreement import agree
    from ..runtime.crew import why_not

    config = agree(world, lambda: _configuration(args))
    if not config.survive:
        return _carry_out(world, config, signals, began_s)
    agree(world, lambda: _refuse(why_not(library_name(), os.environ)))
    with _before_the_first_step(world):
        return _carry_out(world, config, signals, began_s)


def _carry_out(world: Any, config: Config, signals: Signals, began_s: float) -> int:
    from ..runtime.agreement import agree

    asked = _find_asked(world, config)
    if asked.resumed and asked.resumed.step == config.steps:
        if world.rank == 0:
            print(f"{asked.resumed.path} has all {config.steps} steps: raise steps= to go on")
        return 0
    facts = _facts(world, _settle(config, asked.node), asked)
    job = _fitted(world, asked)
    limit = agree(world, _on_rank_0(world, lambda: find_limit(config.time_limit, began_s, os.environ, _save_s(job))))
    stops = Stops(signals, share_limit(limit, world.bcast) if config.survive else limit)
    with ExitStack() as stack:
        desk = _Desk(asked, facts, stops, stack)
        if config.survive:
            _survive(world, job, asked, desk)
        run = desk.begin(world, job, asked.resumed)
        end = run.run()
        desk.close(end)
        run.close()
    if world.rank == 0:
        _tell_end(run, end)
    return end.code


def _survive(world: Any, job: Job, asked: _Asked, desk: _Desk) -> NoReturn:
    """Carry out a job that outlives ranks, and end this process. Collective."""
    from ..models import parameter_count
    from ..runtime.agreement import agree
    from ..runtime.crew import Crew
    from ..survival import Survival, check_survivable

    agree(world, lambda: check_survivable(job))
    limit_s = job.config.watchdog_s if isinstance(job.config.watchdog_s, float) else HANG_S
    crew = Crew(world, asked.node.patience, limit_s + save_seconds(parameter_count(job.task.model)))
    machine_bytes = world.bcast(asked.machine.memory_bytes if asked.machine else math.inf)
    room_bytes = partial(_room_bytes, asked, machine_bytes)
    device = asked.staging.device.type
    survival = Survival(crew, job, desk.begin, desk.note, asked.resumed, room_bytes, device)
    try:
        end = survival.until_the_end()
    except RunFailed as error:
        if crew.is_whole:
            raise
        end = End(str(error), 1)
    desk.close(end)
    if survival.speaks:
        try:
            _tell_end(survival.run, end)
        except InputError as error:  # of a summary; the end is what it is
            print(f"chimera-mpi: {error}", file=sys.stderr, flush=True)
    # All ranks are done with MPI, but where one has died, be it just now, MPI may never be through with its own end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)


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


def _refuse(why: str) -> None:
    if why:
        raise InputError(why)


def _room_bytes(asked: _Asked, machine_bytes: float) -> float:
    """What this rank may take beside what it has."""
    from ..runtime.device import free_bytes

    return min(machine_bytes, free_bytes(asked.staging.device, asked.node.ranks))


def _tell_end(run: Run | None, end: End) -> None:
    """What there is of the run, and why it ended early."""
    from .. import report
    from ..runlog import read_run

    log = run.log if run else None
    lines = ["", *report.summary(read_run(log.path)), f"log         {log.path}"] if log else []
    if run and run.saver and run.saver.newest:
        lines.append(f"checkpoint  {run.saver.newest}")
    lines += [f"profile     {words}" for words in (run.recorder.told if run and run.recorder else ())]
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
        _make(path.parent, "data")
        print(describe(prepare(path)), flush=True)


class _Desk:
    """What the first rank of a run does beside its part: it has the folder for checkpoints and the log to itself, and
    tells the user. Each rank has one, should it become the first."""

    def __init__(self, asked: _Asked, facts: dict[str, Any], stops: Stops, stack: ExitStack):
        """`stack` closes what is opened."""
        self.asked, self.facts, self.stops, self.stack = asked, facts, stops, stack
        self.log: RunLog | None = None
        self._path: Path | None = None  # of the log, which all know that were in a run
        self._has_folder = False
        self._tell = _Teller()

    def begin(self, comm: Any, job: Job, begun: Checkpoint | Begun | None, recovery: Recovery | None = None) -> Run:
        """A run over `comm`, which may go on after a `recovery`. Collective. Raises InputError on all ranks."""
        from ..prediction import predict
        from ..runtime.agreement import agree
        from ..train import Run

        asked, on_first = self.asked, partial(_on_rank_0, comm)
        prediction = agree(comm, on_first(lambda: predict(job, asked.staging.device.type, asked.machine)))
        if job.config.checkpoint:
            agree(comm, on_first(lambda: self._take_folder(job.config, anew=recovery is None)))
        if recovery is None:
            agree(comm, on_first(lambda: self._open_log(job, comm.size, prediction)))
        tell = self._tell if comm.rank == 0 else _tell_nobody
        profile = None if recovery else _own_profile(comm, job.config, self.log)
        run = Run(comm, job, asked.corpus, asked.validation, self.log, tell, asked.staging, begun, self.stops, profile)
        if recovery:
            self._path = next(filter(None, comm.allgather(self._path)), None)
            agree(comm, on_first(lambda: self.note(job, recovery, prediction)))
            run.log = self.log
        elif job.config.survive:
            self._path = comm.bcast(self.log.path if self.log else None)
        if comm.rank == 0:
            self._announce(run, prediction, recovery)
        return run

    def close(self, end: End) -> None:
        if self.log is not None:
            self.log.close(end.reason)
        self.stack.close()

    def _take_folder(self, config: Config, anew: bool) -> None:
        """Have the folder for checkpoints to oneself, without what others have left unfinished in it."""
        from ..checkpoint import clear, taken
        from ..runlog import locks_wanted

        assert config.checkpoint is not None
        if self._has_folder:
            clear(config.checkpoint)
            return
        if anew:
            _refuse_folder(config.checkpoint, self.asked.choice)
        self.stack.enter_context(taken(config.checkpoint, locks_wanted(os.environ)))
        self._has_folder = True

    def _open_log(self, job: Job, ranks: int, prediction: Prediction | None) -> None:
        """A new one; or that of the run that is resumed. Raises InputError."""
        from ..runlog import RunLog, locks_wanted

        config, resumed = job.config, self.asked.resumed
        if config.log is None:
            return
        attributes, locking = self._attributes(job, ranks, prediction), locks_wanted(os.environ)
        path = None if config.log == "auto" else Path(config.log)
        before = resumed.facts["log"] if resumed and config.log == config.resume == "auto" else None
        there = Path(before) if before else path
        if there and config.resume and there.exists():
            _check_log(there, job, self.asked.validation.sha256, resumed.step if resumed else 0)
            log = RunLog.append(there, attributes, ranks, locking=locking)
        else:
            create = partial(RunLog.create, attributes=attributes, workers=ranks, locking=locking)
            log = create(path) if path else _created_anywhere(create, config.scheme)
        self._keep(log, prediction)

    def note(self, job: Job, recovery: Recovery, prediction: Prediction | None = None) -> None:
        """Begin another session of the log, also where its writer died, and give the last one the rows that it lacks.
        Raises InputError."""
        from ..runlog import RunLog, locks_wanted

        ranks = job.width * job.config.depth
        attributes = {**self._attributes(job, ranks, prediction), **recovery.attributes}
        if self.log is not None:
            self.log.go_on(recovery.told, attributes, ranks, recovery.rows)
            _plan(self.log, prediction)
        elif self._path is not None:
            locking = locks_wanted(os.environ)
            log = RunLog.append(self._path, attributes, ranks, locking=locking, before=recovery.rows)
            self._keep(log, prediction)

    def _keep(self, log: RunLog, prediction: Prediction | None) -> None:
        self.log = self.stack.enter_context(log)
        _plan(log, prediction)

    def _attributes(self, job: Job, ranks: int, prediction: Prediction | None) -> dict[str, Any]:
        from ..models import parameter_count

        return {
            "config": job.config.model_dump_json(),
            "width": job.width,
            "ranks": ranks,
            "mini_batch_size": sum(job.sizes),
            "parameters": parameter_count(job.task.model),
            "partition": json.dumps([cut.start for cut in job.cuts[1:]]),
            "stage_costs": json.dumps(job.costs),
            "unigram_entropy_nats": self.asked.validation.unigram_entropy_nats,
            "validation_sha256": self.asked.validation.sha256,
            **self.facts,
            **(prediction.attributes if prediction else {}),
        }

    def _announce(self, run: Run, prediction: Prediction | None, recovery: Recovery | None) -> None:
        opening = _opening(run, self.facts["threads"], self.asked.devices)
        if recovery is None:
            spare = f"spare ranks that stand by: {spares}" if (spares := run.job.config.spares) else None
            lines = [*_resuming(self.asked, run.job.config), opening, *filter(None, [spare, prediction])]
        else:
            lines = [f"\n{recovery}", opening]
        print(*lines, sep="\n", flush=True)


def _plan(log: RunLog, prediction: Prediction | None) -> None:
    if prediction and prediction.spans:
        log.plan(prediction.spans)


def _refuse_folder(folder: Path, choice: Choice) -> None:
    """Raises InputError if another run's checkpoints are in it."""
    from ..checkpoint import found_in

    there, begins = found_in(folder), choice.checkpoint
    if there and (begins is None or begins.path.parent.resolve() != folder.resolve()):
        raise InputError(
            f"{there[0]} is there already, and this run does not go on from it: "
            "set resume=auto, or take another checkpoint="
        )


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


def _make(folder: Path, key: str) -> None:
    """The folder where what the key names is, by default. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder.absolute()} cannot be made ({error.strerror}): ask for the right to write there, or give {key}="
        ) from error


def _created_anywhere(create: Callable[[Path], RunLog], scheme: str) -> RunLog:
    """A log of a name that no other run has, though it may have begun in the same second."""
    folder, name = Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{scheme}"
    _make(folder, "log")
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
        "held_before_bytes": json.dumps(world.allgather(held_bytes(device))[: world.size - asked.job.config.spares]),
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
