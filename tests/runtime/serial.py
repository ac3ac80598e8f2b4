"""One process on the whole mini-batch: what every synchronous scheme must equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from chimera_mpi.models import Model, keyed_seed, make_layer
from chimera_mpi.runtime.optimizer import Recipe


@dataclass
class Serial:
    """A plain loop: no schedule, no stage, no message. Layers hand on contiguous tensors, as dropout's draws follow
    the order of memory."""

    model: Model
    seed: int = 0
    dtype: torch.dtype = torch.float64
    recipe: Recipe = Recipe()
    clip: float | None = None

    def __post_init__(self):
        self.layers = torch.nn.ModuleList(
            make_layer(self.model, i, self.seed, dtype=self.dtype) for i in range(len(self.model.layers))
        )
        for group in self.model.tied:
            (owner, owner_name), *others = group
            for index, name in others:
                path, _, attribute = name.rpartition(".")
                parameter = self.layers[owner].get_parameter(owner_name)
                setattr(self.layers[index].get_submodule(path), attribute, parameter)
        self.optimizer = self.recipe.build(p for p in self.layers.parameters() if p.requires_grad)

    def _seed(self, step, number, index):
        torch.default_generator.manual_seed(keyed_seed(self.seed, step, number, index))

    @torch.no_grad()
    def evaluate(self, micro_batches):
        """The loss without dropout."""
        self.layers.eval()
        sums = [self.model.loss(*self._forward(inputs), targets) for inputs, targets in micro_batches]
        return (sum(loss for loss, _ in sums) / sum(count for _, count in sums)).item()

    def _forward(self, inputs, before_layer=lambda index: None):
        tensors = as_tuple(inputs)
        for index, layer in enumerate(self.layers):
            before_layer(index)
            tensors = tuple(tensor.contiguous() for tensor in as_tuple(layer(*tensors)))
        return tensors

    def step(self, micro_batches, learning_rate, step=0):
        """`micro_batches` are (inputs, targets); returns loss, gradient norm before clipping."""
        self.layers.train()
        losses, counts = [], []
        for number, (inputs, targets) in enumerate(micro_batches):
            rule = partial(self._seed, step, number)
            loss, count = self.model.loss(*self._forward(inputs, rule), targets)
            losses.append(loss)
            counts.append(count)
        loss = sum(losses) / sum(counts)
        self.optimizer.zero_grad()
        loss.backward()
        parameters = list(self.layers.parameters())
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        if self.clip:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return loss.item(), norm.item()


def as_tuple(tensors):
    """What a layer takes or gives, as a tuple also where it is one tensor."""
    return tensors if isinstance(tensors, tuple) else (tensors,)
