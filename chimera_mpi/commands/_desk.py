"""The desk of a run: its log, its folder for checkpoints, and what is said of it while it goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RunFailed, refusing
from ..predict import weight_versions
from ._job import Asked, make_folder, on_rank_0
from ._terminal import say

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, Choice
    from ..config import Config
    from ..data import Corpus
    from ..prediction import Prediction
    from ..runlog import RunLog
    from ..stopping import End, Stops
    from ..survival import Recovery
    from ..train import Begun, Job, Progress, Run


class Desk:
    """What the first rank of a run does beside its part: it has the folder for checkpoints and the log to itself, and
    tells the user. Each rank has one, should it become the first."""

    def __init__(self, asked: Asked, facts: dict[str, Any], stops: Stops, stack: ExitStack):
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

        asked, on_first = self.asked, partial(on_rank_0, comm)
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
        with suppress(RunFailed) if end.code == 1 else nullcontext():  # the first failure is the one to tell
            if self.log is not None:
                self.log.close(end.reason)
        self.stack.close()

    def _take_folder(self, config: Config, anew: bool) -> None:
        """Have the folder for checkpoints to oneself, without what others have left unfinished in it."""
        from ..checkpoint import clear, taken
        from ..lock import Lock
        from ..runlog import locks_wanted

        assert config.checkpoint is not None
        if self._has_folder:
            clear(config.checkpoint)
            return
        if anew:
            _refuse_folder(config.checkpoint, config.resume, self.asked.choice)
        self.stack.enter_context(taken(config.checkpoint, partial(Lock, wanted=locks_wanted(os.environ))))
        if anew:  # another job may have had it until now
            _refuse_folder(config.checkpoint, config.resume, self.asked.choice)
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
        if there and config.resume and os.path.exists(there):
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
        say("\n".join(map(str, lines)))


def _plan(log: RunLog, prediction: Prediction | None) -> None:
    if prediction and prediction.spans:
        log.plan(prediction.spans)


def _refuse_folder(folder: Path, resume: str | None, choice: Choice) -> None:
    """Raises InputError if another run's checkpoints are in it, or some that were not there when this run chose."""
    from ..checkpoint import found_in

    with refusing(f"checkpoint={folder} cannot be read"):
        there, begins = found_in(folder), choice.checkpoint
    goes_on = resume == "auto" or (begins is not None and begins.path.parent.resolve() == folder.resolve())
    if there and not goes_on:
        raise InputError(
            f"{there[0]} is there already, and this run does not go on from it: "
            "set resume=auto, or give another checkpoint=FOLDER"
        )
    if new := [path for path in there if path.name not in {other.name for other in choice.among}]:
        raise InputError(f"{new[0]} was written after this job had looked what to go on from: start it again")


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
                f"anew with {here[key]}: give another log=FILE"
            )


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
        say(f"profile={config.profile}: {path} or one of another rank is there already, and stays")
    return None


def _created_anywhere(create: Callable[[Path], RunLog], scheme: str) -> RunLog:
    """A log of a name that no other run has, though it may have begun in the same second."""
    folder, name = Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{scheme}"
    make_folder(folder, "log")
    for path in (folder / f"{name}{suffix}.h5" for suffix in ("", *(f"-{n}" for n in range(2, 100)))):
        try:
            return create(path)
        except InputError:
            if not path.exists():
                raise
    raise InputError(f"{folder} has 99 logs of {name}: name one by log=")


def _resuming(asked: Asked, config: Config) -> list[str]:
    """What rank 0 says of the checkpoint that it goes on from."""
    from ..config import spelt

    choice = asked.choice
    if choice.checkpoint is None:
        return []
    if choice.checkpoint.weights_only:
        return [*choice.passed_over, beginning(choice.checkpoint, asked.corpus)]
    there, here = choice.checkpoint.facts["config"], config.model_dump(mode="json")
    keys = (key for key in here if key in there and key not in ("log", "resume") and not key.startswith("checkpoint"))
    changed = [f"{key} {spelt(str, there[key])} -> {spelt(str, here[key])}" for key in keys if there[key] != here[key]]
    told = f"; changed: {', '.join(changed)}" if changed else ""
    return [*choice.passed_over, f"resumed from {choice.checkpoint.path}, {choice.checkpoint.step} steps done{told}"]


def beginning(checkpoint: Checkpoint, corpus: Corpus) -> str:
    """Of a run that has the weights of one that was trained elsewhere, perhaps on other tokens."""
    there, here = checkpoint.facts["tokenizer"], corpus.tokenizer and corpus.tokenizer.facts
    told = f"begins with the weights of {checkpoint.path}"
    if there and here and there["sha256"] != here["sha256"]:
        told += f"; its tokens are not those of {corpus.path}: prepare the data by --tokenizer {checkpoint.path}"
    return told


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
        f"so it does not equal serial training; it flushes every {job.plan.steps} steps{_slowed(job.config)}"
    )


def _slowed(config: Config) -> str:
    return f"; clip={config.clip:g} makes each update wait for all workers, clip=none does not" if config.clip else ""


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
            say(f"\r\x1b[K{progress.remark}" if self.on_terminal else progress.remark)
        if self.on_terminal and progress.validation_loss is None and not last:
            say(f"\r\x1b[K{line}", end="")
        elif last or progress.validation_loss is not None or time.monotonic() - self.told_s > self.every_s:
            say(f"\r\x1b[K{line}" if self.on_terminal else line)
            self.told_s = time.monotonic()

    def _line(self, progress: Progress) -> str:
        left = round((progress.steps - progress.step - 1) * sum(self.seconds) / len(self.seconds))
        validation = "" if progress.validation_loss is None else f"  validation {progress.validation_loss:.4f}"
        skipped = f"  {progress.skipped} skipped" if progress.skipped else ""
        return (
            f"step {progress.step + 1}/{progress.steps}  loss {progress.loss:.4f}  grad norm {progress.grad_norm:.3f}  "
            f"{progress.samples_per_s:.1f} samples/s  {left // 60}:{left % 60:02} left{validation}{skipped}"
        )


def _tell_nobody(progress: Progress) -> None:
    pass
