"""What the user is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """What was asked for cannot be had. The message is one line: the value, the limit and the remedy."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Anything raised within becomes an InputError that begins with `what`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error
