"""What the terminal can show."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..errors import RunFailed
from ._plan import count

TELL_EVERY_S = 0.1
WIDEST = 10_000  # columns


def add_terminal(output: argparse._ArgumentGroup) -> None:
    """The options of a command that draws in characters."""
    output.add_argument("--width", type=_width, metavar="COLUMNS", help="default: the terminal's, 80 without one")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")


@contextmanager
def bar(first: str, *columns: str) -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal a bar behind words, `first` to begin with, and rich's `columns` behind it. It is told words, how
    much is done, and of how much."""
    if not sys.stderr.isatty():
        yield lambda words, done, total: None
        return
    from rich import progress
    from rich.console import Console

    behind = (getattr(progress, name)() for name in columns)
    parts = progress.TextColumn("{task.description}"), progress.BarColumn(), *behind
    with progress.Progress(*parts, console=Console(stderr=True), transient=True) as shown:
        task, told_s = shown.add_task(first, total=None), 0.0

        def tell(words: str, done: int, total: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s > TELL_EVERY_S:
                told_s = time.monotonic()
                shown.update(task, description=words, completed=done, total=total)

        yield tell


def mute(stream: TextIO) -> None:
    """Let all that is printed to it from now on go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


OF_STDOUT = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # what may come of printing


class ReaderLeft(Exception):
    """Who reads stdout (`| head`) has had enough."""


@contextmanager
def printing() -> Iterator[None]:
    """What cannot be printed within is a RunFailed, or a ReaderLeft. Nothing is printed after either: what is still
    buffered must not fail again at exit."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in OF_STDOUT or error.filename or not (why := _unprintable()):
            raise
        mute(sys.stdout)
        if isinstance(why, BrokenPipeError):
            raise ReaderLeft from None
        reason = why.strerror or str(why)
        raise RunFailed(f"stdout cannot be written ({reason}): direct it to where there is room") from None


def _unprintable() -> OSError | None:
    """Why nothing can be printed, if so."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None


def say(text: str, end: str = "\n") -> None:
    """Print, though the reader may have left, or the disk that it goes to be full: a run goes on all the same."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        mute(sys.stdout)


def settle() -> None:
    """At exit: what is buffered and cannot be written must not turn the exit code into Python's 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            mute(stream)
        except ValueError:  # it is closed
            pass


def _width(word: str) -> int:
    if count(word) > WIDEST:
        raise argparse.ArgumentTypeError(f"must be at most {WIDEST}, not {word}")
    return int(word)


def columns(asked: int | None) -> int:
    return asked or min(shutil.get_terminal_size().columns, WIDEST)


def wants_color(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return when == "always"


def speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
