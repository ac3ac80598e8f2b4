"""What a micro-batch's forward through a stage leaves behind for its backward, whole or split in two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .tensors import Tensors, has_gradient, resolved

Segment = Callable[[Tensors], Tensors]
Ends = tuple[GradientEdge | None, ...]
"""Where in the graph each floating output of a segment stands; None for one that nothing trainable leads to."""


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
            self._steps.append(Step(segment, entering, None if self.recompute else ends_of(leaving)))
            entering = start_graph(leaving)
        return leaving

    def backward(self, gradients: Tensors) -> Tensors:
        """From the gradients of the floating outputs: add to those of the weights, return the inputs'."""
        while self._steps:
            gradients = self._steps.pop().backward(gradients)
        return gradients

    def backward_inputs(self, gradients: Tensors) -> Tensors:
        """The inputs' gradients alone; `backward_weights` must follow."""
        while self._steps:
            gradients, junctions = self._steps.pop().backward_inputs(gradients)
            self._later += junctions
        return gradients

    def backward_weights(self) -> None:
        """Add to the gradients of the weights what `backward_inputs` left."""
        while self._later:
            self._later.pop().backward()


@dataclass(frozen=True)
class Step:
    """A segment's way: what entered, and the ends of its graph unless it is to be recomputed.

    What left is not kept: its values are for the next segment to keep.
    """

    segment: Segment
    inputs: Tensors
    ends: Ends | None

    def backward(self, gradients: Tensors) -> Tensors:
        backpropagate(self._graph(), gradients)
        return take_gradients(self.inputs)

    def backward_inputs(self, gradients: Tensors) -> tuple[Tensors, list[Junction]]:
        junctions = backpropagate_inputs(self.inputs, self._graph(), gradients)
        return take_gradients(self.inputs), junctions

    def _graph(self) -> Ends:
        if self.ends is not None:
            return self.ends
        with torch.enable_grad():
            return ends_of(self.segment(self.inputs))


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
            torch.autograd.backward(edges, gradients, inputs=self.weights)


def start_graph(tensors: Tensors) -> Tensors:
    """The same values at the start of a new graph, which gives gradients to all that can have them."""
    return tuple(tensor.detach().requires_grad_(has_gradient(tensor.dtype)) for tensor in tensors)


def floating(tensors: Tensors) -> Tensors:
    """Those that can have gradients, be they real or complex."""
    return tuple(tensor for tensor in tensors if has_gradient(tensor.dtype))


def ends_of(outputs: Tensors) -> Ends:
    return tuple(get_gradient_edge(t) if t.requires_grad else None for t in floating(outputs))


def take_gradients(inputs: Tensors) -> Tensors:
    """The gradient of each floating input, which forgets it; zeros where the loss does not depend on it."""
    gradients = tuple(torch.zeros_like(t) if t.grad is None else resolved(t.grad) for t in floating(inputs))
    for tensor in inputs:
        tensor.grad = None
    return gradients


def differentiable(ends: Ends, gradients: Tensors) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """The ends that something trainable leads to, and their gradients."""
    pairs = [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if end is not None]
    return [end for end, _ in pairs], [gradient for _, gradient in pairs]


def backpropagate(ends: Ends, gradients: Tensors) -> None:
    """The whole backward of a segment."""
    roots, coming = differentiable(ends, gradients)
    if roots:
        torch.autograd.backward(roots, coming)


def backpropagate_inputs(inputs: Tensors, ends: Ends, gradients: Tensors) -> list[Junction]:
    """Only the way to the inputs; the junctions passed on it hold what the weights' gradients need.

    Works on autograd's graph, so for any module. A weight that several junctions lead to gets its gradient
    at once, since a later run from one junction would pass through the others. What the nodes between the
    junctions have saved is let go of on the way.
    """
    roots, coming = differentiable(ends, gradients)
    ways = Ways(inputs)
    for root in roots:
        ways.explore(root.node)
    apart = [
        Junction(root.node, ways.weights_below(root.node), _at(root, gradient))
        for root, gradient in zip(roots, coming, strict=True)
        if not ways.to_inputs[root.node]
    ]
    junctions = [Junction(node, weights) for node, weights in ways.junctions()]
    shared = _shared([*apart, *junctions])
    for junction in (*apart, *junctions):
        junction.weights = [w for w in junction.weights if w not in shared]
    handles = [j.node.register_prehook(j.catch) for j in junctions if j.weights]
    for node in ways.passed() - {j.node for j in junctions if j.weights}:
        let_go_once_used(node)
    wanted = [tensor for tensor in inputs if tensor.requires_grad] + list(shared)
    if wanted and roots:
        torch.autograd.backward(roots, coming, inputs=wanted, retain_graph=True)
    for handle in handles:
        handle.remove()
    return [junction for junction in (*apart, *junctions) if junction.weights]


def let_go_once_used(node: Node) -> None:
    """Let `node` use what it has saved one more time only, as if its graph were not retained.

    Raises RuntimeError if that was written to since, which autograd does not see once a hook is there.
    """
    for name in _saved_by(type(node)):
        raw = getattr(node, f"_raw{name}")
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved.data is not None and saved.unpack_hook is None:  # the model's own hooks keep what they have
                getattr(node, name)
                saved.register_hooks(lambda tensor: [tensor], list.pop)


@cache
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    """The names under which nodes of one of autograd's own kinds save tensors."""
    names = dir(kind)
    return tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" in names)


def _at(root: GradientEdge, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """`gradient` in the place that an output has among what its node puts out."""
    return (*(None for _ in range(root.output_nr)), gradient)


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

    def passed(self) -> set[Node]:
        """The nodes on a way to the inputs."""
        return {node for node, leads in self.to_inputs.items() if leads}

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
