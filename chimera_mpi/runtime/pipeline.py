"""One rank's part in training a model under a schedule, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ..checkpoint import DTYPES
from ..errors import InputError
from ..models import Model, make_layer
from ..predict.partition import cut_uniformly
from ..schedule import Place, Schedule, check_compatible, forward_only
from ..timeline import Span
from .gradients import BUCKET_BYTES, SHARED_FROM_BYTES, Gradients, ties_across
from .grid import Grid, holders
from .mailbox import Delivery, Mailbox, Spec, pieces
from .norm import GlobalNorm, LossScale
from .optimizer import Recipe
from .progress import ProgressThread
from .stage import Boundaries, Recompute, Stage, Trace, digest, trace
from .staging import Direct, Staging
from .state import Copies, LayerState, held_state, take_up
from .trace import writes_of
from .waiting import Patience, assemble
from .weights import weights_of
from .worker import Evaluator, Feed, Sums, Worker


@dataclass(frozen=True)
class Settings:
    """What a pipeline is built with, besides schedule and model. `clip` bounds the global gradient norm."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    recipe: Recipe = Recipe()
    recompute: Recompute = Recompute()
    clip: float | None = None
    loss_scale: float | None = None  # at the start; dynamic, for fp16
    guards: bool = False  # weights from gradients that are not finite, where a step has one update
    bucket_bytes: int = BUCKET_BYTES  # of gradients that are reduced together
    shared_from_bytes: float = SHARED_FROM_BYTES  # of a stage's gradients: from there on in memory that nodes share
    delivery: Delivery = Delivery()
    patience: Patience | None = None
    sharded: bool = False  # each replica of a stage has a share of the optimizer's state
    cuts: tuple[range, ...] | None = None  # the layers of each stage; uniform by default
    staging: Staging = Direct()  # the device that the stages are on, and how it gets to MPI
    progress_thread: bool = False  # whether a thread drives MPI while this rank computes


class Pipeline:
    """A rank's stages, mailbox, gradients and optimizers. All ranks of the grid must build it alike."""

    def __init__(
        self,
        grid: Grid,
        schedule: Schedule,
        model: Model,
        inputs: Sequence[Sequence[Spec]],
        settings: Settings = Settings(),
        *,
        steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`inputs[n]` are the tensors that enter stage 0 with micro-batch n of this rank's pipeline group;
        the schedule covers `steps` steps."""
        self.schedule, self.model = schedule, model
        self.grid, self.patience = grid, settings.patience or grid.patience
        self.cuts = list(settings.cuts or cut_uniformly(len(model.layers), schedule.stages))
        self.dtype = settings.dtype
        self.traces = self._traces(inputs)
        check_job(schedule, model, self.cuts, settings.recipe, settings.sharded, bool(settings.loss_scale))
        self.stages = {
            place: Stage(model, self.cuts[place[1]], settings.seed, settings.dtype, settings.staging.device)
            for place in schedule.places(self.grid.worker)
        }
        assemble(grid.world, self.patience)
        gradients = self._gradients(settings)
        self.worker = Worker(
            schedule,
            self.stages,
            model.loss,
            self._mailbox(schedule, settings),
            gradients,
            {
                place: weights_of(stage, settings.recipe, gradients, schedule, place, self.patience)
                for place, stage in self.stages.items()
            },
            recompute=settings.recompute,
            norm=self._norm(settings),
            steps=steps,
            clock=clock,
        )
        self.progress = ProgressThread(grid.world) if settings.progress_thread else None
        forwards = forward_only(schedule)
        self.evaluator = Evaluator(forwards, self.stages, model.loss, self._mailbox(forwards, settings))

    def expect(self, inputs: Sequence[Sequence[Spec]]) -> None:
        """From the next step on micro-batches have these shapes; `inputs` are as those of the constructor."""
        self.traces = self._traces(inputs)
        for mailbox in (self.worker.mailbox, self.evaluator.mailbox):
            mailbox.expect(Boundaries(mailbox.schedule, self.cuts, self.traces))

    def run(self, feed: Feed, first_step: int, learning_rate: Callable[[int], float]) -> tuple[list[Span], list[Sums]]:
        """Train for the steps of the schedule. Returns this worker's spans, and its part of each step's sums."""
        with self.progress or nullcontext():
            return self.worker.run(feed, first_step, learning_rate)

    @property
    def guards(self) -> bool:
        """Whether weights are kept from gradients that are not finite."""
        return self.worker.norm is not None and self.worker.norm.guards

    @property
    def broke(self) -> bool:
        """Whether the last step was skipped, and not for an overflow that a smaller loss scale prevents."""
        return self.worker.norm is not None and self.worker.norm.broke

    def evaluate(self, feed: Feed, step: int, training: bool = False) -> Sums:
        """Only the loss of the schedule's micro-batches: this worker's part of it. With `training` layers do what they
        do in a step."""
        with self.progress or nullcontext():
            return self.evaluator.run(feed, step, training)

    def check_replicas(self) -> None:
        """Compare the copies of each stage to the bit. Collective. Raises RuntimeError where they differ."""
        differing = []
        for stage in sorted({stage for _, stage in self.stages}, reverse=True):
            here = {digest(module) for place, module in self.stages.items() if place[1] == stage}
            everywhere = self.grid.replicas(holders(self.schedule, [stage])).allgather(here)
            if len(set().union(*everywhere)) > 1:
                differing.append(str(stage))
        if differing:
            raise RuntimeError(f"the replicas of stage {', '.join(differing)} differ")

    def close(self) -> None:
        """Give back the memory that replicas share. Collective."""
        if self.progress:
            self.progress.close()
        self.worker.gradients.close()

    def abandon(self) -> None:
        """A rank has died, and the communicators are revoked: await nobody any more. Only states are of use from now
        on."""
        if self.progress:
            self.progress.close()
        for mailbox in (self.worker.mailbox, self.evaluator.mailbox):
            mailbox.abandon()
        self.worker.gradients.abandon()
        self.worker.stash.clear()

    def _gradients(self, settings: Settings) -> Gradients:
        return Gradients(
            self.grid,
            self.schedule,
            self.stages,
            ties_across(self.model.tied, self.cuts),
            self.patience,
            sharded=settings.sharded,
            bucket_bytes=settings.bucket_bytes,
            shared_from_bytes=settings.shared_from_bytes,
            staging=settings.staging,
        )

    def _norm(self, settings: Settings) -> GlobalNorm | None:
        guards = settings.guards and self.schedule.updates == 1
        if not (settings.clip or settings.loss_scale or guards):
            return None
        scale = LossScale(settings.loss_scale) if settings.loss_scale else None
        return GlobalNorm(self.grid.world, self.patience, settings.clip, scale, guards)

    def layers(self) -> list[dict[str, torch.Tensor]] | None:
        """On rank 0 the parameters and buffers of all layers, by name, in memory of their own. Collective.

        They are those of the first pipeline of the first group.
        """
        rank, found = self.grid.world.rank, []
        for stage, layers in enumerate(self.cuts):
            holder = self.schedule.pipes[0][stage]
            for index in layers:
                if rank == holder == 0:
                    state = self.stages[0, stage].layer(index).state_dict()
                    found.append({name: tensor.to("cpu", copy=True) for name, tensor in state.items()})
                elif rank == holder:
                    self._give(self.stages[0, stage].layer(index))
                elif rank == 0:
                    found.append(self._take(index, holder))
        return found if rank == 0 else None

    def layer_states(self) -> Iterator[tuple[int, LayerState]]:
        """The states of the layers that this rank answers for, between two steps, on the CPU; they may share memory
        with what is trained. One rank answers for each layer. Collective."""
        for stage, place in self._first_places():
            comm = self.grid.replicas(holders(self.schedule, [stage]))
            layers = {index: self.stages[place].layer(index) for index in self.cuts[stage]}
            copies = Copies(comm, self.patience, self._limit_bytes)
            yield from copies.states(layers, self.worker.weights[place])

    @property
    def held_layers(self) -> list[int]:
        """Those of this rank's stages."""
        return [index for stage, _ in self._first_places() for index in self.cuts[stage]]

    def state_of(self, index: int) -> LayerState:
        """The state of a layer that this rank holds, all of it; it may share memory with what is trained."""
        place = next(place for stage, place in self._first_places() if index in self.cuts[stage])
        return held_state(self.stages[place].layer(index), self.worker.weights[place])

    def take_up(self, read: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        """Go on from the states of all layers; `read(index)` has one's. Raises InputError."""
        for stage, _ in self._first_places():
            for index in self.cuts[stage]:
                state = read(index)
                for place, module in self.stages.items():
                    if place[1] == stage:
                        take_up(index, module.layer(index), self.worker.weights[place], state)

    @property
    def loss_scale(self) -> LossScale | None:
        """Of fp16."""
        return self.worker.norm.loss_scale if self.worker.norm else None

    def _first_places(self) -> list[tuple[int, Place]]:
        """The stages of this rank, with a place that has each; in one order on all ranks."""
        first = {place[1]: place for place in reversed(self.stages)}
        return sorted(first.items())

    def _give(self, layer: torch.nn.Module) -> None:
        for tensor in layer.state_dict().values():
            whole = tensor.cpu().contiguous()
            self.patience.wait(*(self.grid.world.Isend(piece, 0) for piece in pieces(whole, self._limit_bytes)))

    def _take(self, index: int, rank: int) -> dict[str, torch.Tensor]:
        shapes = make_layer(self.model, index, seed=0, dtype=self.dtype, device="meta").state_dict()
        state = {name: torch.empty(shape.shape, dtype=shape.dtype, device="cpu") for name, shape in shapes.items()}
        for tensor in state.values():
            self.patience.wait(*(self.grid.world.Irecv(piece, rank) for piece in pieces(tensor, self._limit_bytes)))
        return state

    @property
    def _limit_bytes(self) -> int:
        return self.worker.mailbox.delivery.limit_bytes

    def _traces(self, inputs: Sequence[Sequence[Spec]]) -> list[Trace]:
        return [trace(self.model, tuple(specs), self.dtype) for specs in inputs]

    def _mailbox(self, schedule: Schedule, settings: Settings) -> Mailbox:
        boundaries = Boundaries(schedule, self.cuts, self.traces)
        bell = self.grid.bell_of(self.grid.pipeline)
        return Mailbox(
            self.grid.pipeline, schedule, boundaries, self.patience, settings.delivery, settings.staging, bell
        )


def check_job(
    schedule: Schedule, model: Model, cuts: Sequence[range], recipe: Recipe, sharded: bool, fp16: bool
) -> None:
    """Raises InputError if these do not go together."""
    _check_dtypes(model)
    _check_ties(model)
    if sharded and not recipe.by_element:
        raise InputError(
            f"{recipe.name} looks at whole tensors, shares are cut anywhere: take adamw or sgd, "
            "or set optimizer_sharding=none"
        )
    check_compatible(schedule, tied=bool(ties_across(model.tied, cuts)), sharded=sharded, fp16=fp16)


def check_forwards(
    model: Model, entering: Sequence[Sequence[Spec]], dtype: torch.dtype, recomputed: bool, copies: int
) -> None:
    """Raises InputError if a layer's forward writes to what others, or it once more, may read. `entering` are the
    tensors that enter each layer; of each stage there are so many copies."""
    for index, factory in enumerate(model.layers):
        if model.layers.index(factory) != index:
            continue
        layer = make_layer(model, index, seed=0, dtype=dtype, device="meta")
        writes, name = writes_of(layer, entering[index]), f"layer {index}, {type(layer).__name__},"
        if writes.inputs:
            raise InputError(
                f"{name} writes to its inputs, which are the stage's before it too, or kept to recompute: give it "
                "inplace=False, or let its forward begin with x.clone()"
            )
        if writes.buffers and (recomputed or copies > 1):
            fault, remedy = f"its {copies} replicas would differ", "a scheme of one pipeline on as many ranks as depth"
            if recomputed:
                fault, remedy = "recomputation forwards it twice", "recompute=none"
            raise InputError(
                f"{name} writes its buffer {writes.buffers[0]} in each forward, and {fault}: take LayerNorm or "
                f"GroupNorm for a BatchNorm, or {remedy}"
            )


def _check_dtypes(model: Model) -> None:
    """Raises InputError if a layer has what gradients cannot add up in, or checkpoints cannot hold."""
    for index, factory in enumerate(model.layers):
        if model.layers.index(factory) == index:  # else it is like one before
            for name, tensor in make_layer(model, index, seed=0, device="meta").state_dict().items():
                kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                if kind not in DTYPES:
                    raise InputError(
                        f"{name} of layer {index} is {str(kind).removeprefix('torch.')}, in which nothing is trained "
                        "or saved: keep it as real numbers such as float32 or int64, or if it never changes as a "
                        "buffer with persistent=False"
                    )


def _check_ties(model: Model) -> None:
    """Raises InputError if a tied parameter is trained in one layer and frozen in another."""
    for group in model.tied:
        layers = [(make_layer(model, index, seed=0, device="meta"), name) for index, name in group]
        if len({layer.get_parameter(name).requires_grad for layer, name in layers}) > 1:
            (index, name), *others = group
            raise InputError(
                f"{name} of layer {index} is tied to {', '.join(f'{n} of layer {i}' for i, n in others)}, "
                "but not all are frozen: freeze all or none of them"
            )
