"""What a worker holds in memory while it trains, in bytes of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from ..schedule import Place, Schedule
from .memory import Sizes, most_held, weight_versions
from .partition import Cuts, Recompute, cut_uniformly
from .work import LayerWork, Work


class Buffers(NamedTuple):
    """What a job is told to keep room for, beside the model: by default what `train` does."""

    receives_ahead: int = 4
    bucket_bytes: int = 4 << 20  # of gradients that are summed over replicas together


@dataclass(frozen=True)
class Memory:
    """What one worker holds at the moment when it holds most.

    Not in it: what torch and MPI keep for themselves, what an allocator rounds up, and the samples.
    """

    weights_bytes: float  # in the precision that is computed in
    versions_bytes: float  # of further versions of them, in a stream
    masters_bytes: float  # in single precision, of weights of half
    gradients_bytes: float  # one buffer a stage, whose parts are summed in place
    state_bytes: float  # the optimizer's
    activations_bytes: float  # with what a backward at work has in addition
    messages_bytes: float  # posted receives, and what is on its way out
    buckets_bytes: float  # in addition while sums over replicas are under way

    @property
    def total_bytes(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


class Chosen(Protocol):
    """How a model is to be trained, as the planner chooses it."""

    @property
    def width(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def recompute(self) -> str | int: ...
    @property
    def options(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def sharded(self) -> bool: ...
    @property
    def cuts(self) -> Cuts | None: ...
    @property
    def buffers(self) -> Buffers: ...


def memory_of(work: Work, choice: Chosen, schedule: Schedule) -> tuple[Memory, ...]:
    """What each worker of a pipeline group holds. `schedule` is that of the choice, of a step or of several."""
    halved = dict(choice.options).get("concat") == "halving"
    return Footprint(
        work,
        schedule,
        choice.cuts or cut_uniformly(len(work.layers), schedule.stages),
        samples=-(-choice.micro_batch_size // 2) if halved else choice.micro_batch_size,
        width=choice.width,
        recompute=Recompute.of(choice.recompute),
        sharded=choice.sharded,
        buffers=choice.buffers,
    ).of_workers()


@dataclass(frozen=True)
class Footprint:
    """A schedule on a model that is cut into stages. `samples` are those of the largest micro-batch, `width` is the
    number of pipeline groups."""

    work: Work
    schedule: Schedule
    cuts: Sequence[range]
    samples: int
    width: int = 1
    recompute: Recompute = Recompute()
    sharded: bool = False
    buffers: Buffers = Buffers()

    def of_workers(self) -> tuple[Memory, ...]:
        sizes = [self.sizes(stage) for stage in range(self.schedule.stages)]
        versions = weight_versions(self.schedule)
        return tuple(
            self._of_worker(worker, versions[worker], most_held(order, sizes))
            for worker, order in enumerate(self.schedule.orders)
        )

    def sizes(self, stage: int) -> Sizes:
        """What one micro-batch holds of a stage."""
        runs = self.recompute.segments(self.cuts[stage])
        segments = [Segment(tuple(self.work.layers[at] for at in run), run.start == 0) for run in runs]
        return stage_sizes(segments, self.samples, self.recompute.what != "none", bool(self.schedule.split))

    def parameters(self, stage: int) -> int:
        """Of one copy of a stage."""
        cut = self.cuts[stage]
        has_both = cut.start == 0 and cut.stop == len(self.work.layers)
        return sum(self.work.layers[at].parameters for at in cut) - has_both * self.work.tied_parameters

    def _of_worker(self, worker: int, versions: int, activations_bytes: float) -> Memory:
        work, places = self.work, self.schedule.places(worker)
        held = sum(self.parameters(stage) for _, stage in places)
        updated = sum(self._updated(place) for place in places)
        summed = self._summed(places)
        return Memory(
            weights_bytes=held * work.parameter_bytes,
            versions_bytes=(versions - 1) * held * work.parameter_bytes,
            masters_bytes=updated * work.master_bytes,
            gradients_bytes=summed * work.gradient_bytes,
            state_bytes=updated * work.state_bytes,
            activations_bytes=activations_bytes,
            messages_bytes=self._messages_bytes(worker),
            buckets_bytes=self._buckets_bytes(places),
        )

    def _summed(self, places: Sequence[Place]) -> int:
        """Numbers in buffers of gradients, which copies of a stage share, and copies of a tied parameter."""
        stages = {stage for _, stage in places}
        shared = {0, self.schedule.stages - 1} <= stages and self.schedule.stages > 1
        return sum(map(self.parameters, stages)) - shared * self.work.tied_parameters

    def _updated(self, place: Place) -> float:
        """Numbers that this worker's optimizer updates: with sharding the share of a replica, but all tied ones."""
        parameters = self.parameters(place[1])
        if not self.sharded:
            return parameters
        ends = {0, self.schedule.stages - 1}
        tied = self.work.tied_parameters if place[1] in ends and len(ends) > 1 else 0
        return tied + (parameters - tied) / self._replicas

    @property
    def _replicas(self) -> int:
        return self.width * len(self.schedule.pipes)

    def _buckets_bytes(self, places: Sequence[Place]) -> float:
        if self._replicas == 1:
            return 0
        largest = max(self.parameters(stage) for _, stage in places) * self.work.gradient_bytes
        return min(largest, self.buffers.bucket_bytes)

    def _messages_bytes(self, worker: int) -> float:
        """The receives that are posted ahead, and one message on its way out."""
        pipe_of, last = Counter(self.schedule.pipe_of.values()), self.schedule.stages - 1
        received: list[float] = []
        sent = [0.0]
        for pipe, stage in self.schedule.places(worker):
            row, many = self.schedule.pipes[pipe], min(pipe_of[pipe], self.buffers.receives_ahead)
            forth, back = self._boundary_bytes(stage), self._boundary_bytes(stage + 1)
            count = self.work.count_bytes
            if stage and row[stage - 1] != worker:
                received += [forth] * many
                sent.append(forth + count)
            if stage < last and row[stage + 1] != worker:
                received += [back + count] * many
                sent.append(back)
        return sum(sorted(received, reverse=True)[: self.buffers.receives_ahead]) + max(sent)

    def _boundary_bytes(self, stage: int) -> float:
        """Of what enters a stage; behind the last one, of nothing."""
        if stage == self.schedule.stages:
            return 0
        return self.samples * self.work.layers[self.cuts[stage].start].input_bytes


@dataclass(frozen=True)
class Segment:
    """Layers in a row whose graph is one; what enters the `first` of a model wants no gradient."""

    layers: tuple[LayerWork, ...]
    first: bool

    @property
    def input_bytes(self) -> float:
        """As are all these, per sample."""
        return self.layers[0].input_bytes

    @property
    def graph_bytes(self) -> float:
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def deferred_bytes(self) -> float:
        """Where the inputs want no gradient, the whole backward is that of the weights."""
        if self.first:
            return self.graph_bytes + self.layers[-1].output_bytes
        return sum(layer.deferred_bytes for layer in self.layers)

    def working_bytes(self, samples: int) -> float:
        """The most that the whole backward has beside the graph, which it lets go of on its way."""
        most = freed = 0.0
        for layer in reversed(self.layers):
            most = max(most, layer.backward_peak_bytes(samples) - freed)
            freed += samples * layer.activation_bytes
        return most

    def input_working_bytes(self, samples: int) -> float:
        """The same of the half that makes the gradients of the inputs and leaves `deferred_bytes`."""
        if self.first:
            return samples * self.layers[-1].output_bytes
        most = more = 0.0
        for layer in reversed(self.layers):
            own = layer.working_bytes if layer.input_working_bytes is None else layer.input_working_bytes
            most = max(most, more + own)
            more += layer.deferred_bytes - layer.activation_bytes
        return samples * max(most, more + self.input_bytes)

    def weighing_bytes(self, samples: int) -> float:
        """The same of the other half."""
        if self.first:
            return self.working_bytes(samples) - samples * self.layers[-1].output_bytes
        return max(layer.matrix_bytes for layer in self.layers)


def stage_sizes(segments: Sequence[Segment], samples: int, recomputed: bool, split: bool) -> Sizes:
    """What a micro-batch of `samples` holds of a stage of these segments, whose graphs are kept or `recomputed`."""
    kept = [samples * (segment.input_bytes if recomputed else segment.graph_bytes) for segment in segments]
    held = sum(kept)
    most, deferred = 0.0, 0.0
    for segment, own in zip(reversed(segments), reversed(kept), strict=True):
        held += samples * segment.graph_bytes - own
        at_work = (segment.input_working_bytes if split else segment.working_bytes)(samples)
        if recomputed and split and segment.first:  # nothing else than its forward is done in this half
            at_work += 2 * samples * segment.layers[-1].output_bytes
        most = max(most, held + at_work)
        left = samples * segment.deferred_bytes if split else 0
        deferred += left
        held += left - samples * segment.graph_bytes
    weighing = max(segment.weighing_bytes(samples) for segment in segments)
    return Sizes(sum(kept), deferred, most - sum(kept), weighing)
