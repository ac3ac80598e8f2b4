"""A model is a list of layers, each made by rule from (seed, layer index), on whichever rank needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LayerFactory = Callable[[], nn.Module]
"""Makes one layer, from tensors to a tensor or a tuple of them; its weights come from torch's default generator."""

Loss = Callable[..., tuple[Tensor, Tensor]]
"""(*outputs of the last layer, targets) -> sum, count."""

IGNORED = -100
"""The target of a token that is not predicted."""


@dataclass(frozen=True)
class Model:
    """Layers in the order in which data passes them, and the loss of the last one's outputs.

    A layer is called with all tensors that the one before puts out. `loss(*outputs, targets)` gives a SUM and the
    count that it is to be divided by, in the dtype of the sum: the mean is taken once, over the whole mini-batch.
    A token model sums over the targets that are not `IGNORED`; `targets` is a tensor, or a tuple as the data has it.
    `tied` has groups of (layer index, parameter name) that are one parameter; the first of a group is its owner.
    """

    layers: tuple[LayerFactory, ...]
    loss: Loss
    tied: tuple[tuple[tuple[int, str], ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        members = [member for group in self.tied for member in group]
        if len(set(members)) < len(members):
            raise ValueError(f"a parameter is tied twice: {members}")
        if any(not 0 <= layer < len(self.layers) for layer, _ in members):
            raise ValueError(f"tied parameters {members} of a model of {len(self.layers)} layers")


def make_layer(
    model: Model,
    index: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Layer `index` with the weights that (seed, index) stand for, whatever was built before, and where.

    Numbers are drawn in float32 on the CPU and then cast, so that precision and device change rounding only. The
    caller's random state stays as it is. On device "meta" nothing is drawn and nothing allocated.
    Tied parameters hold their owner's values, in memory of their own.
    """
    index = range(len(model.layers))[index]
    with drawing_from(keyed_seed(seed, index)), torch.device("meta" if _is_meta(device) else "cpu"):
        layer = model.layers[index]()
    layer._apply(lambda tensor: tensor.to(device, in_precision(tensor.dtype, dtype)))  # as Module.to does
    if not _is_meta(device):
        _take_tied_values(model, index, layer, seed)
    return layer


def in_precision(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """What tensors of `dtype` become in a model of `precision`: floating and complex ones change, no others. In half
    precision torch computes with no complex numbers: they are single then."""
    if dtype.is_complex:
        return torch.complex128 if precision == torch.float64 else torch.complex64
    return precision if dtype.is_floating_point else dtype


def parameter_count(model: Model) -> int:
    """How many numbers `model` learns, tied ones counted once."""
    copies = {member for group in model.tied for member in group[1:]}
    return sum(
        parameter.numel()
        for index in range(len(model.layers))
        for name, parameter in make_layer(model, index, seed=0, device="meta").named_parameters()
        if (index, name) not in copies
    )


def keyed_seed(*parts: int) -> int:
    """A seed of 63 bits that is a function of `parts` alone, the same on every machine."""
    key = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def cross_entropy(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum in nats of the cross entropy of logits [..., vocabulary] against targets [...], and the count of targets.

    `IGNORED` targets count in neither. Half-precision logits are summed in float32.
    """
    logits = output if output.dtype == torch.float64 else output.float()
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum().to(loss.dtype)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """torch's default generator at `seed`, in float32; afterwards both as they were."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float32)
        # Not torch.manual_seed: it would reseed the accelerators too, which fork_rng leaves alone here.
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _take_tied_values(model: Model, index: int, layer: nn.Module, seed: int) -> None:
    for (owner, owner_name), *copies in model.tied:
        for copy, name in copies:
            if copy == index:
                source = layer if owner == index else make_layer(model, owner, seed)
                with torch.no_grad():
                    layer.get_parameter(name).copy_(source.get_parameter(owner_name))


def _is_meta(device: torch.device | str) -> bool:
    return torch.device(device).type == "meta"
