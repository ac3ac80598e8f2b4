"""What a report says of one run: lines, tables, charts, and the figures behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from ..draw.chart import Bar, Bars, Chart, Drawn, Series, finite, thinned
from ..draw.look import clock, duration, figure, percent, unit_of
from ..draw.table import Table, table_text
from ..errors import InputError
from ..runlog import Run
from ..sampled import Start
from .part import Part, check_training, part_of
from .sessions import Sessions, deaths, ranges
from .stats import Interval, over_blocks
from .steps import Bubble, Sampled, Steps, mean

MOST_POINTS = 400  # of a curve in a picture


class Times(NamedTuple):
    """Seconds of a worker in a step; `other_s` is what is left of it, after its last op and between steps."""

    compute_s: float
    wait_s: float
    allreduce_wait_s: float
    update_s: float
    other_s: float


TIMES = {
    "compute_s": "compute",
    "wait_s": "wait",
    "allreduce_wait_s": "exposed all-reduce",
    "update_s": "update",
    "other_s": "other",
}


class Memory(NamedTuple):
    """The most bytes of each worker, over its replicas: of tensors as the model says, and as was measured."""

    predicted: NDArray[np.float64]
    measured: NDArray[np.float64]
    on_device: bool


@dataclass(frozen=True, eq=False)
class Report:
    part: Part

    @property
    def run(self) -> Run:
        return self.part.run

    @property
    def start(self) -> Start:
        return self.part.last

    @cached_property
    def sampled(self) -> Sampled:
        return Sampled(self.part)

    @cached_property
    def sessions(self) -> Sessions:
        return Sessions(self.run)

    @property
    def has_steps(self) -> bool:
        return len(self.part.rows) > 0

    @property
    def mini_batch(self) -> int:
        return int(self.start.attributes["mini_batch_size"])

    @property
    def micro_batch_size(self) -> float:
        """Samples of a micro-batch, on average."""
        config = self.start.config
        return self.mini_batch / (self.start.width * config.micro_batches * config.accumulate)

    @cached_property
    def throughput(self) -> Interval:
        """Samples per second."""
        return over_blocks(self.part.column("samples_per_s"), self._together)

    @cached_property
    def step_s(self) -> Interval:
        return over_blocks(self.part.column("seconds"), self._together)

    @cached_property
    def _together(self) -> int:
        try:
            return self.start.plan.steps
        except InputError:  # a scheme of the user's
            return 1

    @cached_property
    def times(self) -> list[Times]:
        """Of each worker, medians over the counted steps and over its replicas."""
        names = Times._fields[:-1]
        with catch_warnings():
            simplefilter("ignore", RuntimeWarning)  # of a worker of which nothing is known, which has nan
            medians = np.stack([np.nanmedian(self.part.of_workers(name), axis=(0, 1)) for name in names], axis=1)
        step_s = self.part.median("seconds")
        return [Times._make([*row, max(step_s - sum(row), 0.0)]) for row in medians.tolist()]

    @cached_property
    def bubble(self) -> Bubble | None:
        """None before a step was sampled, and of a scheme that this program does not know."""
        try:
            return self.sampled.bubble
        except InputError:
            return None

    @property
    def drawable(self) -> bool:
        """Whether there is a step to draw."""
        return self.bubble is not None

    def steps(self, step: int | None = None) -> Steps:
        """A sampled step as it was planned and as it was, by default the last. Raises InputError without one."""
        return self.sampled.steps(step)

    @cached_property
    def memory(self) -> Memory | None:
        """None if the run had no prediction."""
        attributes = self.start.attributes
        if "predicted_memory" not in attributes or not self.has_steps:
            return None
        predicted = np.array([worker["total_bytes"] for worker in json.loads(attributes["predicted_memory"])])
        before = np.array(json.loads(attributes["held_before_bytes"]))[: self.start.ranks]
        peaks = np.fmax.reduce(self.run.workers["peak_bytes"][self._last_rows, : len(before)])  # nan: nobody could tell
        held = (peaks - before).reshape(self.start.width, -1)
        return Memory(predicted, np.fmax.reduce(held), attributes["memory_measured"] == "device")

    @property
    def _last_rows(self) -> NDArray[np.intp]:
        """Of the last start with steps: what a process held before belongs to the one start."""
        return next(start.rows for start in reversed(self.part.starts) if len(start.rows))

    @property
    def steps_asked(self) -> int:
        """By the last session: a run may be resumed for more."""
        return int(self.sessions.starts[-1].keys.get("steps", self.start.config.steps))

    @property
    def loss(self) -> float:
        """Of the last step."""
        return float(self.run.steps["loss"][self.part.rows[-1]]) if self.has_steps else nan

    @property
    def validation(self) -> float:
        """Of the last evaluation of its steps."""
        found, steps = self.run.evaluations, self.run.steps["step"][self.part.rows]
        losses = found["loss"][np.isin(found["step"], steps)]
        return float(losses[-1]) if len(losses) else nan

    @property
    def loss_unit(self) -> str:
        """What a loss is told in."""
        return {"gpt": "nats per token", "bert": "nats per sample"}.get(self.start.config.model, "loss")

    # ---- in words

    def lines(self) -> list[str]:
        """Losses, throughput, what was predicted."""
        if not self.has_steps:
            return [f"{self.run.path}: no step yet"]
        return [*self._opening(), *self._losses(), *deaths(self.run), *self._speed(), *self._predicted_step()]

    def _opening(self) -> Iterator[str]:
        config, steps = self.start.config, self.run.steps
        yield (
            f"{config.model}, {self.start.attributes.get('parameters', 0):,} parameters: {config.scheme}, depth "
            f"{config.depth} x width {self.start.width}, {config.micro_batches} micro-batches, {self.mini_batch} "
            f"samples of {config.sequence_length} tokens a step"
        )
        if not self.part.is_whole:
            numbers = [start.number for start in self.part.starts]
            done = self.run.steps["step"][self.part.rows]
            yield (
                f"{'sessions' if len(numbers) > 1 else 'session'} {ranges(numbers)}, steps {ranges(done.tolist())}: "
                f"medians, costs and memory are of these; --session tells of another"
            )
        yield f"steps       {steps['step'][-1] + 1} of {self.steps_asked} in {clock(float(steps['seconds'].sum()))}"
        if skipped := int(steps["skipped"].sum()):
            yield f"skipped     {skipped} updates, by gradients or losses of nan or inf"

    def _losses(self) -> Iterator[str]:
        yield f"loss        {figure(self.loss)}"
        if isfinite(self.validation):
            yield f"validation  {figure(self.validation)}{self._beside_validation()}"

    def _beside_validation(self) -> str:
        if self.start.config.model == "bert":
            return ", nats per sample: of a masked token and of the next sentence"
        entropy = self.start.attributes.get("unigram_entropy_nats", nan)
        of_corpus = f" (unigram entropy of these texts: {entropy:.4f})" if isfinite(entropy) else ""
        return f"{of_corpus}, nats per token" if self.start.config.model == "gpt" else of_corpus

    def _speed(self) -> Iterator[str]:
        median = self.part.median
        how = "medians without warm-up" if self.part.is_warm else "medians of the warm-up: there are no other steps"
        yield (
            f"throughput  {median('samples_per_s'):.1f} samples/s, {median('tokens_per_s'):,.0f} tokens/s, "
            f"{duration(median('seconds'))} a step ({how})"
        )

    def _predicted_step(self) -> Iterator[str]:
        """Beside what was measured, if the run had a machine to predict by."""
        attributes = self.start.attributes
        if "predicted_step_s" in attributes:
            predicted_s, measured_s = float(attributes["predicted_step_s"]), self.part.median("seconds")
            yield (
                f"predicted   {duration(predicted_s, 3)} a step on {attributes['machine']}; "
                f"measured {100 * (measured_s / predicted_s - 1):+.1f} %"
            )

    # ---- tables

    def short_tables(self) -> list[Table]:
        """Bubbles and memory."""
        return [table for table in (self._bubble_table(), self._memory_table()) if table]

    def tables(self) -> list[Table]:
        workers = [self.worker_table()] if self.has_steps else []
        return [*self.short_tables(), *workers, self.sessions.table()]

    def _bubble_table(self) -> Table | None:
        bubble = self.bubble
        if bubble is None:
            return None
        rows = {"planned": bubble.planned, "measured": bubble.measured, "1f1b planned": bubble.planned_1f1b}
        heads = ["bubble", "whole", *self._workers]
        return Table("", heads, [[name, *map(percent, [mean(of), *of])] for name, of in rows.items()])

    def _memory_table(self) -> Table | None:
        """What each worker's tensors were predicted to take, beside what was measured of its process or its GPU."""
        memory = self.memory
        if memory is None:
            return None
        name = "allocated" if memory.on_device else "grew by"
        what = "allocated on the GPU" if memory.on_device else "by which the process grew, with what torch and MPI keep"
        rows = [
            [row, *(f"{size / 1e6:.1f}" for size in (sizes.max(), *sizes))]
            for row, sizes in (("predicted", memory.predicted), (name, memory.measured))
        ]
        heads = ["memory, MB", "most", *(f"P{worker}" for worker in range(len(memory.predicted)))]
        return Table("", heads, rows, f"predicted: tensors of a rank; {name}: {what}")

    @property
    def _workers(self) -> list[str]:
        return [f"P{worker}" for worker in range(self.start.config.depth)]

    def worker_table(self) -> Table:
        step_s = self.part.median("seconds")
        unit, size = unit_of(step_s)
        digits = max(4 - len(f"{step_s / size:.0f}"), 0)
        rows = [
            [name, *(f"{seconds / size:.{digits}f} {seconds / (step_s or nan):5.0%}" for seconds in times)]
            for name, times in zip(self._workers, self.times, strict=True)
        ]
        width = self.start.width
        over = f" and over {width} replicas" if width > 1 else ""
        whole = duration(step_s, 4)
        note = f"{unit} and share of a step of {whole}: medians over steps{over}; other: after its last op"
        return Table("", ["worker", *TIMES.values()], rows, note)

    # ---- charts

    def charts(self) -> list[Drawn]:
        """Loss, throughput, and where the time of each worker goes."""
        if not self.has_steps:
            return []
        drawn: list[Drawn | None] = [self._loss_chart(), self._throughput_chart(), self._worker_chart()]
        return [chart for chart in drawn if chart]

    def loss_points(self) -> list[tuple[float, float]]:
        steps = self.run.steps
        return finite(list(zip((steps["step"] + 1.0).tolist(), steps["loss"].tolist(), strict=True)))

    def _loss_chart(self) -> Chart | None:
        training, found = self.loss_points(), self.run.evaluations
        validation = finite(list(zip((found["step"] + 1.0).tolist(), found["loss"].tolist(), strict=True)))
        entropy = self.start.attributes.get("unigram_entropy_nats", nan)
        ends = [training[0][0], training[-1][0]] if training else []
        guide = [(x, entropy) for x in ends] if self.start.config.model == "gpt" and isfinite(entropy) else []
        series = [
            Series("training", thinned(training, MOST_POINTS)),
            Series("validation", thinned(validation, MOST_POINTS)),
            Series("unigram entropy", guide, guide=True),
        ]
        series = [each for each in series if each.points]
        return loss_chart(series, self.loss_unit) if training else None

    def _throughput_chart(self) -> Chart | None:
        seconds = self.run.steps["seconds"].astype(np.float64)
        unit, size = _clock_unit(float(seconds.sum()))
        elapsed = (np.cumsum(seconds) / size).tolist()
        points = finite(list(zip(elapsed, self.run.steps["samples_per_s"].tolist(), strict=True)))
        series = [Series("samples/s", thinned(points, MOST_POINTS))]
        return Chart("Throughput", f"{unit} of steps", "samples/s", series, log_x=False) if points else None

    def _worker_chart(self) -> Bars:
        return breakdown_chart("Where a step goes", self._workers, self.times)

    # ---- figures

    def figures(self) -> dict[str, Any]:
        """All that the lines and tables say, for JSON."""
        path = str(self.run.path)
        if not self.has_steps:
            return {"path": path, "steps_done": 0, "sessions": self.sessions.figures()}
        config, attributes = self.start.config, self.start.attributes
        keys = ("scheme", "depth", "micro_batches", "accumulate", "model", "sequence_length", "precision")
        return {
            "path": path,
            **{key: getattr(config, key) for key in keys},
            "scheme_options": config.scheme_options,
            "width": self.start.width,
            "ranks": self.start.ranks,
            "hosts": list(self.start.hosts),
            "mini_batch_size": self.mini_batch,
            "micro_batch_size": self.micro_batch_size,
            "parameters": attributes.get("parameters"),
            "steps_done": int(self.run.steps["step"][-1]) + 1,
            "steps_asked": self.steps_asked,
            "steps_skipped": int(self.run.steps["skipped"].sum()),
            "seconds": float(self.run.steps["seconds"].sum()),
            "loss": self.loss,
            "loss_unit": self.loss_unit,
            "validation_loss": self.validation,
            "unigram_entropy_nats": attributes.get("unigram_entropy_nats"),
            "of_sessions": [start.number for start in self.part.starts],
            "of_steps": len(self.part.counted),
            "without_warmup": self.part.is_warm,
            "samples_per_s": interval_figures(self.throughput),
            "tokens_per_s": self.part.median("tokens_per_s"),
            "flops_per_s": self.part.median("flops_per_s"),
            "step_s": interval_figures(self.step_s),
            "machine": attributes.get("machine"),
            "predicted_step_s": attributes.get("predicted_step_s"),
            "planned_step_s": float(self.sampled.planned.makespan_s) if self.drawable else None,
            "bubble": self._bubble_figures(),
            "workers": self._worker_figures(),
            "memory_measured": attributes.get("memory_measured"),
            "sampled_steps": list(self.part.sampled_steps) if self.drawable else [],
            "sessions": self.sessions.figures(),
        }

    def _bubble_figures(self) -> dict[str, float] | None:
        return {name: mean(of) for name, of in self.bubble._asdict().items()} if self.bubble else None

    def _worker_figures(self) -> list[dict[str, Any]]:
        figures: list[dict[str, Any]] = [times._asdict() for times in self.times]
        if self.bubble:
            for worker, found in enumerate(figures):
                found.update({f"bubble_{name}": of[worker] for name, of in self.bubble._asdict().items()})
        if self.memory:
            for found, predicted, measured in zip(figures, *self.memory[:2], strict=True):
                found.update(predicted_bytes=float(predicted), measured_bytes=float(measured))
        return figures


def report_of(run: Run, session: int | None = None) -> Report:
    """Raises InputError if there is no such session, or if the log is none of a training."""
    made = Report(part_of(run, session))
    check_training(made.start)
    return made


def summary(run: Run, session: int | None = None, width: int = 80) -> list[str]:
    """The run in lines of text: losses, throughput, the bubble as planned and as measured, memory."""
    made = report_of(run, session)
    return [*made.lines(), *(line for table in made.short_tables() for line in ("", table_text(table, width)))]


def interval_figures(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "half_width_95": interval.half, "over": interval.over or None}


def loss_chart(series: Sequence[Series], unit: str) -> Chart:
    return Chart("Loss", "steps", unit, series, log_x=False, from_zero=False)


def breakdown_chart(title: str, groups: Sequence[str], times: Sequence[Times]) -> Bars:
    unit, size = unit_of(np.fmax.reduce([sum(each) for each in times]))
    bars = [Bar(words, [getattr(each, name) / size for each in times]) for name, words in TIMES.items()]
    return Bars(title, f"{unit} of a step", groups, bars, stacked=True)


def _clock_unit(seconds: float) -> tuple[str, float]:
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next((unit for unit in units if seconds >= 2 * unit[1]), units[-1])
