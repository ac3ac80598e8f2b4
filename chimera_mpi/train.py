"""Train a model: build this rank's part of the pipeline, loop over steps, evaluate, log."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .config import Config
from .data import Batches, Corpus, even_sizes
from .errors import InputError
from .models import GPT, Model, gpt
from .runlog import RunLog, StepRow
from .runtime.clock import aligned_clock
from .runtime.grid import Comm, Grid, width_of
from .runtime.mailbox import Delivery, Spec
from .runtime.optimizer import LearningRate, Recipe
from .runtime.pipeline import Pipeline, Settings
from .runtime.stage import cut_uniformly
from .runtime.waiting import Patience
from .runtime.worker import Feed, MicroBatch, Sums
from .schedule import Schedule, build, check
from .timeline import Span, breakdown

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}
WARMUP_STEPS = 2  # in which torch and MPI set themselves up: not counted in means of time


@dataclass(frozen=True)
class Job:
    """A configuration made concrete for a number of ranks. `sizes` are the samples of each micro-batch of a
    step, over all replicas."""

    config: Config
    width: int
    schedule: Schedule
    model: Model
    sizes: tuple[int, ...]


def plan_job(config: Config, ranks: int) -> Job:
    """Raises InputError if `ranks` ranks cannot do what `config` asks."""
    schedule = build(config.scheme, config.depth, config.micro_batches, sync=config.sync, **config.scheme_options)
    width = width_of(ranks, config.depth)
    model = gpt(
        GPT(
            config.layers, config.hidden, config.heads, config.vocabulary, config.positions, config.tied, config.dropout
        )
    )
    cut_uniformly(len(model.layers), schedule.stages)
    if config.sequence_length > config.positions:
        raise InputError(
            f"sequence_length={config.sequence_length} is more than positions={config.positions}: "
            f"set positions={config.sequence_length}"
        )
    return Job(config, width, check(schedule), model, _sizes(config, width))


def _sizes(config: Config, width: int) -> tuple[int, ...]:
    micro_batches = width * config.micro_batches
    even = micro_batches * config.micro_batch_size
    if config.mini_batch_size is None:
        return even_sizes(even, micro_batches)
    if "micro_batch_size" in config.model_fields_set and config.mini_batch_size != even:
        raise InputError(
            f"mini_batch_size={config.mini_batch_size} is not {width} replicas x {config.micro_batches} micro-batches "
            f"x micro_batch_size={config.micro_batch_size} = {even}: set one of the two sizes"
        )
    return even_sizes(config.mini_batch_size, micro_batches)


class Progress(NamedTuple):
    """What rank 0 can tell after a step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    seconds: float
    samples_per_s: float
    validation_loss: float | None


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


class Trainer:
    """One rank's loop. All ranks of `comm` build it with the same job; only rank 0 has a log and tells."""

    def __init__(
        self,
        comm: Comm,
        job: Job,
        corpus: Corpus,
        validation: Corpus,
        log: RunLog | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ):
        self.job, self.log, self.tell = job, log, tell
        config = job.config
        self.grid = Grid(comm, config.depth)
        self.patience = self.grid.node.patience if config.spin_s is None else Patience(config.spin_s)
        self.clock = aligned_clock(self.grid.world, self.patience)
        self.batches = Batches(corpus, job.sizes, config.seed)
        self.validation = Batches(validation, job.sizes, seed=None)
        self.first = self.grid.replica * config.micro_batches
        inputs = [
            [Spec((size, config.sequence_length), torch.int64)]
            for size in job.sizes[self.first : self.first + config.micro_batches]
        ]
        self.pipeline = Pipeline(self.grid, job.schedule, job.model, inputs, self._settings(), self.clock)
        self.learning_rate = LearningRate(
            config.learning_rate, config.minimum_learning_rate, config.warmup_steps, config.steps
        )
        # A backward does twice a forward's arithmetic.
        self.flops = 3 * sum(self.pipeline.traces[0].flops) / inputs[0][0].shape[0] * sum(job.sizes)

    def _settings(self) -> Settings:
        config = self.job.config
        return Settings(
            seed=config.seed,
            dtype=PRECISIONS[config.precision],
            recipe=Recipe(config.optimizer, weight_decay=config.weight_decay, momentum=config.momentum),
            clip=config.clip,
            delivery=Delivery(
                config.receives_ahead, config.message_limit_bytes, config.synchronous_sends, config.verify_messages
            ),
            patience=self.patience,
        )

    def run(self) -> None:
        """All steps. Raises OpFailed where an op failed."""
        config = self.job.config
        for step in range(config.steps):
            self.step(step)

    def step(self, step: int) -> None:
        """Train on one mini-batch, evaluate when it is time, log and tell."""
        config = self.job.config
        started = self.clock()
        spans, sums = self.pipeline.step(self._feed(self.batches, step), self.learning_rate(step))
        seconds = self.clock() - started
        table = self._gather(_report(spans, sums, started))
        last = step + 1 == config.steps
        if last or (step + 1) % config.spans_every == 0:
            self._log_spans(step, spans)
        evaluation = self.evaluate() if last or (step + 1) % config.eval_every == 0 else None
        if table is not None:
            self._tell(step, seconds, table, evaluation)

    def evaluate(self) -> tuple[float, int] | None:
        """On rank 0: the mean loss in nats over the first validation samples, and their number of tokens."""
        total = Sums()
        for mini_batch in range(self.job.config.eval_mini_batches):
            sums = self.pipeline.evaluate(self._feed(self.validation, mini_batch))
            total = Sums(total.loss + sums.loss, total.targets + sums.targets)
        table = self._gather((total.loss, total.targets))
        if table is None:
            return None
        loss, targets = table.sum(axis=0)
        return loss / max(targets, 1), int(targets)

    def _feed(self, batches: Batches, step: int) -> Feed:
        def micro_batch(index: int) -> MicroBatch:
            number = self.first + index
            inputs, targets = batches.micro_batch(step, number)
            return MicroBatch((torch.from_numpy(inputs),), torch.from_numpy(targets), number)

        return Feed(step, micro_batch)

    def _gather(self, row: tuple[float, ...]) -> NDArray[np.float64] | None:
        """The rows of all ranks, on rank 0."""
        world = self.grid.world
        mine = np.array(row)
        table = np.empty((world.size, len(row))) if world.rank == 0 else None
        self.patience.wait(world.Igather(mine, table))
        return table

    def _log_spans(self, step: int, spans: list[Span]) -> None:
        everyone = self.grid.world.gather(spans)
        if everyone is None or self.log is None:
            return
        start = min(span.start_s for spans in everyone for span in spans)
        for replica in range(self.job.width):
            workers = everyone[replica * self.grid.depth : (replica + 1) * self.grid.depth]
            shifted = [s._replace(start_s=s.start_s - start, end_s=s.end_s - start) for w in workers for s in w]
            self.log.spans(step, replica, shifted)

    def _tell(
        self, step: int, seconds: float, table: NDArray[np.float64], evaluation: tuple[float, int] | None
    ) -> None:
        by_column = dict(zip(StepReport._fields, table.T, strict=True))
        loss = by_column["loss"].sum() / max(by_column["targets"].sum(), 1)
        grad_norm = float(np.sqrt(by_column["square_norm"].sum()))
        samples = sum(self.job.sizes)
        if self.log is not None:
            row = StepRow(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=self.learning_rate(step),
                seconds=seconds,
                samples=samples,
                tokens=samples * self.job.config.sequence_length,
                flops=self.flops,
                bubble_ratio=1 - by_column["compute_s"].mean() / seconds,
                warmup=step < WARMUP_STEPS,
            )
            self.log.step(row, table[:, 3:])
            if evaluation:
                self.log.evaluation(step, *evaluation)
        validation_loss = evaluation[0] if evaluation else None
        self.tell(Progress(step, self.job.config.steps, loss, grad_norm, seconds, samples / seconds, validation_loss))


def _report(spans: list[Span], sums: Sums, started_s: float) -> StepReport:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return StepReport(sums.loss, sums.targets, sums.square_norm, *breakdown(spans, started_s), peak_bytes)
