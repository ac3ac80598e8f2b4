"""The weights of one copy of a stage, and their versions where a stream needs several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import nn
from torch.autograd.graph import increment_version

from ..schedule import COMPUTE, Kind, Op, Place, Schedule, used_versions
from .gradients import Bucket, Gradients, bind
from .optimizer import Recipe, decays
from .stage import Stage, set_parameter
from .staging import Staging
from .waiting import Patience


class Trained(NamedTuple):
    """What the optimizers of a stage's replicas have of a parameter: each all of it, as `weight`; or of its elements,
    in a row, replica r `parts[r]`, this one as `weight`, if any."""

    weight: nn.Parameter | None
    dtype: torch.dtype
    parts: tuple[slice, ...] = ()
    replica: int = 0  # this one

    @property
    def part(self) -> slice:
        return self.parts[self.replica] if self.parts else slice(None)


class Weights:
    """Weights that are all of one version: each op uses those that are there.

    The optimizer works on them, or where they are of half precision on masters in single.
    """

    def __init__(self, stage: Stage, recipe: Recipe, gradients: Gradients):
        self.stage = stage
        self.newest = dict(stage.named_parameters())
        self.pieces = {n: piece for n, p in self.newest.items() if (piece := gradients.of(p)) is not None}
        self.masters = {name: _master(self.newest[name], piece) for name, piece in self.pieces.items()}
        self.optimizer = recipe.build(self.masters.values())
        self.trained = {self.newest[name]: Trained(m, m.dtype) for name, m in self.masters.items()}

    def use(self, op: Op) -> None:
        """Let the stage have the weights that `op` must see."""

    def flush(self) -> None:
        """The schedule is done: let the stage have the newest weights."""

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        """Step the optimizer with the gradients that have added up."""
        if self.optimizer:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            # Fused optimizers write without telling autograd, which must not use a graph of older weights.
            increment_version(self.masters.values())
        for name, master in self.masters.items():
            if master is not self.newest[name]:
                self.newest[name].copy_(master)


def _master(parameter: nn.Parameter, piece: torch.Tensor) -> nn.Parameter:
    if piece.dtype == parameter.dtype:
        return parameter
    master = nn.Parameter(parameter.detach().to(piece.dtype))
    master.grad = piece
    return master


class ShardedWeights(Weights):
    """Weights of which each replica of the stage updates a share, and has masters and optimizer state of that only.

    Those of a bucket lie in one buffer; after an update the replicas gather each other's shares. Tied weights are
    updated by all.
    """

    def __init__(self, stage: Stage, recipe: Recipe, gradients: Gradients, place: Place, patience: Patience):
        self.stage, self.patience = stage, patience
        self.newest = dict(stage.named_parameters())
        self.shares = [Share(bucket, place, gradients.staging) for bucket in gradients.buckets(place)]
        self.trained = {p: of_p for share in self.shares for p, of_p in share.cut(place)}
        self.masters = {
            name: _master(parameter, piece)
            for name, parameter in self.newest.items()
            if parameter not in self.trained and (piece := gradients.of(parameter)) is not None
        }
        self.trained.update({self.newest[name]: Trained(m, m.dtype) for name, m in self.masters.items()})
        mine = [(of_p.weight, decays(p)) for p, of_p in self.trained.items() if of_p.weight is not None]
        self.optimizer = recipe.build_of([w for w, decay in mine if decay], [w for w, decay in mine if not decay])

    def use(self, op: Op) -> None:
        for share in self.shares:
            share.settle(self.patience)

    def flush(self) -> None:
        for share in self.shares:
            share.settle(self.patience)

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        super().update(learning_rate)
        for share in self.shares:
            share.gather()


class Share:
    """This rank's part of the weights of a bucket: `master` is what the optimizer works on."""

    def __init__(self, bucket: Bucket, place: Place, staging: Staging):
        self.bucket, self.start = bucket, bucket.sum.start_at
        parameters, size = bucket.parameters[place], len(bucket.sum.flat)
        dtype = parameters[0].dtype if parameters else torch.float32
        self.mirror = staging.mirror_of(staging.host(size, dtype))
        self.flat = self.mirror.tensor
        _move_to(self.flat, parameters)
        self.own = slice(self.start, self.start + size // bucket.comm.size)
        self.seen = self.flat[self.own]
        self.master = self.seen.to(bucket.mine.dtype)
        self.gathering: MPI.Request | None = None

    def cut(self, place: Place) -> Iterator[tuple[nn.Parameter, Trained]]:
        """Each parameter, and the piece of the share that is of it, with its gradient."""
        start, size = 0, self.own.stop - self.own.start
        for parameter in self.bucket.parameters[place]:
            numel, weight = parameter.numel(), None
            firsts = [min(max(rank * size - start, 0), numel) for rank in range(self.bucket.comm.size + 1)]
            parts = tuple(map(slice, firsts, firsts[1:]))
            replica = self.bucket.comm.rank
            part = parts[replica]
            if part.start < part.stop:
                here = slice(start + part.start - self.start, start + part.stop - self.start)
                weight = nn.Parameter(self.master[here])
                weight.grad = self.bucket.mine[here]
            yield parameter, Trained(weight, self.master.dtype, parts, replica)
            start += numel

    def gather(self) -> None:
        """Start to fetch what the other replicas have updated."""
        if self.master is not self.seen:
            self.seen.copy_(self.master)
        self.mirror.fetch(self.own).synchronize()
        memory = self.mirror.memory
        whole = MPI.buffer.fromaddress(memory.data_ptr(), memory.nbytes)
        self.gathering = self.bucket.comm.Iallgather(MPI.IN_PLACE, [whole, self.seen.nbytes, MPI.BYTE])

    def settle(self, patience: Patience) -> None:
        """Have all that was gathered."""
        if self.gathering is not None:
            patience.wait(self.gathering)
            self.gathering = None
            self.mirror.bring()


def _move_to(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Move the parameters' values to a buffer, in their order."""
    pieces = flat[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        piece.copy_(parameter.detach().flatten())
        parameter.data = piece.view_as(parameter)


class VersionedWeights(Weights):
    """Weights of a stream: a micro-batch's forward and backward see one version (PipeDream, Section 3.3).

    The stage sees parameters that share the memory of the newest version. An update first moves the newest to a
    copy if what they hold is still needed. All versions add to one gradient.
    """

    def __init__(self, stage: Stage, recipe: Recipe, gradients: Gradients, schedule: Schedule, place: Place):
        super().__init__(stage, recipe, gradients)
        first_name = {parameter: name for name, parameter in self.newest.items()}
        named = stage.named_parameters(remove_duplicate=False)
        self.names = {name: first_name[parameter] for name, parameter in named}
        self.version_of = {op.index: v for op, v in used_versions(schedule).items() if op.place == place}
        self.needed_until = last_uses(schedule, place, self.version_of)
        self.most_held = 1
        self.version, self.current = 0, -1  # the newest version, and the one that the stage has
        self.held = {0: self._seen()}

    def use(self, op: Op) -> None:
        version = self.version_of[op.index]
        if version != self.current:
            self.current = version
            self._show(self.held[version])

    def flush(self) -> None:
        self.version, self.current = 0, -1
        self.held = {0: self._seen()}
        self._show(self.newest)

    def update(self, learning_rate: float) -> None:
        needed = {v for v in self.held if self.needed_until.get(v, -1) > self.version}
        if self.version in needed:
            for parameter in self.newest.values():
                parameter.data = parameter.data.clone()
        super().update(learning_rate)
        self.version += 1
        self.held = {**{v: self.held[v] for v in needed}, self.version: self._seen()}
        self.most_held = max(self.most_held, len(self.held))

    def _show(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, first_name in self.names.items():
            set_parameter(self.stage, name, parameters[first_name])

    def _seen(self) -> dict[str, nn.Parameter]:
        """Parameters for the stage that share memory and gradients with the newest, but not their count of writes."""
        return {name: self._alias(name, parameter) for name, parameter in self.newest.items()}

    def _alias(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        alias = nn.Parameter(parameter.data, parameter.requires_grad)
        if name in self.pieces:
            bind(alias, self.pieces[name])
        return alias


def last_uses(schedule: Schedule, place: Place, version_of: dict[int, int]) -> dict[int, int]:
    """For each version, the number of updates that come before the last op that uses it."""
    updates, until = 0, {}
    for op in schedule.orders[schedule.pipes[place[0]][place[1]]]:
        if op.place == place and op.kind in COMPUTE:
            until[version_of[op.index]] = updates
        elif op.place == place and op.kind is Kind.UPDATE:
            updates += 1
    return until


def weights_of(
    stage: Stage, recipe: Recipe, gradients: Gradients, schedule: Schedule, place: Place, patience: Patience
) -> Weights:
    """What the schedule and the gradients call for: several versions for several updates, shares of shared sums."""
    if schedule.updates > 1:
        return VersionedWeights(stage, recipe, gradients, schedule, place)
    if gradients.buckets(place)[0].sum.is_share:
        return ShardedWeights(stage, recipe, gradients, place, patience)
    return Weights(stage, recipe, gradients)
