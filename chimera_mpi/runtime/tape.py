"""What a micro-batch's forward through a stage leaves behind for its backward, whole or split in two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from .mailbox import Tensors

Segment = Callable[[Tensors], Tensors]


class Tape:
    """One micro-batch on its way through one stage, which is a row of segments.

    Without recomputation the autograd graph is kept from forward to backward; with it only what entered
    each segment, whose forward is run once more on the way back. Then `backward` does all at once, or
    `backward_inputs` makes the gradients that the stage before waits for and `backward_weights` the rest.
    """

    def __init__(self, segments: Sequence[Segment], recompute: bool):
        self.segments, self.recompute = segments, recompute
        self._steps: list[Step] = []
        self._later: list[Junction] = []

    def forward(self, inputs: Tensors) -> Tensors:
        """Run the stage. Those of `inputs` that require gradients get them on the way back."""
        entering = inputs
        for segment in self.segments:
            with torch.set_grad_enabled(not self.recompute):
                leaving = segment(entering)
            self._steps.append(Step(segment, entering, () if self.recompute else leaving))
            entering = start_graph(leaving)
        return leaving

    def backward(self, gradients: Tensors) -> Tensors:
        """From the gradients of the floating outputs: add to those of the weights, return the inputs'."""
        while self._steps:
            step = self._steps.pop().with_graph()
            backpropagate(step.outputs, gradients)
            gradients = input_gradients(step.inputs)
        return gradients

    def backward_inputs(self, gradients: Tensors) -> Tensors:
        """The inputs' gradients alone; `backward_weights` must follow."""
        while self._steps:
            step = self._steps.pop().with_graph()
            self._later += backpropagate_inputs(step.inputs, step.outputs, gradients)
            gradients = input_gradients(step.inputs)
        return gradients

    def backward_weights(self) -> None:
        """Add to the gradients of the weights what `backward_inputs` left."""
        while self._later:
            self._later.pop().backward()


@dataclass(frozen=True)
class Step:
    """A segment's way: what entered, and what left with its graph unless it is to be recomputed."""

    segment: Segment
    inputs: Tensors
    outputs: Tensors

    def with_graph(self) -> Step:
        if self.outputs:
            return self
        with torch.enable_grad():
            return Step(self.segment, self.inputs, self.segment(self.inputs))


@dataclass
class Junction:
    """A node of the graph where the way to the inputs and the way to some weights part.

    The gradients that came to it on the way to the inputs are all that its weights' gradients need.
    """

    node: Node
    weights: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...] = ()

    def catch(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.gradients = gradients

    def backward(self) -> None:
        caught = [(GradientEdge(self.node, at), g) for at, g in enumerate(self.gradients) if g is not None]
        if caught:
            edges, gradients = zip(*caught, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights, retain_graph=True)


def start_graph(tensors: Tensors) -> Tensors:
    """The same values at the start of a new graph, which gives gradients to all that can have them."""
    return tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def floating(tensors: Tensors) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())


def input_gradients(inputs: Tensors) -> Tensors:
    """The gradient of each floating input, zeros where the loss does not depend on it."""
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in floating(inputs))


def differentiable(outputs: Tensors, gradients: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Floating outputs with their gradients, those that nothing trainable leads to left out."""
    return [(t, g) for t, g in zip(floating(outputs), gradients, strict=True) if t.requires_grad]


def backpropagate(outputs: Tensors, gradients: Tensors) -> None:
    """The whole backward of a segment."""
    if pairs := differentiable(outputs, gradients):
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def backpropagate_inputs(inputs: Tensors, outputs: Tensors, gradients: Tensors) -> list[Junction]:
    """Only the way to the inputs; the junctions passed on it hold what the weights' gradients need.

    Works on autograd's graph, so for any module. A weight that several junctions lead to gets its gradient
    at once, since a later run from one junction would pass through the others.
    """
    pairs = differentiable(outputs, gradients)
    ways = Ways(inputs)
    roots = [(t.grad_fn, t, g) for t, g in pairs if t.grad_fn is not None]
    for node, _, _ in roots:
        ways.explore(node)
    apart = [Junction(node, ways.weights_below(node), _at(t, g)) for node, t, g in roots if not ways.to_inputs[node]]
    junctions = [Junction(node, weights) for node, weights in ways.junctions()]
    shared = _shared([*apart, *junctions])
    for junction in (*apart, *junctions):
        junction.weights = [w for w in junction.weights if w not in shared]
    handles = [j.node.register_prehook(j.catch) for j in junctions if j.weights]
    wanted = [tensor for tensor in inputs if tensor.requires_grad] + list(shared)
    if wanted and pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], inputs=wanted, retain_graph=True)
    for handle in handles:
        handle.remove()
    return [junction for junction in (*apart, *junctions) if junction.weights]


def _at(output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """`gradient` in the place that `output` has among what its node puts out."""
    return (*(None for _ in range(output.output_nr)), gradient)


def _shared(junctions: Sequence[Junction]) -> set[torch.Tensor]:
    once: set[torch.Tensor] = set()
    twice: set[torch.Tensor] = set()
    for junction in junctions:
        for weight in set(junction.weights):
            (twice if weight in once else once).add(weight)
    return twice


@dataclass
class Ways:
    """Which nodes of a graph lead to a segment's inputs, and which leaves the others lead to."""

    inputs: Tensors
    to_inputs: dict[Node, bool] = field(default_factory=dict)

    def explore(self, root: Node) -> None:
        """Find out for all nodes below `root`, without recursion: graphs are deep."""
        ends = {id(tensor) for tensor in self.inputs}
        pending = [root]
        while pending:
            node = pending[-1]
            below = [child for child, _ in node.next_functions if child is not None]
            unknown = [child for child in below if child not in self.to_inputs]
            if node not in self.to_inputs and unknown:
                pending += unknown
                continue
            pending.pop()
            leaf = getattr(node, "variable", None)
            self.to_inputs[node] = id(leaf) in ends if leaf is not None else any(self.to_inputs[c] for c in below)

    def junctions(self) -> list[tuple[Node, list[torch.Tensor]]]:
        """Nodes on a way to the inputs from which another edge leads to weights only."""
        found = []
        for node, leads in self.to_inputs.items():
            if leads:
                aside = [child for child, _ in node.next_functions if child is not None and not self.to_inputs[child]]
                if weights := [weight for child in aside for weight in self.weights_below(child)]:
                    found.append((node, list(dict.fromkeys(weights))))
        return found

    def weights_below(self, node: Node) -> list[torch.Tensor]:
        """The leaves that a node leads to."""
        weights, pending, seen = [], [node], {node}
        while pending:
            node = pending.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                weights.append(leaf)
            children = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= children
            pending += children
        return weights
