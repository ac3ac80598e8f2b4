"""The keys of a run: what they may be, and as `train --help` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NAMES = 24  # columns


def listed() -> str:
    """A line each: name, default, and what it is where the name does not say so."""
    from ..config import Config

    known = keys()
    return "\n".join(
        line
        for name, of in Config.model_fields.items()
        for line in _lines(f"{name}={_written(of.default)}", of.description or ", ".join(known[name]))
    )


def keys() -> dict[str, tuple[str, ...]]:
    """Of a run: by its name the values of a key that has only a few."""
    from ..config import Config
    from ..predict.machine import machines
    from ..schedule import SCHEMES

    listed = {"scheme": tuple(SCHEMES), "model": ("gpt", "bert"), "machine": tuple(machines()), "resume": ("auto",)}
    return {name: listed.get(name) or _known(of.annotation) for name, of in Config.model_fields.items()}


def _known(annotation: Any) -> tuple[str, ...]:
    """The values that a type has, if it has others than none."""
    found = tuple(dict.fromkeys(_literals(annotation)))
    return () if found == ("none",) else found


def _literals(annotation: Any) -> Iterator[str]:
    """The words that a type is made of."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from map(str, get_args(annotation))
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _literals(part)
    elif origin is Annotated:
        yield from _literals(get_args(annotation)[0])
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "none"


def _lines(assignment: str, meaning: str) -> list[str]:
    indent = " " * (NAMES + 2)
    words = wrap(meaning, 80, initial_indent=indent, subsequent_indent=indent) or [""]
    head = f"{assignment:{NAMES}}"
    if len(assignment) > NAMES:
        return [head, *filter(None, words)]
    return [f"{head}  {words[0].strip()}".rstrip(), *words[1:]]


def _written(default: object) -> str:
    """As it is given on the command line."""
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
