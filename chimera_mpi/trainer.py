"""Train a model of one's own on a communicator of one's own: the library's way in."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, taken
from .config import Config, Steps, checked, fitting_depth, schedule_on
from .data import even_sizes
from .errors import InputError, refusing
from .lock import lock_if_possible
from .models import Model, as_model, in_precision, make_layer, named_layers
from .runtime.agreement import agree, meet, take_values_of_root
from .runtime.device import awareness_of, staging_on, use_device
from .runtime.grid import Comm, Grid, find_node
from .runtime.mailbox import Spec, Tensors
from .runtime.optimizer import LearningRate
from .runtime.pipeline import Pipeline
from .runtime.stage import trace
from .runtime.worker import Targets
from .saving import Saver, find_last, find_named
from .schedule import STREAMS
from .tasks import Task
from .train import (
    PRECISIONS,
    Begun,
    Part,
    check_layers,
    check_loss,
    check_same,
    job_of,
    learning_rate_of,
    measured,
    patience_of,
)

T = TypeVar("T")

# What the command line trains, evaluates and logs; here the caller does.
OF_COMMANDS = (
    {"model", "layers", "hidden", "heads", "vocabulary", "positions", "sequence_length", "tied", "dropout"}
    | {"micro_batch_size", "mini_batch_size", "data"}
    | {"checkpoint", "checkpoint_every", "checkpoint_keep", "resume"}
    | {"log", "eval_every", "eval_mini_batches", "check_replicas", "spans_every", "keep_freed_memory", "machine"}
    | {"profile", "on_nan", "time_limit", "watchdog_s"}
)


class Result(NamedTuple):
    """Of a step over all ranks: the mean loss before the update, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float
    learning_rate: float


class Trainer:
    """Trains a model with a pipeline schedule on all ranks of a communicator, each rank a worker.

    All methods are collective: all ranks call them in one order, with the same mini-batches. Whatever one rank is
    asked wrongly, all refuse by the same InputError, and none is left waiting. Anything else that is raised on one
    rank alone leaves the others waiting, as in any MPI program: `python -m mpi4py SCRIPT` ends all.
    """

    def __init__(
        self,
        comm: Comm,
        model: Any,
        loss: Callable[..., Any] | None = None,
        *,
        learning_rate: float | Callable[[int], float] | None = None,
        **keys: Any,
    ):
        """`model`: an nn.Sequential, a list of modules, or a `Model`, built on all ranks. Its modules get rank 0's
        weights; copies of them are trained. A layer is called with all tensors that the one before returns.

        `loss(*outputs, targets) -> (sum, count)`; without one, the cross entropy of tokens. `keys` are those of
        config.py as on the command line, with the same defaults: scheme, depth, micro_batches, optimizer, clip,
        weight_decay, precision, recompute, partition, seed, ... The ranks of `comm` / depth are the replicas of the
        pipeline. `threads` sets torch's threads, which otherwise stay as they are. With device="auto" the ranks of a
        node take its GPUs in turn, if there are any.

        The learning rate is constant, unless `steps` is given: then, as on the command line, it rises linearly over
        `warmup_steps` and falls by a cosine to `minimum_learning_rate` at `steps`. With `warmup_steps` alone it
        rises and stays. A function has it by the number of the step, counted from 0.

        Raises InputError.
        """
        if not isinstance(comm, Comm):
            raise InputError(f"comm is a {type(comm).__name__}, not an intracommunicator of mpi4py")
        self.config, self._plan, self._rate = agree(comm, lambda: _understand(comm.size, learning_rate, keys))
        self.model, layers = agree(comm, lambda: (as_model(model, loss=loss), _modules(model, loss)))
        self._names = list(layers) or [str(index) for index in range(len(self.model.layers))]
        weights = nn.ModuleList(layers.values()).state_dict()
        self.dtype = PRECISIONS[self.config.precision]
        same = partial(_same_on_all, comm)
        same(self.config.model_dump_json(), "the ranks have different keys: build all Trainers of a communicator alike")
        same(_told(weights.values()), "the ranks have different models: build the same on all, whatever its weights")
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        node = find_node(comm)
        device = agree(comm, lambda: use_device(self.config.device, node.rank))
        self.grid = Grid(comm, self.config.depth)  # last, as it has to be closed
        self._patience = patience_of(self.grid, self.config)
        self._staging = staging_on(device, awareness_of(comm, self.config.device_aware_mpi, {}, ""))
        take_values_of_root(self.grid.world, self._patience, weights.values(), self.config.message_limit_bytes)
        self.steps_done = 0
        self._part: Part | None = None
        self._begun: Checkpoint | None = None
        self._last: dict[Path, tuple[Path, int]] = {}  # by folder: where this course of the run is saved, and its steps
        self._tried: set[str] = set()  # the shapes that model and loss take
        self._expected = ""  # those of the last mini-batch
        self._closed = False

    def step(self, inputs: Tensor | Tensors, targets: Targets) -> Result:
        """Train on a mini-batch: one update of all weights. The result is the same on all ranks.

        The tensors, on the CPU and of any dtypes, have the samples in dimension 0, along which they are split into
        micro-batches as even as can be. `inputs` enter the first layer, floating and complex ones cast to
        `precision`; the loss gets `targets` as they are, a tensor or a tuple. Shapes may differ from step to step, at
        the price of finding out anew what travels between the stages.
        """
        step = self.steps_done
        rate, batch = self._meet(lambda: self._prepare(f"step {step}", inputs, targets, self._rate_of(step)))
        part = self._fit(batch)
        device = self._staging.device
        # Layers draw by rule, from the generators that are the caller's.
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            _, (sums,) = part.pipeline.run(part.feed(batch.read, step), step, lambda step: rate)
        self.steps_done += 1
        total = part.total(sums)
        return Result(total.mean_loss, total.grad_norm, rate)

    def evaluate(self, inputs: Tensor | Tensors, targets: Targets) -> float:
        """The mean loss of a mini-batch on all ranks, without dropout. Tensors as those of `step`."""
        _, batch = self._meet(lambda: self._prepare("evaluate", inputs, targets))
        part = self._fit(batch)
        return part.total(part.pipeline.evaluate(part.feed(batch.read, 0), self.steps_done)).mean_loss

    def state_dict(self) -> dict[str, Tensor] | None:
        """On rank 0 the weights and buffers of the whole model, as nn.Sequential(*layers).load_state_dict wants them,
        in the dtype of `precision`; None on the others."""
        self._meet(lambda: ("state_dict", None))
        layers: Sequence[Mapping[str, Tensor]] | None
        layers = self._part.pipeline.layers() if self._part else agree(self.grid.world, self._initial_layers)
        if layers is None:
            return None
        return {
            f"{prefix}.{name}": tensor
            for prefix, layer in zip(self._names, layers, strict=True)
            for name, tensor in layer.items()
        }

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """Write a checkpoint of what the steps so far have made, weights and the optimizer's state, which `load` goes
        on from under any scheme and on any number of ranks. It is written beside and renamed to the path that is
        returned, `folder`/step-NNNNNNNN; the last `keep` there stay. Those that are there of another run, or from after
        the checkpoint that was loaded, are renamed to step-NNNNNNNN.superseded.

        Raises InputError before the first step, while another job saves in that folder, and where there can be no such
        folder; RunFailed on all ranks if the checkpoint cannot be written.
        """
        folder = Path(folder)
        pipeline = self._meet(lambda: (f"save {folder}, keep {keep}", self._pipeline_to_save(keep)))
        with ExitStack() as stack:
            agree(self.grid.world, lambda: self._take(folder, stack))
            return self._save(pipeline, folder, keep)

    def _take(self, folder: Path, stack: ExitStack) -> None:
        """Have it to oneself until the end of the `stack`. Raises InputError."""
        if self.grid.world.rank == 0:
            stack.enter_context(taken(folder, lock_if_possible))

    def _save(self, pipeline: Pipeline, folder: Path, keep: int) -> Path:
        known = self._last.get(folder.resolve())
        is_there = self.grid.world.bcast(known and os.path.isdir(known[0]))
        saver = Saver(pipeline, folder, keep)
        if known:
            path, step = known
            saver.go_on_from(path, step if is_there else step - 1)
        try:
            saver.save(self.steps_done, self._facts(pipeline), wait=True)
        finally:
            saver.close()
        path = self.grid.world.bcast(saver.newest)
        self._last[folder.resolve()] = path, self.steps_done
        return path

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint of the same layers and optimizer, or from the last whole one of a folder.
        `steps_done` is then that of the checkpoint. Those that were passed over are told by warnings. Raises
        InputError."""
        self._meet(lambda: (f"load {path}", None))
        world = self.grid.world
        last = find_last(world, Path(path))
        checkpoint = last.checkpoint or find_named(world, Path(path), "load('{}')".format).checkpoint
        assert checkpoint is not None
        agree(world, lambda: self._check(checkpoint))
        if self._part:
            Begun.at(checkpoint).take_up(self._part.pipeline)
        self._begun, self.steps_done = checkpoint, checkpoint.step
        self._last = {checkpoint.path.parent.resolve(): (checkpoint.path, checkpoint.step)}
        for why in last.passed_over if world.rank == 0 else ():
            warnings.warn(f"passed over: {why}", stacklevel=2)

    def close(self) -> None:
        """Free the communicators; so does the end of a `with`, unless it is an exception, which others may not have."""
        if not self._closed:
            self._meet(lambda: ("close", None))
            self._closed = True
            if self._part:
                self._part.pipeline.close()
            self.grid.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _meet(self, act: Callable[[], tuple[str, T]]) -> T:
        if self._closed:
            raise InputError("this Trainer is closed: build another")
        return meet(self.grid.world, self._patience, act)

    def _prepare(self, call: str, inputs: Any, targets: Any, rate: float = 0.0) -> tuple[str, tuple[float, MiniBatch]]:
        batch = MiniBatch.of(inputs, targets, self.grid.width * self._plan.micro_batches, self.dtype)
        return f"{call}, learning rate {rate!r}, {batch}, checksum {batch.checksum:08x}", (rate, batch)

    def _rate_of(self, step: int) -> float:
        rate = self._rate(step)
        if not (isinstance(rate, (int, float)) and math.isfinite(rate) and rate >= 0):
            raise InputError(f"learning_rate({step}) is {rate!r}: return a float from 0 up")
        return float(rate)

    def _fit(self, batch: MiniBatch) -> Part:
        """This rank's part, made for batches of this shape."""
        shapes = str(batch)
        if shapes not in self._tried:
            agree(self.grid.world, lambda: self._try(batch))
            self._tried.add(shapes)
        if self._part is None:
            entering = batch.entering(max(batch.sizes))
            job = job_of(self.config, self.grid.width, self._plan, Task(self.model), batch.sizes, entering)
            job = measured(self.grid.world, self._patience, job, batch.read, self._staging)
            self._part = self._begin(Part(self.grid, job, batch.entering, staging=self._staging))
        elif shapes != self._expected:
            self._part.expect(batch.sizes, batch.entering)
        self._expected = shapes
        return self._part

    def _begin(self, part: Part) -> Part:
        """It, once it has what was loaded. Raises InputError on all ranks if that is there no more."""
        if self._begun:
            try:
                Begun.at(self._begun).take_up(part.pipeline)
            except InputError:
                part.pipeline.close()
                raise
        return part

    def _try(self, batch: MiniBatch) -> None:
        """Raises InputError if the layers do not take such inputs, or the loss not what they make of them.

        In a step only some ranks would see it. The loss is tried by rank 0, on zeros for outputs.
        """
        with refusing(f"the model does not take {batch}"):
            outputs, *_ = (trace(self.model, batch.entering(size), self.dtype).outputs[-1] for size in batch.sizes)
        if self.grid.world.rank == 0:
            inputs, targets = batch.read(0, 0)
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                refusing(f"the first layer does not take {batch}"),
            ):
                make_layer(self.model, 0, self.config.seed, self.dtype)(*inputs)  # dtypes, which a trace overlooks
            with refusing(f"the loss does not take outputs {_told(outputs)} and {batch}"):
                check_loss(self.model, outputs, targets)

    def _pipeline_to_save(self, keep: int) -> Pipeline:
        if not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep={keep!r} leaves no checkpoint: give a whole number from 1 up")
        if self._part is None:
            raise InputError("there is nothing to save before the first step(): call it first")
        return self._part.pipeline

    def _facts(self, pipeline: Pipeline) -> dict[str, Any]:
        """What a checkpoint says beside the layers."""
        scale = pipeline.loss_scale
        return {
            "identity": {"optimizer": self.config.optimizer},
            "config": self.config.model_dump(mode="json", exclude=set(OF_COMMANDS)),
            "loss_scale": (scale.value, scale.steps) if scale else None,
            "versions": {"chimera-mpi": version("chimera-mpi"), "torch": torch.__version__},
        }

    def _check(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.weights_only:
            check_same(str(checkpoint.path), checkpoint.facts["identity"], {"optimizer": self.config.optimizer})
        check_layers(checkpoint, self.model)

    def _initial_layers(self) -> Sequence[Mapping[str, Tensor]] | None:
        if self.grid.world.rank:
            return None
        indices = range(len(self.model.layers))
        initial = [make_layer(self.model, index, self.config.seed, self.dtype).state_dict() for index in indices]
        if self._begun is None:
            return initial
        saved = map(self._begun.weights, indices)  # in the precision that the optimizer works in
        return [
            {name: found[name].to(tensor.dtype) for name, tensor in layer.items()}
            for layer, found in zip(initial, saved, strict=True)
        ]


@dataclass(frozen=True)
class MiniBatch:
    """The tensors of a step, samples in dimension 0, and the samples of each of its micro-batches."""

    inputs: Tensors
    targets: Targets
    sizes: tuple[int, ...]

    @staticmethod
    def of(inputs: Any, targets: Any, micro_batches: int, dtype: torch.dtype) -> MiniBatch:
        """Floating and complex inputs become of this precision. Raises InputError."""
        entering, wanted = _tensors("inputs", inputs), _tensors("targets", targets)
        samples = {len(tensor) for tensor in (*entering, *wanted)}
        if len(samples) > 1:
            counts = " and ".join(map(str, sorted(samples)))
            raise InputError(f"inputs and targets have {counts} samples in dimension 0: give equally many")
        cast = tuple(tensor.to(in_precision(tensor.dtype, dtype)) for tensor in entering)
        whole = wanted[0] if isinstance(targets, Tensor) else wanted
        return MiniBatch(cast, whole, even_sizes(samples.pop(), micro_batches))

    def read(self, step: int, number: int) -> tuple[Tensors, Targets]:
        """Inputs and targets of micro-batch `number`."""
        end = list(accumulate(self.sizes))[number]
        own = slice(end - self.sizes[number], end)
        inputs = tuple(tensor[own] for tensor in self.inputs)
        return inputs, self.targets[own] if isinstance(self.targets, Tensor) else tuple(t[own] for t in self.targets)

    def entering(self, size: int) -> tuple[Spec, ...]:
        """What enters the first layer with a micro-batch of `size` samples."""
        return tuple(Spec((size, *tensor.shape[1:]), tensor.dtype) for tensor in self.inputs)

    @property
    def checksum(self) -> int:
        """Of all values."""
        found = 0
        for tensor in (*self.inputs, *_tensors("targets", self.targets)):
            found = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, found)
        return found

    def __str__(self) -> str:
        return f"inputs {_told(self.inputs)} and targets {_told(_tensors('targets', self.targets))}"


def _tensors(name: str, given: Any) -> Tensors:
    tensors = (given,) if isinstance(given, Tensor) else given
    if not isinstance(tensors, (tuple, list)) or not tensors:
        raise InputError(f"{name}: give a tensor or a tuple of tensors, not {type(given).__name__}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} has a {type(tensor).__name__} in it: give tensors")
        if tensor.device.type != "cpu" or not tensor.dim():
            raise InputError(f"{name} has {_told([tensor])} on {tensor.device}: give [samples, ...] on the CPU")
    return tuple(tensor.detach() for tensor in tensors)


def _told(tensors: Any) -> str:
    """Dtypes and shapes."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def _understand(ranks: int, learning_rate: Any, keys: dict[str, Any]) -> tuple[Config, Steps, Callable[[int], float]]:
    for key in sorted(OF_COMMANDS & keys.keys()):
        raise InputError(f"{key} is a key of what the command line trains and logs: leave it out of a Trainer's")
    if learning_rate is not None and not callable(learning_rate):
        keys = {**keys, "learning_rate": learning_rate}
    config = checked(keys)
    if config.scheme in STREAMS:
        raise InputError(
            f"{config.scheme} updates within a stream of mini-batches, a Trainer after each one: "
            "take another scheme, such as 1f1b or chimera"
        )
    return config, fitting_depth(config, ranks, schedule_on), _rule(config, learning_rate)


def _rule(config: Config, learning_rate: Any) -> Callable[[int], float]:
    """The learning rate by step."""
    given = config.model_fields_set & {"steps", "warmup_steps", "minimum_learning_rate"}
    if callable(learning_rate):
        for key in sorted(given):
            raise InputError(f"{key} and a function for learning_rate: let the function do it all")
        return learning_rate
    if "steps" in given:
        return learning_rate_of(config)
    if "minimum_learning_rate" in given:
        raise InputError("minimum_learning_rate is reached at the last of `steps`: give steps too")
    warmup_steps = config.warmup_steps if given else 0
    return LearningRate(config.learning_rate, config.learning_rate, warmup_steps, warmup_steps)


def _modules(model: Any, loss: Any) -> dict[str, nn.Module]:
    """The layers that were built, by name; none of a `Model`, which makes its own by rule."""
    layers = {} if isinstance(model, Model) else named_layers(model, loss=loss)
    for name, layer in layers.items():
        for tensor in layer.state_dict().values():
            if tensor.device.type != "cpu":
                raise InputError(f"layer {name} of the model is on {tensor.device}: build it on the CPU")
    return layers


def _same_on_all(comm: Comm, value: str, otherwise: str) -> None:
    if len(set(comm.allgather(value))) > 1:
        raise InputError(otherwise)
