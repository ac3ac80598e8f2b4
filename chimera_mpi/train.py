"""Train a model: plan a job, build this rank's part of it, loop over steps, evaluate, log."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .checkpoint import WEIGHTS, Checkpoint
from .config import Config, Steps, fitting_depth, profiled, schedule_of
from .data import Corpus
from .errors import InputError, RunFailed, refusing
from .fits import cut_as_asked, sizes_of
from .models import Model, make_layer
from .predict.partition import Cuts, Recompute, by_thirds, cut_at, cut_by, imbalance, stage_costs
from .runlog import RunLog, StepRow
from .runtime.agreement import Herald, agree
from .runtime.clock import aligned_clock
from .runtime.device import peak_held_bytes
from .runtime.examine import first_broken
from .runtime.gradients import SHARED_FROM_BYTES
from .runtime.grid import Comm, Grid
from .runtime.mailbox import Delivery, Spec, Tensors
from .runtime.optimizer import LearningRate, Recipe
from .runtime.pipeline import Pipeline, Settings, check_forwards, check_job
from .runtime.profile import layer_seconds
from .runtime.recorder import Recorder
from .runtime.stage import trace
from .runtime.staging import Direct, Staging
from .runtime.tensors import PRECISIONS, has_gradient, token_specs
from .runtime.waiting import Patience
from .runtime.watchdog import Watchdog, awaited
from .runtime.worker import Feed, MicroBatch, Sums, Targets, Total
from .saving import Saver
from .schedule import STREAMS, Schedule, width_of
from .stopping import AGAIN, DONE, End, Stops
from .tasks import Task, task_of
from .timeline import Span, breakdown

Read = Callable[[int, int], tuple[Tensors, Targets]]  # (step, number of the micro-batch) -> inputs, targets
GO_ON, STOP, UNLOGGED, BROKE, SPOILT = range(5)  # what rank 0 has all ranks do, or all know by themselves, after a step
ROWS = 4096  # of the last steps, which each rank of a run that survives deaths remembers
DENSE_SAMPLES = 128  # of steps whose spans are logged, before they become rarer
WARMUP_STEPS = 2  # in which torch and MPI set themselves up: not counted in means of time


@dataclass(frozen=True)
class Job:
    """A configuration made concrete for a number of ranks. `sizes` are the samples of each micro-batch of a
    step, over all replicas."""

    config: Config
    width: int
    plan: Steps
    task: Task
    sizes: tuple[int, ...]
    cuts: Cuts
    costs: tuple[float, ...]  # of each stage, in FLOPs or in seconds, as `balanced` says
    imbalance: float  # the busiest worker over the mean, of `balanced`
    balanced: str = "FLOPs"

    def cut_by(self, seconds: Sequence[float]) -> Job:
        """Cut so that the workers share out the layers' `seconds` evenly."""
        cuts = cut_by(seconds, self.plan.schedule)
        costs = stage_costs(seconds, cuts)
        return replace(
            self,
            plan=ordered(self.config, self.plan, costs),
            cuts=cuts,
            costs=tuple(costs),
            imbalance=imbalance(seconds, cuts, self.plan.schedule),
            balanced="seconds",
        )


def plan_job(config: Config, ranks: int, done: int = 0) -> Job:
    """For the steps after the first `done`. Raises InputError if `ranks` ranks, of which some may be spare, cannot do
    what `config` asks; where that is for its depth, it says which they could do."""
    return fitting_depth(config, ranks, lambda config, workers: job_on(config, workers, done))


def job_on(config: Config, workers: int, done: int = 0) -> Job:
    """What `plan_job` makes, on ranks of which none is spare. Raises InputError."""
    width = width_of(workers, config.depth)
    plan = schedule_of(config, done=done)
    task = task_of(config)
    sizes = sizes_of(config, width, plan.micro_batches)
    entering = token_specs(max(sizes), config.sequence_length, task.inputs)
    return job_of(config, width, plan, task, sizes, entering)


def job_of(
    config: Config, width: int, plan: Steps, task: Task, sizes: tuple[int, ...], entering: tuple[Spec, ...]
) -> Job:
    """`entering` are the tensors that enter layer 0 with the largest micro-batch. Raises InputError."""
    dtype = PRECISIONS[config.precision]
    found = trace(task.model, entering, dtype)
    flops = found.flops
    cuts = _cuts(config, task.model, plan.schedule, flops)
    costs = stage_costs(flops, cuts)
    plan = ordered(config, plan, costs)
    is_fp16, is_sharded = config.precision == "fp16", config.optimizer_sharding == "replicas"
    check_job(plan.schedule, task.model, cuts, Recipe(config.optimizer), is_sharded, is_fp16)
    copies = width * len(plan.schedule.pipes)
    check_forwards(task.model, (entering, *found.outputs), dtype, config.recompute != "none", copies)
    return Job(config, width, plan, task, sizes, cuts, tuple(costs), imbalance(flops, cuts, plan.schedule))


def ordered(config: Config, plan: Steps, costs: Sequence[float]) -> Steps:
    """The plan in the order that is asked for, of stages that cost so much."""
    if config.order == "drawn" or config.scheme in STREAMS:
        return plan
    return schedule_of(config, by_thirds(costs, config.recompute != "none"))


def _cuts(config: Config, model: Model, schedule: Schedule, flops: Sequence[float]) -> Cuts:
    layers = len(model.layers)
    cuts = cut_as_asked(config, layers, schedule.stages)
    if config.partition == "flops":
        return cut_by(flops, schedule)
    if config.partition == "parameters":
        metas = (make_layer(model, index, seed=0, device="meta") for index in range(layers))
        return cut_by([sum(p.numel() for p in layer.parameters()) for layer in metas], schedule)
    return cuts


class Progress(NamedTuple):
    """What rank 0 can tell after a step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    seconds: float
    samples_per_s: float
    validation_loss: float | None
    skipped: int  # steps without an update, so far
    remark: str = ""  # a line of its own


class StepReport(NamedTuple):
    """What each rank tells rank 0 of its step, for one row of a table."""

    loss: float
    targets: float
    square_norm: float
    compute_s: float
    wait_s: float
    allreduce_wait_s: float
    update_s: float
    peak_bytes: float
    skipped: float


class Part:
    """One rank's part of a job: its pipeline, and which micro-batches of a step are those of its pipeline group."""

    def __init__(
        self,
        grid: Grid,
        job: Job,
        entering: Callable[[int], Sequence[Spec]],
        clock: Callable[[], float] = time.perf_counter,
        staging: Staging = Direct(),
        guards: bool = False,
    ):
        """`entering(size)` are the tensors that enter layer 0 with a micro-batch of that size; `staging` has the
        device that this rank computes on. One that `guards` skips updates by gradients that are not finite."""
        self.grid, self.job, self.patience = grid, job, patience_of(grid, job.config)
        self.staging, self.guards = staging, guards
        self.largest = entering(max(job.sizes))
        self.first = grid.replica * job.plan.micro_batches
        self.pipeline = Pipeline(
            grid,
            job.plan.schedule,
            job.task.model,
            self._inputs(job.sizes, entering),
            self._settings(),
            steps=job.plan.steps,
            clock=clock,
        )

    def _settings(self) -> Settings:
        config = self.job.config
        return Settings(
            seed=config.seed,
            dtype=PRECISIONS[config.precision],
            recompute=Recompute.of(config.recompute),
            recipe=Recipe(config.optimizer, weight_decay=config.weight_decay, momentum=config.momentum),
            clip=config.clip,
            loss_scale=self._loss_scale() if config.precision == "fp16" else None,
            guards=self.guards,
            bucket_bytes=config.bucket_bytes,
            shared_from_bytes=SHARED_FROM_BYTES if config.shared_sums and not config.survive else math.inf,
            delivery=Delivery(
                config.receives_ahead, config.message_limit_bytes, config.synchronous_sends, config.verify_messages
            ),
            patience=self.patience,
            sharded=config.optimizer_sharding == "replicas",
            cuts=tuple(self.job.cuts),
            staging=self.staging,
            progress_thread=wants_thread(self.grid, config),
        )

    def _loss_scale(self) -> float:
        """Large for the mean over the tokens [samples, tokens, ...] of a micro-batch, of which the loss is the sum."""
        return self.job.config.loss_scale or 2**16 / math.prod(self.largest[0].shape[:2])

    def expect(self, sizes: tuple[int, ...], entering: Callable[[int], Sequence[Spec]]) -> None:
        """From the next step on micro-batches have these sizes and shapes."""
        self.pipeline.expect(self._inputs(sizes, entering))

    def _inputs(self, sizes: tuple[int, ...], entering: Callable[[int], Sequence[Spec]]) -> list[Sequence[Spec]]:
        own = sizes[self.first : self.first + self.job.plan.micro_batches]
        return [entering(size) for size in own * self.job.plan.steps]

    def feed(self, read: Read, first_step: int) -> Feed:
        """The micro-batches of this rank's group from `first_step` on; `read(step, number)` has those of all groups."""

        def micro_batch(index: int) -> MicroBatch:
            step, at = divmod(index, self.job.plan.micro_batches)
            number = self.first + at
            return MicroBatch(first_step + step, number, partial(read, first_step + step, number))

        return micro_batch

    def total(self, *sums: Sums) -> Total:
        """What they add up to over all ranks, on all. Collective."""
        mine = np.array([(each.loss, each.targets, each.square_norm) for each in sums]).sum(axis=0)
        whole = np.empty_like(mine)
        self.patience.wait(self.grid.world.Iallreduce(mine, whole))
        return Total(*whole.tolist())


class Begun(NamedTuple):
    """What a run goes on from: the states of layers after so many steps, by `layer(index)`, and loss scale and its age;
    the last checkpoint, if there is one, and the steps in it."""

    step: int
    layer: Callable[[int], Mapping[str, torch.Tensor]]
    loss_scale: tuple[float, int] | None = None
    path: Path | None = None
    saved: int = -1

    @staticmethod
    def at(checkpoint: Checkpoint) -> Begun:
        step, scale = checkpoint.step, checkpoint.facts["loss_scale"]
        return Begun(step, checkpoint.layer, scale, checkpoint.path, step)

    def take_up(self, pipeline: Pipeline) -> None:
        """Go on from it. Collective. Raises InputError on all ranks."""
        agree(pipeline.grid.world, lambda: pipeline.take_up(self.layer))
        if pipeline.loss_scale and self.loss_scale:
            pipeline.loss_scale.value, pipeline.loss_scale.steps = self.loss_scale


class Run:
    """The loop of the command line on one rank. All ranks of `comm` build it with the same job; only rank 0 has a
    log and tells."""

    def __init__(
        self,
        comm: Comm,
        job: Job,
        corpus: Corpus,
        validation: Corpus,
        log: RunLog | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
        staging: Staging = Direct(),
        resumed: Checkpoint | Begun | None = None,
        stops: Stops | None = None,
        profile: Path | None = None,
    ):
        """`stops` may end it early; its limit is rank 0's. `profile` is this rank's file, if one is wanted. Raises
        InputError if the layers to go on from, `resumed`, are others than the job's."""
        self.job, self.log, self.tell, self.stops = job, log, tell, stops or Stops()
        config = job.config
        self.grid = Grid(comm, config.depth, survives=bool(config.survive))
        self.clock = aligned_clock(self.grid.world, patience_of(self.grid, config))
        self.part = Part(self.grid, job, self._entering, self.clock, staging, guards=True)
        self.pipeline = self.part.pipeline
        self.read = reader(job, corpus)
        self.validation = job.task.batches(validation, job.sizes, None) if config.eval_every else None
        self.learning_rate = learning_rate_of(config)
        # A backward does twice a forward's arithmetic.
        self.flops = 3 * sum(self.pipeline.traces[0].flops) / job.sizes[self.part.first] * sum(job.sizes)
        self.identity = identity_of(job, corpus)
        self.first, self._began_s = 0, math.nan
        self.makes_up = isinstance(resumed, Begun)
        self.tokenizer = corpus.tokenizer
        self.saver = self._saver()
        if resumed:
            self._resume(Begun.at(resumed) if isinstance(resumed, Checkpoint) else resumed)
        self.here = self.pipeline.worker.here
        self.herald = Herald(self.grid.world, self.part.patience)
        self.recorder = self._recorder(profile, staging) if profile else None
        self.watchdog = self._watchdog()
        self.rows: deque[StepRow] = deque(maxlen=ROWS)  # also on ranks that have no log, should they have to write one
        self._noted: list[float] = []  # rank 0: the signals of all ranks
        self._reason = self._remark = ""
        self._unlogged = ""  # rank 0: why the log cannot be written, once it cannot
        self._broken = self._skipped = 0

    def _entering(self, size: int) -> Sequence[Spec]:
        return token_specs(size, self.job.config.sequence_length, self.job.task.inputs)

    def run(self) -> End:
        """The steps that are left, or as many as there is time for. Rank 0 has the reason. Raises OpFailed where an op
        failed, and on all ranks RunFailed."""
        config = self.job.config
        with self.watchdog or nullcontext():
            self._make_up()
            self._gather([])
            self._send_word()
            if word := self.herald.heard():
                return self._stop(self.first, word)
            self._send_word()
            for first in range(self.first, config.steps, self.job.plan.steps):
                steps = range(first, first + self.job.plan.steps)
                with self.recorder.over(steps) if self.recorder else nullcontext():
                    why = self._advance(steps)
                if why:
                    return self._stop(first if why == BROKE else steps.stop, why)
                if self.saver:
                    self.saver.poll()
                if (word := self.herald.heard()) and steps.stop < config.steps:
                    return self._stop(steps.stop, word)
                if config.checkpoint_every and any((step + 1) % config.checkpoint_every == 0 for step in steps):
                    self.save(steps[-1] + 1, wait=False)
                self._send_word()
            self.herald.heard()
            self.save(config.steps, wait=True)
            return DONE

    def save(self, next_step: int, wait: bool) -> None:
        """Write a checkpoint, if there is a folder for it, of what the run is between two steps: `next_step` are done.
        It is written in the background unless one is to `wait`. Collective. Raises RunFailed on all ranks."""
        if self.saver is None:
            return
        with self.here.excused("a checkpoint"):
            self._write_log(lambda log: log.flush(sync=True))  # no checkpoint is ahead of a log on a sound disk
            self.saver.save(next_step, self.facts(next_step) if self.grid.world.rank == 0 else {}, wait)

    def _make_up(self) -> None:
        """Do what was due after the last step, if that was interrupted. What is done or logged already stays."""
        before, config = range(self.first - 1, self.first), self.job.config
        if not self.makes_up or not self.first:
            return
        if _is_due(before, config.eval_every, config.steps):
            evaluation = self.evaluate(self.first - 1)
            self._write_log(lambda log: log.evaluation(self.first - 1, *evaluation))
        if config.checkpoint_every and self.first % config.checkpoint_every == 0:
            self.save(self.first, wait=False)

    def _resume(self, begun: Begun) -> None:
        begun.take_up(self.pipeline)
        self.first = begun.step
        if self.saver and begun.path:
            self.saver.go_on_from(begun.path, begun.saved)

    def _saver(self) -> Saver | None:
        config = self.job.config
        if config.checkpoint is None:
            return None
        attached = self.tokenizer.files if self.tokenizer else {}
        return Saver(self.pipeline, config.checkpoint, config.checkpoint_keep, attached=attached)

    def facts(self, next_step: int) -> dict[str, Any]:
        """What a checkpoint says beside the layers."""
        scale = self.pipeline.loss_scale
        return {
            "identity": self.identity,
            "config": self.job.config.model_dump(mode="json"),
            "ranks": self.grid.world.size,
            "partition": [cut.start for cut in self.job.cuts[1:]],
            "costs": self.job.costs,
            "imbalance": self.job.imbalance,
            "next_sample": next_step * sum(self.job.sizes),
            "loss_scale": (scale.value, scale.steps) if scale else None,
            "rules": RULES,
            "tokenizer": self.tokenizer.facts if self.tokenizer else None,
            "log": str(self.log.path.absolute()) if self.log else None,
            "versions": {package: version(package) for package in ("chimera-mpi", "torch", "safetensors")},
        }

    def close(self) -> None:
        """Free what the ranks share. Collective."""
        if self.recorder:
            self.recorder.close()
        if self.saver:
            self.saver.close()
        self.pipeline.close()
        self.grid.close()

    @property
    def done(self) -> int:
        """The steps whose updates are in the weights. One that is called off, to stop at it, is none."""
        judged = self.pipeline.worker.judged
        if judged is None:
            return self.first
        is_called_off = self.pipeline.broke and self.job.config.on_nan == "stop"
        return judged.step + (not is_called_off)

    def last_rows(self) -> list[StepRow]:
        """Of the last steps that are done, as the log has them, without bubbles: all ranks know them."""
        self._remember()
        return list(self.rows)

    def _remember(self) -> None:
        """Note the row of the last step that is done, once."""
        worker = self.pipeline.worker
        judged, before = worker.judged, self.rows[-1].step if self.rows else -1
        if judged and before < judged.step < self.done:
            skips = worker.norm is not None and worker.norm.skips
            self.rows.append(self._row(judged.step, judged.total, self.clock() - self._began_s, skips))

    def abandon(self) -> None:
        """A rank has died: let nobody wait for this one, and await nobody any more. What this rank holds of the layers
        is as it was after `done` steps. Not collective."""
        self.grid.revoke()
        if self.recorder:
            self.recorder.abandon()
        if self.watchdog:
            self.watchdog.stop()
        if self.saver:
            self.saver.abandon()
        self.herald.abandon()
        self.pipeline.abandon()
        if self.grid.bell:
            self.grid.bell.close()

    def _advance(self, steps: range) -> int:
        """Carry out the schedule once, evaluate when it is time, log and tell. BROKE where a loss or gradients were not
        finite and the weights are as they were, SPOILT where they are not."""
        config = self.job.config
        started = self._began_s = self.clock()
        spans, sums = self.pipeline.run(self.part.feed(self.read, steps[0]), steps[0], self.learning_rate)
        seconds = (self.clock() - started) / len(steps)
        if self.pipeline.broke and not self._bear(steps[0]):
            return BROKE
        if config.survive:
            self._remember()
        if self.watchdog:
            self.watchdog.measured(seconds * len(steps))
        rows = _step_reports(spans, sums, started, peak_held_bytes(self.part.staging.device))
        table = self._gather([number for row in rows for number in row])
        if _is_sampled(steps, config.spans_every, self.first, config.steps):
            self._log_spans(steps[-1], spans)
        if _is_due(steps, config.check_replicas, config.steps):
            self.pipeline.check_replicas()
        is_spoilt = not self.pipeline.guards and not self.part.total(*sums).is_finite
        is_due = _is_due(steps, config.eval_every, config.steps) and not is_spoilt
        evaluation = self.evaluate(steps[-1]) if is_due else None
        if table is not None:
            by_step = table.reshape(len(table), len(steps), -1).swapaxes(0, 1)
            with self.here.excused("the log"):
                for step, of_step in zip(steps, by_step, strict=True):
                    self._tell(step, seconds, of_step, evaluation if step == steps[-1] else None)
            if is_spoilt:
                self._reason = self._where_spoilt(steps, by_step)
        return SPOILT if is_spoilt else GO_ON

    def _bear(self, step: int) -> bool:
        """Whether to go on after a step that broke. Finds out where, the first time. Collective."""
        self._broken += 1
        if self._broken == 1:
            with self.here.excused("a search for what broke"):
                found = first_broken(self.pipeline, self.part.feed(self.read, step), step)
            where = f"first {found}" if found else "but all is finite when the step is repeated"
            self._reason = f"step {step}: a loss or gradients of nan or inf, {where}"
            if self.job.config.on_nan == "skip":
                self._remark = f"{self._reason}; it is skipped, as are others like it"
        return self.job.config.on_nan == "skip"

    def _send_word(self) -> None:
        """Have all ranks go on after the next pass, or not; `heard` once that is through. Collective."""
        if self.grid.world.rank == 0:
            self._reason = self._unlogged or self.stops.why(self._noted, self.saver.seconds if self.saver else 0.0)
        self.herald.send(UNLOGGED if self._unlogged else STOP if self._reason else GO_ON)

    def _stop(self, next_step: int, why: int) -> End:
        """End the run before `next_step`, with a checkpoint if there is a folder and the weights are whole.
        Collective."""
        self.herald.heard()
        reason = f"{self._reason}: stopped after {next_step} of {self.job.config.steps} steps"
        if self.saver is None:
            return End(f"{reason}, nothing is saved: next time give checkpoint=FOLDER", 1)
        if why == SPOILT:
            self.saver.finish()
            return End(f"{reason}, saved is {self.saver.newest or 'nothing'}", 1)
        self.save(next_step, wait=True)
        return End(f"{reason}, saved in {self.saver.folder}: go on by resume=auto", AGAIN if why == STOP else 1)

    def evaluate(self, after_step: int) -> tuple[float, int]:
        """The mean loss in nats over the first validation samples, and their number of tokens."""
        firsts = range(0, self.job.config.eval_mini_batches, self.job.plan.steps)
        feeds = (self.part.feed(partial(read_micro_batch, self.validation), first) for first in firsts)
        with self.here.excused("an evaluation"):
            total = self.part.total(*(self.pipeline.evaluate(feed, after_step) for feed in feeds))
        return total.mean_loss, int(total.targets)

    def _gather(self, row: list[float]) -> NDArray[np.float64] | None:
        """The rows of all ranks, on rank 0, which also learns of the signals that they have noted."""
        world = self.grid.world
        mine = np.array([*row, self.stops.signals.number], dtype=np.float64)
        table = np.empty((world.size, len(mine))) if world.rank == 0 else None
        self.part.patience.wait(world.Igather(mine, table))
        if table is None:
            return None
        self._noted = table[:, -1].tolist()
        return table[:, :-1]

    def _watchdog(self) -> Watchdog | None:
        asked = self.job.config.watchdog_s
        if asked is None:
            return None
        waits_for = partial(awaited, self.job.plan.schedule, self.grid)
        limit_s = None if asked == "auto" else asked
        return Watchdog(self.grid, self.here, waits_for, limit_s, lets_leave=bool(self.job.config.survive))

    def _recorder(self, path: Path, staging: Staging) -> Recorder:
        return Recorder(self.grid.world, self.pipeline.worker, profiled(self.job.config), path, staging.device)

    def _log_spans(self, step: int, spans: list[Span]) -> None:
        everyone = self.grid.world.gather(spans)
        if everyone is None or self.log is None:
            return
        start = min(span.start_s for of_rank in everyone for span in of_rank)
        for replica in range(self.job.width):
            workers = everyone[replica * self.grid.depth : (replica + 1) * self.grid.depth]
            shifted = [s._replace(start_s=s.start_s - start, end_s=s.end_s - start) for w in workers for s in w]
            self.log.spans(step, replica, shifted)

    def _tell(
        self, step: int, seconds: float, table: NDArray[np.float64], evaluation: tuple[float, int] | None
    ) -> None:
        by_column = dict(zip(StepReport._fields, table.T, strict=True))
        total = Total(*(float(by_column[name].sum()) for name in Total._fields))
        skipped = int(by_column["skipped"].max())
        self._skipped += skipped
        row = self._row(step, total, seconds, skipped > 0)
        logged = row._replace(bubble_ratio=1 - by_column["compute_s"].mean() / seconds)
        self._write_log(lambda log: log.step(logged, table[:, len(total) : -1]))
        if evaluation:
            self._write_log(lambda log: log.evaluation(step, *evaluation))
        validation_loss = evaluation[0] if evaluation else None
        figures = (row.loss, row.grad_norm, seconds, row.samples / seconds, validation_loss)
        self.tell(Progress(step, self.job.config.steps, *figures, self._skipped, self._remark))
        self._remark = ""

    def _write_log(self, write: Callable[[RunLog], object]) -> None:
        """Give the log something, if there is one. One that cannot be written stops the run as a signal does, so that
        nothing but rows is lost; it keeps them, should there be room when it is closed."""
        if self.log is None:
            return
        try:
            write(self.log)
        except RunFailed as error:
            self._unlogged = self._unlogged or str(error)

    def _row(self, step: int, total: Total, seconds: float, skipped: bool) -> StepRow:
        samples = sum(self.job.sizes)
        return StepRow(
            step=step,
            loss=total.mean_loss,
            grad_norm=total.grad_norm,
            learning_rate=self.learning_rate(step),
            seconds=seconds,
            samples=samples,
            tokens=samples * self.job.config.sequence_length,
            flops=self.flops,
            bubble_ratio=math.nan,
            warmup=step < self.first + WARMUP_STEPS,
            skipped=skipped,
        )

    def _where_spoilt(self, steps: range, by_step: NDArray[np.float64]) -> str:
        """The first step and place of numbers that are none, where nothing keeps the weights from them."""
        for step, table in zip(steps, by_step, strict=True):
            loss, square_norm = (np.flatnonzero(~np.isfinite(table[:, at])) for at in (0, 2))
            if len(loss):
                where = f"the loss on rank {loss[0]}, stage {self.job.plan.schedule.stages - 1}"
            elif len(square_norm):
                places = self.job.plan.schedule.places(int(square_norm[-1]) % self.grid.depth)
                where = f"gradients on rank {square_norm[-1]}, stage {max(stage for _, stage in places)}"
            else:
                continue
            return f"step {step}: nan or inf, first in {where}, and now in the weights"
        return f"step {steps[-1]}: nan or inf in the sum of all losses or gradients, and now in the weights"


RULES = (
    "the learning rate follows from the step; samples from (seed, step); dropout from (seed, step, micro-batch, layer)"
)


# What a run must have in common with one that it goes on from, and what else its numbers depend on.
SHAPING = ("model", "sequence_length", "seed", "optimizer")
OF_OUR_MODELS = ("layers", "hidden", "heads", "vocabulary", "positions", "tied")
TRAINING = (
    "learning_rate", "minimum_learning_rate", "warmup_steps", "steps", "weight_decay", "momentum", "clip", "dropout",
    "precision",
)  # fmt: skip


def shape_of(job: Job) -> dict[str, Any]:
    """What a run must have in common with a log that it goes on with, or a checkpoint that it goes on from."""
    keys = SHAPING + (OF_OUR_MODELS if job.config.model in ("gpt", "bert") else ())
    return {**{key: getattr(job.config, key) for key in keys}, "mini_batch_size": sum(job.sizes)}


def identity_of(job: Job, corpus: Corpus) -> dict[str, Any]:
    """What it must have in common with a checkpoint, beside the shapes of layers."""
    return {**shape_of(job), "train_sha256": corpus.sha256}


def check_same(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises InputError if `name` is not of a run such as this one."""
    for key, value in here.items():
        if there.get(key) != value:
            remedy = "ask for what that run had, or begin a new one in other files"
            raise InputError(f"{name} is of a run with {key}={there.get(key)}, not {value}: {remedy}")


def steps_done(checkpoint: Checkpoint | None, config: Config) -> int:
    """Raises InputError if the run has gone further than `config` asks."""
    done = checkpoint.step if checkpoint else 0
    if checkpoint and done > config.steps:
        raise InputError(
            f"{checkpoint.path} has {done} steps, more than steps={config.steps}: set steps={done} or more"
        )
    return done


def check_resumed(checkpoint: Checkpoint, job: Job, corpus: Corpus) -> None:
    """Raises InputError if the job cannot go on from it, or begin with its weights."""
    here = identity_of(job, corpus)
    if checkpoint.weights_only:
        here = {key: here[key] for key in ("model", *OF_OUR_MODELS) if key in here}
    check_same(str(checkpoint.path), checkpoint.facts["identity"], here)
    check_layers(checkpoint, job.task.model)


def check_layers(checkpoint: Checkpoint, model: Model) -> None:
    """Raises InputError if it is of a model of other layers."""
    if len(checkpoint.files) != len(model.layers):
        raise InputError(f"{checkpoint.path} is of a model of {len(checkpoint.files)} layers, not {len(model.layers)}")
    for index in range(len(model.layers)):
        there = checkpoint.shapes(index)
        for name, tensor in make_layer(model, index, seed=0, device="meta").state_dict().items():
            if there.get(WEIGHTS + name) != tuple(tensor.shape):
                raise InputError(
                    f"layer {index} of {checkpoint.path} has {name} of shape {there.get(WEIGHTS + name)}, "
                    f"that of the model {tuple(tensor.shape)}: give the model that was trained"
                )


def measured(
    comm: Comm,
    patience: Patience,
    job: Job,
    read: Read,
    staging: Staging = Direct(),
    before: Checkpoint | None = None,
) -> Job:
    """Where the partition is to be measured, the job cut by the layers' seconds on the first micro-batch, as rank 0
    measures them; else the job as it is. A run that goes on from `before` with the same schedule is cut as it was then.
    Collective."""
    config = job.config
    if config.partition != "measured":
        return job
    cut_by = ("partition", "scheme", "depth", "chunks", "waves", "pairs")
    if (
        before
        and not before.weights_only
        and all(before.facts["config"][key] == getattr(config, key) for key in cut_by)
    ):
        cuts = cut_at(before.facts["partition"], len(job.task.model.layers), job.plan.schedule.stages)
        costs = tuple(before.facts["costs"])
        plan = ordered(config, job.plan, costs)
        return replace(job, plan=plan, cuts=cuts, costs=costs, imbalance=before.facts["imbalance"], balanced="seconds")
    seconds = np.zeros(len(job.task.model.layers))

    def measure() -> None:
        inputs, targets = read(0, 0)
        with torch.random.fork_rng(devices=[]):
            dtype = PRECISIONS[config.precision]
            seconds[:] = layer_seconds(job.task.model, inputs, targets, dtype, staging=staging)

    agree(comm, lambda: measure() if comm.rank == 0 else None)
    patience.wait(comm.Ibcast(seconds))
    return job.cut_by(seconds.tolist())


def try_loss(job: Job, read: Read) -> None:
    """Raises InputError if a user's loss does not take what his layers make of the first micro-batch."""
    inputs, targets = read(0, 0)
    dtype = PRECISIONS[job.config.precision]
    entering = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in inputs)
    outputs = trace(job.task.model, entering, dtype).outputs[-1]
    with refusing(f"model={job.config.model}: the loss fails"):
        check_loss(job.task.model, outputs, targets)


def check_loss(model: Model, outputs: Sequence[Spec], targets: Targets) -> None:
    """Try the loss on zeros. Raises InputError, or whatever it raises."""
    zeros = [torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for spec in outputs]
    for tensor in zeros:
        tensor.requires_grad_(has_gradient(tensor.dtype))
    total, _ = model.loss(*zeros, targets)
    if not total.requires_grad:
        raise InputError("the loss has no gradient: compute it from the last layer's outputs, without detach()")


def reader(job: Job, corpus: Corpus) -> Read:
    """The micro-batches to train on."""
    return partial(read_micro_batch, job.task.batches(corpus, job.sizes, job.config.seed))


def read_micro_batch(batches: Any, step: int, number: int) -> tuple[Tensors, Targets]:
    """Inputs and targets of micro-batch `number` of a step, as tensors."""
    inputs, targets = (_tensors(arrays) for arrays in batches.micro_batch(step, number))
    return (inputs if isinstance(inputs, tuple) else (inputs,)), targets


def _tensors(arrays: Any) -> Targets:
    return tuple(map(torch.from_numpy, arrays)) if isinstance(arrays, tuple) else torch.from_numpy(arrays)


def patience_of(grid: Grid, config: Config) -> Patience:
    return grid.patience if config.spin_s is None else replace(grid.patience, spin_s=config.spin_s)


def wants_thread(grid: Grid, config: Config) -> bool:
    """Between ranks that share memory whoever waits for a message moves it; over a network both ends must."""
    return config.progress == "thread" or (config.progress == "auto" and grid.node.ranks < grid.world.size)


def learning_rate_of(config: Config) -> LearningRate:
    return LearningRate(config.learning_rate, config.minimum_learning_rate, config.warmup_steps, config.steps)


def _is_due(steps: range, every: int | None, of: int) -> bool:
    """Whether one of `steps` is the last of all or of `every`; with none it never is."""
    return every is not None and (steps[-1] + 1 == of or any((step + 1) % every == 0 for step in steps))


def _is_sampled(steps: range, every: int, first: int, of: int) -> bool:
    """Whether spans of `steps` are logged, in a session from step `first` on: of one in `every` at first, then of ever
    fewer, so that a log grows by the logarithm of its steps. The gap is a 64th of the session so far at most."""
    samples = (steps[-1] - first) // every
    return _is_due(steps, every << (samples // DENSE_SAMPLES).bit_length(), of)


def _step_reports(spans: list[Span], sums: list[Sums], started_s: float, peak_bytes: int) -> list[StepReport]:
    """Of a stream's steps, which overlap, each has an equal share of the times."""
    compute_s, wait_s, allreduce_wait_s, update_s = (t / len(sums) for t in breakdown(spans, started_s))
    return [StepReport(*s[:3], compute_s, wait_s, allreduce_wait_s, update_s, peak_bytes, s.skipped) for s in sums]
