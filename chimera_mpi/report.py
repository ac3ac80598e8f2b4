"""What a run's log says, in a few lines and as a picture."""

from __future__ import annotations

import json
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import config
from .draw.look import duration, percent
from .errors import InputError
from .predict import Costs, measured_costs, merged, simulate
from .predict.partition import by_thirds
from .runlog import Run
from .schedule import Schedule, build
from .timeline import Timeline


class Steps(NamedTuple):
    """One step of a run as it was planned with the costs that were measured, the same of 1F1B, and as it was."""

    planned: Timeline
    planned_1f1b: Timeline
    measured: Timeline

    @property
    def titled(self) -> dict[str, Timeline]:
        """The two of the run's own scheme, to be drawn one above the other."""
        scheme = self.planned.schedule.scheme
        return {f"{scheme}, planned": self.planned, f"{scheme}, measured": self.measured}


def steps_of(run: Run, step: int | None = None) -> Steps:
    """The sampled step `step`, by default the last one. Raises InputError if it was not sampled."""
    if not run.sampled_steps:
        raise InputError(f"{run.path} has no spans yet: wait for step {config_of(run).spans_every}")
    schedule = plan_of(run).schedule
    measured = run.timeline(run.sampled_steps[-1] if step is None else step, schedule)
    costs = costs_of(run, schedule)
    rival = build("1f1b", schedule.depth, schedule.micro_batches)
    merged_costs = merged(costs, schedule.stages, schedule.depth)
    return Steps(simulate(schedule, costs), simulate(rival, merged_costs), measured)


def config_of(run: Run) -> config.Config:
    return config.Config(**run.config)


def plan_of(run: Run) -> config.Steps:
    """The schedule that was carried out."""
    asked = config_of(run)
    if asked.order == "drawn":
        return config.schedule_of(asked)
    costs = json.loads(run.attributes["stage_costs"])
    return config.schedule_of(asked, by_thirds(costs, asked.recompute != "none"))


def costs_of(run: Run, schedule: Schedule) -> Costs:
    """Medians over the sampled steps, of all replicas."""
    width = int(run.attributes["width"])
    everything = [s for step in run.sampled_steps for replica in range(width) for s in run.spans(step, replica)]
    return measured_costs(everything, schedule.stages)


def summary(run: Run) -> list[str]:
    """The run in lines of text: losses, throughput, the bubble as planned and as measured."""
    steps = run.steps
    if not len(steps["step"]):
        return [f"{run.path}: no step yet"]
    asked = config_of(run)
    lines = [
        f"{asked.model}, {run.attributes['parameters']:,} parameters: {asked.scheme}, depth {asked.depth} x "
        f"width {run.attributes['width']}, {asked.micro_batches} micro-batches, "
        f"{run.attributes['mini_batch_size']} samples of {asked.sequence_length} tokens a step",
        f"steps       {steps['step'][-1] + 1} of {_steps_asked(run)} in {_clock(float(steps['seconds'].sum()))}",
        f"loss        {steps['loss'][-1]:.4f}",
        *_validation(run),
        *deaths(run),
        *_throughput(run),
        *_predicted_step(run),
    ]
    return [*lines, *(_bubbles(run) if run.sampled_steps else []), *_memory(run)]


def _steps_asked(run: Run) -> int:
    """By the last session: a run may be resumed for more."""
    last = run.sessions[-1].attributes if run.sessions else {}
    return config.Config(**json.loads(last["config"])).steps if "config" in last else config_of(run).steps


def _validation(run: Run) -> list[str]:
    losses = run.evaluations["loss"]
    if not len(losses):
        return []
    if config_of(run).model == "bert":
        return [f"validation  {losses[-1]:.4f}, nats per sample: of a masked token and of the next sentence"]
    entropy = run.attributes["unigram_entropy_nats"]
    return [f"validation  {losses[-1]:.4f} (unigram entropy of the corpus: {entropy:.4f}), nats per token"]


def deaths(run: Run) -> list[str]:
    """A line for each time that ranks died, and whether the others went on."""
    lines = []
    for session in run.sessions:
        of = session.attributes
        if "recovery_s" in of:
            went_on = f"{session.ranks} rank{'s' * (session.ranks > 1)} went on in {of['recovery_s']:.2f} s"
            lines.append(f"survived    {of['death']}; after {of['steps_done']} steps {went_on}")
        elif "death" in of:
            lines.append(f"ended       {of['death']}; after {of['steps_done']} steps nobody could go on")
    return lines


def _median(run: Run, name: str) -> float:
    """Of the steps without warm-up, if there are any."""
    counted = ~run.steps["warmup"]
    return float(np.median(run.steps[name][counted if counted.any() else slice(None)]))


def _throughput(run: Run) -> list[str]:
    median_of = {name: _median(run, name) for name in ("samples_per_s", "tokens_per_s", "seconds")}
    return [
        f"throughput  {median_of['samples_per_s']:.1f} samples/s, {median_of['tokens_per_s']:,.0f} tokens/s, "
        f"{duration(median_of['seconds'])} a step (medians without warm-up)"
    ]


def _predicted_step(run: Run) -> list[str]:
    """Beside what was measured, if the run had a machine to predict by."""
    if "predicted_step_s" not in run.attributes:
        return []
    predicted_s, measured_s = float(run.attributes["predicted_step_s"]), _median(run, "seconds")
    return [
        f"predicted   {duration(float(f'{predicted_s:.3g}'))} a step on {run.attributes['machine']}; "
        f"measured {100 * (measured_s / predicted_s - 1):+.1f} %"
    ]


def _memory(run: Run) -> list[str]:
    """What each worker's tensors were predicted to take, beside what was measured of its process or its GPU."""
    if "predicted_memory" not in run.attributes:
        return []
    predicted = np.array([worker["total_bytes"] for worker in json.loads(run.attributes["predicted_memory"])])
    rows = [["memory, MB", "most", *(f"P{w}" for w in range(len(predicted)))], ["predicted", *_megabytes(predicted)]]
    on_device = run.attributes["memory_measured"] == "device"
    rows.append(["allocated" if on_device else "grew by", *_megabytes(_held(run).max(0))])
    what = "allocated on the GPU" if on_device else "by which the process grew, with what torch and MPI keep"
    return ["", *_table(rows), f"predicted: tensors of a rank; {rows[-1][0]}: {what}"]


def _held(run: Run) -> NDArray[np.float64]:
    """[replicas, workers]: the most bytes that each rank had more than before its part of the model was built, in the
    first session: later ones may have another layout."""
    before = np.array(json.loads(run.attributes["held_before_bytes"]))
    resumed = [session.first_step for session in run.sessions[1:] if session.first_step >= 0]
    rows = int(np.searchsorted(run.steps["step"], resumed[0])) if resumed else len(run.steps["step"])
    peaks = run.workers["peak_bytes"][max(rows, 1) - 1, : len(before)]
    return (peaks - before).reshape(int(run.attributes["width"]), -1)


def _megabytes(sizes: NDArray[np.float64]) -> list[str]:
    return [f"{size / 1e6:.1f}" for size in (sizes.max(), *sizes)]


def _bubbles(run: Run) -> list[str]:
    steps = steps_of(run)
    schedule = steps.planned.schedule
    measured = [steps_of(run, step).measured for step in run.sampled_steps]
    of_workers = [median(timeline.idle_ratios[w] for timeline in measured) for w in range(schedule.depth)]
    rows = [
        ["bubble", "whole", *[f"P{w}" for w in range(schedule.depth)]],
        ["planned", *map(percent, [steps.planned.bubble_ratio, *steps.planned.idle_ratios])],
        ["measured", *map(percent, [sum(of_workers) / len(of_workers), *of_workers])],
        ["1f1b planned", *map(percent, [steps.planned_1f1b.bubble_ratio, *steps.planned_1f1b.idle_ratios])],
    ]
    return ["", *_table(rows)]


def _table(rows: list[list[str]]) -> list[str]:
    return [f"{row[0]:12}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
