"""Models of the user's own: any list of modules, named as "package.module:build"."""

from __future__ import annotations

import copy
import importlib
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError
from .layers import Loss, Model, cross_entropy, drawing_from, keyed_seed

# nn.modules.loss has no public name for what all of torch's loss modules have in common.
TorchLoss: type[nn.Module] = nn.modules.loss._Loss


def user_model(path: str, seed: int = 0) -> Model:
    """The model that `path`, "package.module:build", builds. Raises `InputError`, one line, whatever goes wrong in it.

    `build()` returns a `Model`; or its layers as an nn.Sequential, a list or a tuple of modules; or a pair (layers,
    loss) with `loss(*outputs, targets) -> (sum, count)`, without which it is `cross_entropy`. It is imported and
    runs on every rank with the generators of torch, numpy and random set by `seed`, so that all ranks build the same
    weights; the current folder may be imported from, as with `python -m`.
    """
    with _same_everywhere(seed):  # importing may draw too, but only the first time
        build = _find(path)
    with _same_everywhere(seed):
        try:
            built = build()
        except Exception as error:
            raise InputError(f"model={path}: {_name(build)}() raised {_told(error)}") from error
    return as_model(built, f"model={path}")


def as_model(built: Any, origin: str = "the model", loss: Any = None) -> Model:
    """A `Model` of what a user built: see `user_model`. `origin` names it in errors, which are `InputError`.

    With a `loss`, `built` is the layers alone, or a `Model` whose own loss gives way.

    The layers of the model are copies, each with the weights, buffers and frozen parameters that were built. A
    parameter that two of the given modules share is tied. Two layers that are one module share all parameters.
    """
    if isinstance(built, Model):
        return built if loss is None else replace(built, loss=_checked(loss, origin))
    layers, loss = _layers_and_loss(built) if loss is None else (built, loss)
    modules = _modules(layers, origin)
    return Model(
        layers=tuple(partial(_copy, module) for module in modules),
        loss=cross_entropy if loss is None else _checked(loss, origin),
        tied=_shared(modules),
    )


def named_layers(built: Any, origin: str = "the model", loss: Any = None) -> dict[str, nn.Module]:
    """The modules that `as_model` copies, by their names in the nn.Sequential that they are or would make."""
    layers = _layers_and_loss(built)[0] if loss is None else built
    modules = _modules(layers, origin)
    if not isinstance(layers, nn.Sequential):
        return {str(index): module for index, module in enumerate(modules)}
    names = [name for name, _ in layers.named_modules(remove_duplicate=False) if name and "." not in name]
    return dict(zip(names, modules, strict=True))


# ---- finding it --------------------------------------------------------------------------------------------------


def _find(path: str) -> Callable[[], Any]:
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise InputError(f"model={path} is not of the form package.module:build")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    found: Any = _import(module_name, path)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InputError(f"model={path}: {module_name} has no '{attribute}': give the name of a function in it")
        found = getattr(found, name)
    if isinstance(found, nn.Module) or not callable(found):
        raise InputError(
            f"model={path} is a {type(found).__name__}, not a function: write one that builds and returns it"
        )
    return found


def _import(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise InputError(
                f"model={path}: no module '{error.name}': run where it can be imported from, or set PYTHONPATH"
            ) from None
        raise InputError(f"model={path}: importing {name} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    """One line with what the last one of a traceback says, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place.filename}, line {place.lineno})"


@contextmanager
def _same_everywhere(seed: int) -> Iterator[None]:
    """What a user may draw weights from, set by `seed`; afterwards as it was."""
    states = random.getstate(), np.random.get_state()
    key = keyed_seed(seed)
    random.seed(key)
    np.random.seed(key % 2**32)
    try:
        with drawing_from(key):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# ---- taking it apart ---------------------------------------------------------------------------------------------


def _layers_and_loss(built: Any) -> tuple[Any, Any]:
    """A pair is (layers, loss) if it cannot be two layers."""
    if isinstance(built, (tuple, list)) and len(built) == 2:
        layers, loss = built
        if isinstance(layers, (tuple, list, nn.ModuleList)):
            return layers, loss
        if isinstance(layers, nn.Sequential) and (not isinstance(loss, nn.Module) or isinstance(loss, TorchLoss)):
            return layers, loss
    return built, None


def _modules(layers: Any, origin: str) -> list[nn.Module]:
    if not isinstance(layers, (tuple, list, nn.Sequential, nn.ModuleList)):
        raise InputError(f"{origin} built a {type(layers).__name__}: return a list of modules or an nn.Sequential")
    modules = list(layers)
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InputError(f"{origin}: layer {index} is a {type(module).__name__}, not a module: wrap it in one")
    if not modules:
        raise InputError(f"{origin} built no layers: a model needs at least one")
    return modules


def _shared(modules: Sequence[nn.Module]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Groups of (layer, name) that are one parameter in several layers."""
    groups: dict[int, list[tuple[int, str]]] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append((index, name))
    return tuple(tuple(group) for group in groups.values() if len({index for index, _ in group}) > 1)


def _copy(module: nn.Module) -> nn.Module:
    """A copy with memory of its own; on the meta device without any."""
    stand_ins: dict[int, Any] = {}
    if torch.get_default_device().type == "meta":
        for parameter in module.parameters():
            stand_ins[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for buffer in module.buffers():
            stand_ins[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, stand_ins)


# ---- the loss ----------------------------------------------------------------------------------------------------


def _checked(loss: Any, origin: str) -> Loss:
    if isinstance(loss, type) or not callable(loss):
        name = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise InputError(f"{origin}: a loss is a function or an object to call, not {name}")
    if isinstance(loss, TorchLoss):
        raise InputError(
            f"{origin}: nn.{type(loss).__name__} gives no count: give a loss(*outputs, targets) -> (sum, count)"
        )
    return _UserLoss(loss, origin)


@dataclass(frozen=True)
class _UserLoss:
    """The user's loss in single precision at least, its count brought to the dtype of the sum.

    A mean alone could not be added up.
    """

    loss: Callable[..., Any]
    origin: str

    def __call__(self, *outputs_and_targets: Any) -> tuple[Tensor, Tensor]:
        pair = self.loss(*outputs_and_targets)
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Tensor) and not pair[0].dim()
        ):
            raise InputError(
                f"{self.origin}: loss(*outputs, targets) returned {_kind(pair)}, not (sum, count): "
                "sum over the targets, and say how many there are"
            )
        total, count = pair
        if total.dtype in (torch.float16, torch.bfloat16):
            total = total.float()  # in half precision counts are not exact
        return total, torch.as_tensor(count, device=total.device).to(total.dtype).detach().reshape(())


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_kind, value))})"
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
