"""What the user is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """What was asked for cannot be had. The message is one line: the value, the limit and the remedy."""


class RunFailed(RuntimeError):
    """A run cannot go on, for a reason outside of the program. The message is one line, as that of an InputError; the
    exit code is 1. Where all ranks raise it they end as one; raised on one rank alone it ends the job."""

    def __init__(self, message: str, on_all: bool = False):
        super().__init__(message)
        self.on_all = on_all


def complain(text: str, end: str = "\n") -> None:
    """Print on stderr, though nobody may read it, or the disk that it goes to be full; nowhere if there is none."""
    if sys.stderr is None:  # for which print would take stdout
        return
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def cut(text: str, most: int = 40) -> str:
    """As much of a text as a message has room for."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown(value: Any, words: Callable[[Any], str] = repr) -> str:
    """A value as a message has room for it."""
    try:
        return cut(words(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits, or what is nested as deep
        return f"({type(value).__name__}, too long to show)"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def refuse_taken(output: Path) -> None:
    """Raises InputError if there is anything where something is to be made."""
    if os.path.exists(output):
        raise InputError(f"{output} exists and stays as it is: give another path, or remove it first")


def unwritable(output: str | os.PathLike[str], error: OSError) -> InputError:
    """That the disk refuses what is to be made."""
    why = error.strerror or cut(" ".join(str(error).split()), 100)
    return InputError(
        f"cannot write {os.fspath(output)} ({why}): give a path in a folder that is there, "
        "may be written to and has room"
    )


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Anything raised within becomes an InputError that begins with `what`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error
