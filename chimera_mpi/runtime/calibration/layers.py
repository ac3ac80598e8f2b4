"""Layers of a model, by themselves and in a pipeline, and their update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI

from ...models import Model, make_layer
from ...predict.calibrated import LayerReading, UpdateReading
from ...schedule import COMPUTE, Kind, build
from ..gradients import Gradients
from ..grid import Grid
from ..mailbox import Spec
from ..optimizer import Recipe
from ..pipeline import Pipeline, Settings
from ..stage import Stage, handed_on, trace
from ..staging import Staging, Tensors
from ..tape import Segment, Tape, floating, start_graph
from ..weights import weights_of
from ..worker import MicroBatch, Targets, brought_targets, then_loss
from .ensemble import ALONE, Ensemble, specs_of

ROW = 3  # layers of a kind that are measured in a row: as in a stage, none finds its weights in the nearest cache


class Manner(NamedTuple):
    """How layers are trained; `clips` by the norm of the gradient."""

    dtype: torch.dtype
    recipe: Recipe
    clips: bool
    staging: Staging


class Solo:
    """A few layers in a row as a stage of its own, with its gradients and its optimizer, on this rank alone."""

    def __init__(self, grid: Grid, model: Model, layers: range, manner: Manner):
        schedule, patience = build("1f1b", 1, 1), grid.node.patience
        self.model, self.layers, self.staging, self.clips = model, layers, manner.staging, manner.clips
        self.stage = Stage(model, layers, 0, manner.dtype, manner.staging.device)
        self.gradients = Gradients(grid, schedule, {ALONE: self.stage}, (), patience, staging=manner.staging)
        self.weights = weights_of(self.stage, manner.recipe, self.gradients, schedule, ALONE, patience)

    def passes(self, entering: Tensors, targets: Targets) -> list[float]:
        """Seconds of a layer's forward, whole backward, and the halves of a split one; the loss counts to the last."""
        segment: Segment = partial(self.stage, layers=self.layers, step=0, micro_batch=0)
        if self.layers[-1] + 1 == len(self.model.layers):
            segment = partial(then_loss, segment, self.model.loss, brought_targets(self.staging, targets))
        start, tape, gradients, forward = self._forward(segment, entering)
        tape.backward(gradients)
        whole = self._now() - start
        start, tape, gradients, _ = self._forward(segment, entering)
        tape.backward_inputs(gradients)
        inputs = self._now()
        tape.backward_weights()
        weights = self._now()
        return [seconds / len(self.layers) for seconds in (forward, whole, inputs - start, weights - inputs)]

    def update(self) -> float:
        """Seconds from the sum of gradients to the next step."""
        start = self._now()
        self.gradients.start(ALONE)
        self.gradients.settle(ALONE)
        if self.clips:
            self.gradients.scale(0.5)
        self.weights.update(0.0)
        self.gradients.release(ALONE)
        return self._now() - start

    @torch.no_grad()
    def leaving(self, entering: Tensors) -> Tensors:
        return self.stage(entering, self.layers, 0, 0)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.stage.parameters() if p.requires_grad)

    def _forward(self, segment: Segment, entering: Tensors) -> tuple[float, Tape, Tensors, float]:
        """When what follows may begin, the tape, the gradients of its outputs, and the seconds that it took."""
        start = self._now()
        tape = Tape([segment], recompute=False)
        leaving = tape.forward(start_graph(entering))
        end = self._now()
        gradients = tuple(torch.ones_like(tensor) for tensor in floating(leaving))
        return self._now(), tape, gradients, end - start

    def _now(self) -> float:
        self.staging.computed().synchronize()
        return time.perf_counter()


def rows_of(kinds: Sequence[str]) -> dict[str, range]:
    """The layers of each kind that are measured: the first ones that stand in a row."""
    rows: dict[str, range] = {}
    for index, kind in enumerate(kinds):
        if kind not in rows:
            rows[kind] = range(index, index + 1)
        elif rows[kind].stop == index and len(rows[kind]) < ROW:
            rows[kind] = range(rows[kind].start, index + 1)
    return rows


def read_layers(
    ensemble: Ensemble,
    model: Model,
    kinds: Sequence[str],
    micro_batch: Callable[[int], tuple[Tensors, Targets]],
    manner: Manner,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[list[LayerReading], list[UpdateReading]]:
    """One layer of each kind over the sizes of micro-batches, and the update of what was measured. Collective.

    `kinds[i]` names what layer i is like; `micro_batch(samples)` has inputs and targets.
    """
    grid, rows = Grid(MPI.COMM_SELF, 1), rows_of(kinds)
    batches = {samples: micro_batch(samples) for samples in ensemble.effort.samples}
    traces = {samples: trace(model, specs_of(inputs), manner.dtype) for samples, (inputs, _) in batches.items()}
    entering = {samples: manner.staging.brought(inputs) for samples, (inputs, _) in batches.items()}
    layers, updates, reached = [], [], 0
    for kind, row in rows.items():
        between = range(reached, row.start)
        entering = {samples: _passed_on(model, between, t, traces[samples].outputs) for samples, t in entering.items()}
        solo = Solo(grid, model, row, manner)
        pending, entering = entering, {}
        for samples, tensors in pending.items():
            tell(f"{kind}, {samples} samples")
            reading = ensemble.read(partial(solo.passes, tensors, batches[samples][1]))
            forward_s, backward_s, input_s, weight_s = reading.values
            layers.append(LayerReading(kind, samples, forward_s, backward_s, input_s, weight_s, reading.noise))
            entering[samples] = solo.leaving(tensors)
            taken_s = len(row) * (2 * forward_s + backward_s + input_s + weight_s)
            if 2 * taken_s > ensemble.effort.longest_s:
                break
        if solo.parameters:
            (seconds,) = ensemble.read(lambda solo=solo: [solo.update()]).values  # type: ignore[misc]
            updates.append(UpdateReading(solo.parameters, seconds))
        solo.gradients.close()
        reached = row.stop
    grid.close()
    return layers, updates


@torch.no_grad()
def _passed_on(model: Model, layers: range, entering: Tensors, outputs: Sequence[Sequence[Spec]]) -> Tensors:
    """What `layers` make of `entering`, given what each of the model puts out. One that is like the layer before it
    and puts out what that did is passed by: values do not matter."""
    for index in layers:
        alike = index > 0 and model.layers[index] == model.layers[index - 1]
        if not (alike and tuple(outputs[index]) == specs_of(entering)):
            dtype = next((tensor.dtype for tensor in entering if tensor.is_floating_point()), torch.float32)
            entering = handed_on(make_layer(model, index, 0, dtype, entering[0].device)(*entering))
    return entering


def read_slowdown(
    ensemble: Ensemble,
    model: Model,
    kinds: Sequence[str],
    readings: Sequence[LayerReading],
    micro_batch: Callable[[int], tuple[Tensors, Targets]],
    manner: Manner,
) -> float:
    """What training adds to layers measured by themselves: the seconds of forwards and backwards in a pipeline over
    all ranks, over those of their layers. Collective.

    The pipeline is as deep as the ranks allow, its model the same with fewer layers of each kind in a row.
    """
    samples = _measured_throughout(readings)
    expected = {r.kind: (r.forward_s, r.backward_s) for r in readings if r.samples == samples}
    depth = max(d for d in range(1, ensemble.comm.size + 1) if ensemble.comm.size % d == 0 and d <= len(kinds))
    chosen = thinned(kinds, ROW * depth)
    grid, schedule = Grid(ensemble.comm, depth), build("1f1b", depth, 2 * depth)
    inputs, targets = micro_batch(samples)
    settings = Settings(dtype=manner.dtype, recipe=manner.recipe, staging=manner.staging)
    smaller = Model(tuple(model.layers[index] for index in chosen), model.loss)
    pipeline = Pipeline(grid, schedule, smaller, [specs_of(inputs)] * schedule.micro_batches, settings)
    of_stage = [[sum(expected[kinds[chosen[at]]][way] for at in cut) for way in range(2)] for cut in pipeline.cuts]

    def step() -> list[float]:
        spans, _ = pipeline.run(lambda index: MicroBatch(0, index, lambda: (inputs, targets)), 0, lambda step: 0.0)
        passes = [span for span in spans if span.op.kind in COMPUTE]
        alone_s = sum(of_stage[span.op.stage][span.op.kind is Kind.BACKWARD] for span in passes)
        return [sum(span.end_s - span.start_s for span in passes) / alone_s]

    (slowdown,) = ensemble.read(step).values
    pipeline.close()
    grid.close()
    return slowdown


def _measured_throughout(readings: Sequence[LayerReading]) -> int:
    """The most samples that all kinds were measured with."""
    kinds = {reading.kind for reading in readings}
    sizes = {reading.samples for reading in readings}
    return max(n for n in sizes if {reading.kind for reading in readings if reading.samples == n} == kinds)


def thinned(kinds: Sequence[str], most: int) -> list[int]:
    """The layers that are left where at most so many of a kind stand in a row."""
    chosen: list[int] = []
    for index in range(len(kinds)):
        if index < most or len(set(kinds[index - most : index + 1])) > 1:
            chosen.append(index)
    return chosen
