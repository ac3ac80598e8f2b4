"""What the layers of any model do and hold, found without memory or arithmetic: by passes of torch's fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..models import Model, make_layer
from ..predict.work import LayerWork
from .tape import Segment, Tape, floating, start_graph
from .tensors import Spec, Tensors
from .trace import segment_of, trace

Specs = tuple[Spec, ...]


def layers_of(
    model: Model,
    entering: Callable[[int], Specs],
    targets: Callable[[int], Specs],
    samples: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerWork, ...]:
    """What each layer does with a sample, and holds, in micro-batches of about `samples`, 2 at least.

    `entering(size)` enters layer 0 and `targets(size)` the loss, which counts to the last layer unless it asks for the
    values of what it gets. Two sizes are tried, and what differs between them is shared out to the samples.
    """
    sizes = max(samples, 2), 2 * max(samples, 2)
    outputs = [(entering(size), *trace(model, entering(size), dtype).outputs) for size in sizes]
    last = len(model.layers) - 1
    few = sizes[0]
    flops = trace(model, entering(few), dtype).flops

    @cache
    def measured(alike: int, shapes: tuple[Specs, Specs], first: bool, loss: bool) -> tuple[Pass, Pass]:
        return tuple(
            _pass(model, alike, shape, dtype, not first, targets(size) if loss else None)
            for shape, size in zip(shapes, sizes, strict=True)
        )  # type: ignore[return-value]

    kinds = Kinds()
    found = []
    for index, factory in enumerate(model.layers):
        shapes = tuple(of_size[index] for of_size in outputs)
        passes = measured(model.layers.index(factory), shapes, index == 0, index == last)
        output_bytes = sum(spec.nbytes for spec in outputs[0][index + 1]) / few
        found.append(_shared_out(kinds.of(passes[0]), sizes, passes, flops[index] / few, output_bytes))
    return tuple(found)


def _shared_out(
    kind: str, sizes: tuple[int, int], passes: tuple[Pass, Pass], forward_flops: float, output_bytes: float
) -> LayerWork:
    """What a layer does with a sample: the difference of two sizes of a micro-batch."""
    few, many = passes

    def per_sample(name: str) -> float:
        return (getattr(many, name) - getattr(few, name)) / (sizes[1] - sizes[0])

    working_bytes = per_sample("working_bytes")
    return LayerWork(
        kind=kind,
        parameters=few.parameters,
        forward_flops=forward_flops,
        backward_flops=per_sample("backward_flops"),
        input_bytes=per_sample("input_bytes"),
        output_bytes=output_bytes,
        activation_bytes=per_sample("kept_bytes"),
        deferred_bytes=per_sample("deferred_bytes"),
        working_bytes=working_bytes,
        matrix_bytes=max(few.working_bytes - sizes[0] * working_bytes, 0),
        beside_matrix_bytes=working_bytes,
        input_working_bytes=per_sample("input_working_bytes"),
    )


class Pass(NamedTuple):
    """Of a micro-batch forth and back through one layer."""

    name: str
    parameters: int
    backward_flops: int
    input_bytes: int
    kept_bytes: int
    deferred_bytes: int
    working_bytes: int
    input_working_bytes: int


class Kinds:
    """Names of layers that are alike: that of their class, numbered where one class makes several."""

    def __init__(self) -> None:
        self._names: dict[Pass, str] = {}
        self._used: Counter[str] = Counter()

    def of(self, found: Pass) -> str:
        if found not in self._names:
            self._used[found.name] += 1
            number = self._used[found.name]
            self._names[found] = found.name if number == 1 else f"{found.name} {number}"
        return self._names[found]


def _pass(
    model: Model, index: int, entering: Specs, dtype: torch.dtype, wants_gradient: bool, targets: Specs | None
) -> Pass:
    """`targets` are given to the loss behind the layer."""
    layer = make_layer(model, index, seed=0, dtype=dtype, device="meta").train()
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    name = type(layer).__name__
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fake(layer)
        segment, of_targets = segment_of(layer), 0
        if targets is not None:
            segment, of_targets = _with_loss(segment, model, entering, targets)
        try_ = partial(_Trial, segment, entering, wants_gradient)
        whole, halves = try_(), try_()
        kept = whole.forth()
        working = whole.back(Tape.backward)
        halves.forth()
        input_working = halves.back(Tape.backward_inputs)
        with sdpa_kernel(SDPBackend.MATH):
            flops = try_()
            flops.forth()
            with FlopCounterMode(display=False) as counter:
                flops.back(Tape.backward)
    return Pass(
        name,
        parameters,
        counter.get_total_flops(),
        sum(spec.nbytes for spec in entering),
        kept + of_targets,
        halves.ledger.live_bytes,
        working,
        input_working,
    )


def _with_loss(segment: Segment, model: Model, entering: Specs, targets: Specs) -> tuple[Segment, int]:
    """The layer and the loss, and the bytes of the targets; the layer alone where the loss asks for values."""
    wanted = _tensors(targets)

    def whole(tensors: Tensors) -> Tensors:
        return model.loss(*segment(tensors), wanted if len(wanted) > 1 else wanted[0])

    with suppress(Exception), torch.no_grad():
        whole(_tensors(entering))
        return whole, sum(spec.nbytes for spec in targets)
    return segment, 0


def _tensors(specs: Specs) -> Tensors:
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs)


def _fake(layer: nn.Module) -> None:
    """Give a layer on the meta device parameters and buffers of the mode that is on, and gradients to add to."""
    made: dict[int, Any] = {}
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    new = nn.Parameter(_like(parameter), parameter.requires_grad)
                    new.grad = _like(parameter) if parameter.requires_grad else None
                    made[id(parameter)] = new
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), _like(buffer))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class _Trial:
    """One micro-batch on its way through a segment."""

    def __init__(self, segment: Segment, entering: Specs, wants_gradient: bool):
        self.segment, self.entering, self.wants_gradient = segment, entering, wants_gradient
        self.tape, self.ledger = Tape([segment], recompute=False), Ledger()

    def forth(self) -> int:
        """The bytes that are kept then, without those of what came out."""
        with self.ledger:
            entering = _tensors(self.entering)
            leaving = self.tape.forward(start_graph(entering) if self.wants_gradient else entering)
            del entering
            self.leaving = [Spec(tuple(t.shape), t.dtype) for t in floating(leaving)]
            self.kept_bytes = self.ledger.live_bytes - sum(tensor.nbytes for tensor in leaving)
        return self.kept_bytes

    def back(self, way: Callable[[Tape, Tensors], Tensors]) -> int:
        """The most bytes that are held beside those that were kept."""
        with self.ledger:
            self.ledger.peak_bytes = self.ledger.live_bytes
            way(self.tape, _tensors(tuple(self.leaving)))
        return self.ledger.peak_bytes - self.kept_bytes


class Ledger(TorchDispatchMode):
    """The bytes of live tensors among those that were made while it was on, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._entered: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor)._cdata for tensor in _tensors_in((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        for tensor in _tensors_in(made):
            storage = _storage(tensor)
            if storage._cdata not in given | self._entered:
                self._enter(storage)
        return made

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._entered.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._entered.discard(key)
        self.live_bytes -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
