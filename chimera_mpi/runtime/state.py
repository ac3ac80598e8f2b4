"""The state of a layer as named tensors, in which no layout shows: what is saved, sent and taken up again.

    weights/NAME            parameters, in the precision that the optimizer works in, and buffers
    optimizer/NAME/KEY      what torch's optimizers keep of a parameter under KEY; counts are tensors without dimensions

A parameter that is tied to another layer's is in the state of both: each layer's state is whole by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint import OPTIMIZER, WEIGHTS
from ..errors import InputError
from .grid import Comm
from .mailbox import pieces
from .waiting import Patience
from .weights import Trained, Weights

LayerState = dict[str, torch.Tensor]


def tensors_of(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name; a parameter that has two names comes twice."""
    yield from layer.state_dict(keep_vars=True).items()


@dataclass(frozen=True)
class Copies:
    """The ranks that hold a stage, and how they speak to each other. One of them answers for each layer."""

    comm: Comm
    patience: Patience
    limit_bytes: int  # of a message

    def states(self, layers: Mapping[int, nn.Module], weights: Weights) -> Iterator[tuple[int, LayerState]]:
        """The states of the layers that this rank answers for. They may share memory with what is trained.

        Collective.
        """
        kinds = self._kinds(weights)
        for index, layer in layers.items():
            root, state = index % self.comm.size, LayerState()
            for name, tensor in tensors_of(layer):
                trained = weights.trained.get(tensor) if isinstance(tensor, nn.Parameter) else None
                if trained and trained.parts:
                    state.update(self._shared_out(name, tensor, trained, weights, kinds, root))
                elif self.comm.rank == root:
                    state.update(_held(name, tensor, trained, weights))
            if self.comm.rank == root:
                yield index, state

    def _shared_out(
        self, name: str, tensor: torch.Tensor, trained: Trained, weights: Weights, kinds: dict[str, Any], root: int
    ) -> LayerState:
        """On `root` what there is of a parameter of which each replica has a part. Collective."""
        state = _kept(trained, weights)
        if trained.dtype == tensor.dtype:
            whole = on_host(tensor) if self.comm.rank == root else tensor
        else:
            whole = self._whole(trained, trained.weight, trained.dtype, tensor.shape, root)
        found = {WEIGHTS + name: whole}
        for key, kind in kinds.items():
            is_part = isinstance(kind, torch.dtype)
            value = self._whole(trained, state.get(key), kind, tensor.shape, root) if is_part else kind
            found[f"{OPTIMIZER}{name}/{key}"] = value
        return found

    def _kinds(self, weights: Weights) -> dict[str, Any]:
        """What an optimizer of shares keeps by key: the dtype of what is as long as a weight; or a count, the same for
        all weights. Ranks that have no share know it from the others."""
        kinds: dict[str, Any] = {}
        if any(trained.parts for trained in weights.trained.values()):
            states = [] if weights.optimizer is None else [s for s in weights.optimizer.state.values() if s]
            self.patience.wait(self.comm.Ibarrier())
            mine = {key: _kind(value) for state in states[:1] for key, value in state.items() if value is not None}
            for of_rank in self.comm.allgather(mine):
                kinds.update(of_rank)
        return kinds

    def _whole(
        self, trained: Trained, mine: torch.Tensor | None, dtype: torch.dtype, shape: torch.Size, root: int
    ) -> torch.Tensor:
        """On `root` what the replicas have parts of; elsewhere nothing of use. Collective."""
        if self.comm.rank != root:
            if mine is not None:
                part = on_host(mine)
                self.patience.wait(*(self.comm.Isend(piece, root) for piece in pieces(part, self.limit_bytes)))
            return torch.empty(0)
        whole = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
        parts = {rank: whole[part] for rank, part in enumerate(trained.parts) if part.start < part.stop}
        if mine is not None:
            parts.pop(root).copy_(mine)
        self.patience.wait(
            *(self.comm.Irecv(p, rank) for rank, part in parts.items() for p in pieces(part, self.limit_bytes))
        )
        return whole.view(shape)


def held_state(layer: nn.Module, weights: Weights) -> LayerState:
    """The state of a layer of which each replica has all. It may share memory with what is trained."""
    state = LayerState()
    for name, tensor in tensors_of(layer):
        trained = weights.trained.get(tensor) if isinstance(tensor, nn.Parameter) else None
        state.update(_held(name, tensor, trained, weights))
    return state


@torch.no_grad()
def take_up(index: int, layer: nn.Module, weights: Weights, state: Mapping[str, torch.Tensor]) -> None:
    """Go on from a layer's `state`. Raises InputError if it is not of such a layer."""
    for name, tensor in tensors_of(layer):
        whole = state.get(WEIGHTS + name)
        if whole is None or whole.shape != tensor.shape:
            there = "none" if whole is None else list(whole.shape)
            raise InputError(f"layer {index} has {name} of shape {list(tensor.shape)}, the state that it gets {there}")
        tensor.copy_(whole)
        trained = weights.trained.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if trained is None or trained.weight is None:
            continue
        trained.weight.copy_(_part(whole, trained))
        assert weights.optimizer is not None
        weights.optimizer.state[trained.weight] = {
            key: _counted(value, weights)
            if key == "step"
            else _part(value, trained).to(trained.weight.device, trained.weight.dtype, copy=True)
            for key, value in optimizer_state(state, name).items()
        }


def _held(name: str, tensor: torch.Tensor, trained: Trained | None, weights: Weights) -> LayerState:
    """What there is of a parameter or buffer of which each replica has all."""
    if trained is None or trained.weight is None:
        return {WEIGHTS + name: on_host(tensor)}
    kept = {key: value for key, value in _kept(trained, weights).items() if value is not None}
    optimizer = {f"{OPTIMIZER}{name}/{key}": on_host(value) for key, value in kept.items()}
    return {WEIGHTS + name: on_host(trained.weight), **optimizer}


def _kept(trained: Trained, weights: Weights) -> Mapping[str, Any]:
    """What this rank's optimizer keeps of a parameter, by key."""
    if trained.weight is None or weights.optimizer is None:
        return {}
    return weights.optimizer.state.get(trained.weight, {})


def optimizer_state(state: Mapping[str, torch.Tensor], name: str) -> LayerState:
    """By key what an optimizer has of the parameter `name`."""
    start = f"{OPTIMIZER}{name}/"
    found = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    return {key: value for key, value in found.items() if "/" not in key}


def on_host(value: torch.Tensor | int | float) -> torch.Tensor:
    """On the CPU, where it may be already."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)


def _kind(value: Any) -> torch.dtype | torch.Tensor:
    return value.dtype if isinstance(value, torch.Tensor) and value.dim() else on_host(value)


def _part(whole: torch.Tensor, trained: Trained) -> torch.Tensor:
    """Of a tensor that belongs to a parameter, what this rank's optimizer has of it."""
    return whole.flatten()[trained.part] if trained.parts else whole


def _counted(steps: torch.Tensor, weights: Weights) -> Any:
    """Where and as what optimizers keep it: torch's as floats, on the host, or where they are fused on the device."""
    if not steps.is_floating_point():
        return int(steps)
    assert weights.optimizer is not None and weights.masters is not None
    fused = weights.optimizer.defaults.get("fused")
    return steps.to(weights.optimizer.param_groups[0]["params"][0].device if fused else "cpu", copy=True)
