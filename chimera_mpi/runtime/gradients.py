"""Gradients in flat buffers, summed over the replicas of their stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import nn

from ..schedule import Place, Schedule
from .grid import Comm, Grid, Nearby, free_shared_bytes, holders
from .reduction import Layout, SharedMemory, StagedSum, Sum, by_messages, in_shared_memory, zeros
from .stage import Stage
from .staging import Direct, Staging
from .waiting import Patience

BUCKET_BYTES = 4 << 20
GRADIENT_IN_PARTS = (
    "got its gradient in several parts within one backward, after its bucket was sent: "
    "where it is checkpointed, give torch.utils.checkpoint use_reentrant=False"
)
SHARED_FROM_BYTES = 1 << 16  # of a stage's gradients: smaller ones travel as fast in messages


@dataclass(eq=False)
class Bucket:
    """Gradients that are summed together, in one buffer whose pieces are the parameters' `.grad`.

    `parameters` are those of each copy of a stage on this worker that adds to it. The sum starts once the copies in
    `after` are ready, and the buffer begins anew from zero once all have used it.
    """

    sum: Sum
    parameters: dict[Place, list[nn.Parameter]]  # in the order of the buffer, the same ones at each place
    comm: Comm
    after: set[Place]
    ready: set[Place] = field(default_factory=set)
    used: set[Place] = field(default_factory=set)
    divided: bool = False

    @property
    def mine(self) -> torch.Tensor:
        """The summed gradients that this rank has a use for."""
        return self.sum.mine

    @property
    def answers(self) -> bool:
        """Whether this rank adds the squares of what is `mine` to the norm of the model."""
        return self.sum.is_share or self.comm.rank == 0

    def cut(self, place: Place) -> Iterator[tuple[nn.Parameter, slice]]:
        """The parameters of which something is `mine`, and where."""
        start = -self.sum.start_at
        for parameter in self.parameters[place]:
            own = slice(max(start, 0), min(start + parameter.numel(), len(self.mine)))
            if own.start < own.stop:
                yield parameter, own
            start += parameter.numel()

    def is_ready(self, place: Place) -> bool:
        """Note that `place` is; whether this was the last one."""
        news = place not in self.ready
        self.ready.add(place)
        return news and self.ready == self.after

    def divide(self, by: float) -> torch.Tensor | None:
        """Make sums means; the sum of squares for which this rank answers, still on the device."""
        if self.divided:
            return None
        self.divided = True
        self.mine.div_(by)
        return sum_of_squares(self.mine) if self.answers else None

    def release(self, place: Place) -> None:
        self.used.add(place)
        if self.used == set(self.parameters):
            self.used.clear()
            self.ready.clear()
            self.divided = False
            self.sum.flat.zero_()
            self.sum.count.zero_()


class Gradients:
    """All gradients of one worker.

    Each stage has buckets, shared by its copies on this worker and filled from its last parameters to its first.
    Losses are sums: their gradients are summed over micro-batches and replicas, and divided once, by the number
    of target tokens, which rides in the first bucket. Tied parameters have a bucket of their own, summed over all
    that hold one of the tied stages.

    Ranks that share buckets start their sums in one order: workers are through with later stages first, and a tied
    parameter counts as of the earliest stage that has it, whichever stages a rank holds.
    """

    def __init__(
        self,
        grid: Grid,
        schedule: Schedule,
        stages: Mapping[Place, Stage],
        ties: Sequence[Tie],
        patience: Patience,
        *,
        sharded: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        shared_from_bytes: float = SHARED_FROM_BYTES,
        staging: Staging = Direct(),
    ):
        """With `sharded` each replica of a stage has the sums of a share of its gradients; of tied ones, of all."""
        self.grid, self.patience, self.stages, self.staging = grid, patience, stages, staging
        self.targets = 0.0  # of the mini-batch whose gradients were settled last
        self._pieces: dict[nn.Parameter, torch.Tensor] = {}
        self._of_place: dict[Place, list[Bucket]] = {place: [] for place in stages}
        self._counts: dict[Place, list[torch.Tensor]] = {place: [] for place in stages}
        self._under_way: list[Sum] = []
        self._memories: list[SharedMemory] = []
        self._started_by: dict[Place, list[Bucket]] = {place: [] for place in stages}
        ties = sorted(ties, key=lambda tie: -min(tie.stages))
        copies = [find_copies(tie, stages) for tie in ties]
        self._tied = {id(parameter) for tie in copies for parameters in tie.values() for parameter in parameters}
        self._shared_from_bytes = shared_from_bytes
        for stage in sorted({stage for _, stage in stages}, reverse=True):
            own = {place: self._own(place) for place in stages if place[1] == stage}
            runs = bucket_runs(next(iter(own.values())), bucket_bytes)
            parameters = [{place: mine[run] for place, mine in own.items()} for run in runs]
            self._add(parameters, set(own), grid.replicas(holders(schedule, [stage])), sharded, counted=True)
        self._own_buckets = {place: tuple(buckets) for place, buckets in self._of_place.items()}
        self._bucket_of = {
            place: [at for at, b in reversed([*enumerate(buckets)]) for _ in b.parameters[place]]
            for place, buckets in self._own_buckets.items()
        }
        for tie, here in zip(ties, copies, strict=True):
            if here:
                after = {place for place in stages if place[1] >= min(tie.stages)}
                self._add([here], after, grid.replicas(holders(schedule, tie.stages)), sharded=False, counted=False)
        if self._memories:
            grid.closing.append(self.close)

    def close(self) -> None:
        """Give back the memory that is shared, once; the gradients are gone. Collective."""
        memories, self._memories = self._memories, []
        if memories:
            for parameter in self._pieces:
                parameter.grad = None
        for memory in memories:
            self.staging.unpin(memory.bytes[memory.rank])
            memory.close()

    def abandon(self) -> None:
        """Forget the sums under way, once MPI writes to their memory no more."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            self.patience.outlive(*each.requests)
        for counts in self._counts.values():
            counts.clear()

    @property
    def where(self) -> str:
        """How they are summed, for people."""
        return "sums in shared memory" if self._memories else "sums by messages"

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where the gradient of a parameter adds up; None for one that is frozen."""
        return self._pieces.get(parameter)

    def broken(self) -> set[nn.Parameter]:
        """The parameters whose gradients are not finite, as far as this rank has their sums."""
        return {
            parameter
            for bucket in {bucket for buckets in self._of_place.values() for bucket in buckets}
            for place in bucket.parameters
            for parameter, own in bucket.cut(place)
            if not bool(torch.isfinite(bucket.mine[own]).all())
        }

    def buckets(self, place: Place) -> tuple[Bucket, ...]:
        """Those of the stage's own parameters, without tied ones."""
        return self._own_buckets[place]

    def count(self, place: Place, targets: torch.Tensor) -> None:
        """Note a micro-batch's number of target tokens, of those whose gradients `place` sums next."""
        self._counts[place].append(targets)

    @contextmanager
    def filling(self, place: Place) -> Iterator[None]:
        """Around the op that makes the last gradients of `place`: start each bucket as soon as it is full.

        They start in one order, whatever fills first, so that all replicas start them alike.
        """
        buckets, bucket_of = self._own_buckets[place], self._bucket_of[place]
        own = self._own(place)
        missing: list[set[torch.Tensor]] = [set() for _ in buckets]
        for at, parameter in zip(bucket_of, own, strict=True):
            missing[at].add(parameter)
        pending = list(reversed(range(len(buckets))))

        def fill(at: int, parameter: torch.Tensor) -> None:
            if at not in pending:
                raise RuntimeError(f"a parameter {list(parameter.shape)} of stage {place[1]} {GRADIENT_IN_PARTS}")
            missing[at].discard(parameter)
            while pending and not missing[pending[-1]]:
                self._start(buckets[pending.pop()], place)
            self.poke()

        whole_at_once = self.stages[place].in_one_layer() if self._may_call_mpi_from_hooks() else set()
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(fill, at))
            for parameter, at in zip(own, bucket_of, strict=True)
            if parameter in whole_at_once
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _may_call_mpi_from_hooks(self) -> bool:
        """On a device autograd runs hooks in a thread of its own."""
        return self.staging.device.type == "cpu" or MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def start(self, place: Place) -> None:
        """The gradients of `place` are whole: start what has not started of its all-reduce."""
        for bucket in self._started_by[place]:
            self._start(bucket, place)

    def poke(self) -> None:
        """Drive the sums under way, in the order in which they were started."""
        left = []
        for at, under_way in enumerate(self._under_way):
            if not under_way.drive():
                left.append(under_way)
            if not under_way.in_order:
                left += self._under_way[at + 1 :]
                break
        self._under_way = left

    def settle(self, place: Place, loss_scale: float = 1.0, meanwhile: Callable[[], object] = lambda: None) -> float:
        """Wait for the sums over all replicas, and make them means over the target tokens of the mini-batch.

        Sums in shared memory do not go through MPI: `meanwhile` drives what others wait for before they add theirs.
        Returns the sum of their squares, of those for which this rank answers: over all places of all
        ranks every parameter of the model is in it once.
        """
        self.await_sums(place, meanwhile)
        self.targets = self._own_buckets[place][0].sum.count.item()
        squares = [bucket.divide(max(self.targets, 1.0) * loss_scale) for bucket in self._of_place[place]]
        mine = [of_bucket for of_bucket in squares if of_bucket is not None]
        return math.fsum(torch.stack(mine).tolist()) if mine else 0.0  # one wait for the device

    def await_sums(self, place: Place, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for the sums over all replicas."""
        awaited = [bucket.sum for bucket in self._of_place[place]]
        bells = [of.bell for of in awaited]
        self.patience.until(partial(self._have_come, awaited, meanwhile), bells[0] if all(bells) else None)

    def settled(self, place: Place) -> bool:
        """Whether `settle` has been called since the last `release`."""
        return self._own_buckets[place][0].divided

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in {bucket for buckets in self._of_place.values() for bucket in buckets}:
            bucket.mine.mul_(factor)

    def release(self, place: Place) -> None:
        """The weights of `place` are updated: its gradients begin anew from zero."""
        for bucket in self._of_place[place]:
            bucket.release(place)

    def _own(self, place: Place) -> list[nn.Parameter]:
        """The parameters that the stage now has, without frozen and tied ones."""
        return [p for p in trainable(self.stages[place]) if id(p) not in self._tied]

    def _start(self, bucket: Bucket, place: Place) -> None:
        if bucket is self._own_buckets[place][0] and (counts := self._counts[place]):
            bucket.sum.count += torch.stack(counts).double().sum()
            counts.clear()
        if bucket.is_ready(place):
            bucket.sum.start()
            self._under_way.append(bucket.sum)

    def _have_come(self, sums: Sequence[Sum], meanwhile: Callable[[], object]) -> bool:
        meanwhile()
        self.poke()
        return not any(one is other for one in sums for other in self._under_way)

    def _add(
        self,
        parameters: list[dict[Place, list[nn.Parameter]]],
        after: set[Place],
        comm: Comm,
        sharded: bool,
        counted: bool,
    ) -> None:
        """Buckets whose pieces are the gradients of the parameters, which are the same ones at each place.

        The first of them has the count, if there is one.
        """
        firsts = [next(iter(of_bucket.values())) for of_bucket in parameters]
        layouts = [
            Layout(sum(p.numel() for p in first), counted and first is firsts[0], summed_in(first)) for first in firsts
        ]
        for of_bucket, first, of_rank in zip(parameters, firsts, self._sums(comm, layouts, sharded), strict=True):
            sizes = [p.numel() for p in first]
            bucket = Bucket(of_rank, of_bucket, comm, after)
            for place in after:
                self._started_by[place].append(bucket)
            for place, same in of_bucket.items():
                self._of_place[place].append(bucket)
                for p, piece in zip(same, of_rank.flat[: sum(sizes)].split(sizes), strict=True):
                    self._pieces[p] = piece.view_as(p)
                    bind(p, self._pieces[p])

    def _sums(self, comm: Comm, layouts: Sequence[Layout], sharded: bool) -> list[Sum]:
        """Sums of buffers on this rank's device. Collective over `comm`."""
        if comm.size == 1:
            return by_messages(comm, layouts, sharded, partial(zeros, device=self.staging.device))
        sums = self._sums_for_mpi(comm, layouts, sharded)
        return sums if self.staging.in_place else [StagedSum(each, self.staging) for each in sums]

    def _sums_for_mpi(self, comm: Comm, layouts: Sequence[Layout], sharded: bool) -> list[Sum]:
        """In shared memory where replicas share a node and it pays, else by messages. Collective over `comm`."""
        nearby = self._nearby(comm, sum(layout.size * layout.dtype.itemsize for layout in layouts))
        if nearby is None or (sharded and nearby.rail.size > 1):
            return by_messages(comm, layouts, sharded, self.staging.summed)
        memory, sums = in_shared_memory(nearby, layouts, sharded, self.grid.bell_of(nearby.node))
        self.staging.pin(memory.bytes[memory.rank])
        self._memories.append(memory)
        return sums

    def _nearby(self, comm: Comm, nbytes: int) -> Nearby | None:
        """Those with whom to share `nbytes` of memory, if it pays and there is room for all ranks of the node."""
        if comm.size == 1 or nbytes < self._shared_from_bytes:
            return None
        nearby = self.grid.nearby(comm)
        if nearby is None or nearby.node.size == 1:
            return None
        mine = sum(p.numel() * accumulated_in(p.dtype).itemsize for s in self.stages.values() for p in trainable(s))
        has_room = not self.staging.sums_on_device and mine * self.grid.node.ranks < 0.8 * free_shared_bytes()
        return nearby if comm.allreduce(has_room, MPI.LAND) else None


def bucket_runs(parameters: Sequence[nn.Parameter], limit_bytes: int) -> list[slice]:
    """Runs of parameters of at most `limit_bytes` of gradients, or of one parameter, the last run first."""
    ends, nbytes = [len(parameters)], 0
    for at in reversed(range(len(parameters))):
        size = parameters[at].numel() * accumulated_in(parameters[at].dtype).itemsize
        if nbytes and nbytes + size > limit_bytes:
            ends.append(at + 1)
            nbytes = 0
        nbytes += size
    return [slice(start, end) for end, start in zip(ends, [*ends[1:], 0], strict=True)]


def sum_of_squares(flat: torch.Tensor, row: int = 1024) -> torch.Tensor:
    """Row by row in the dtype of `flat`, the rows in double: to 1e-6 of singles, at a hundredth of the time that double
    takes throughout."""
    whole = len(flat) // row * row
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1).double().square().sum()
    return rows + flat[whole:].double().square().sum()


def summed_in(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    return accumulated_in(parameters[0].dtype) if parameters else torch.float64


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Gradients of half precision add up, and are reduced, in single."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def bind(parameter: nn.Parameter, piece: torch.Tensor) -> None:
    """Let autograd add the gradient of `parameter` to `piece`, which may have a wider type."""
    if piece.dtype == parameter.dtype:
        parameter.grad = piece
    else:
        parameter.register_post_accumulate_grad_hook(partial(_pour, piece))


def _pour(piece: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        piece.add_(parameter.grad)
        parameter.grad = None


class Tie(NamedTuple):
    """A parameter that several stages hold: (stage, layer, name) of each copy."""

    copies: tuple[tuple[int, int, str], ...]

    @property
    def stages(self) -> set[int]:
        return {stage for stage, _, _ in self.copies}


def ties_across(model_ties: Sequence[Sequence[tuple[int, str]]], cuts: Sequence[range]) -> list[Tie]:
    """Those ties of a model, groups of (layer, parameter name), that the cut into stages separates."""
    stage_of = {layer: stage for stage, layers in enumerate(cuts) for layer in layers}
    ties = [Tie(tuple((stage_of[layer], layer, name) for layer, name in group)) for group in model_ties]
    return [tie for tie in ties if len(tie.stages) > 1]


def trainable(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def find_copies(tie: Tie, stages: Mapping[Place, Stage]) -> dict[Place, list[nn.Parameter]]:
    """This worker's copies of a tied parameter; a stage that ties layers of its own has one."""
    copies: dict[Place, list[nn.Parameter]] = {}
    for place, stage in stages.items():
        here = [stage.layer(layer).get_parameter(name) for at, layer, name in tie.copies if at == place[1]]
        if here and here[0].requires_grad:
            copies[place] = here[:1]
    return copies
