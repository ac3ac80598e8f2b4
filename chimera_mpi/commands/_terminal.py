"""What the terminal can show."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from ._plan import count

WIDEST = 10_000  # columns


def add_terminal(output: argparse._ArgumentGroup) -> None:
    """The options of a command that draws in characters."""
    output.add_argument("--width", type=_width, metavar="COLUMNS", help="default: the terminal's, 80 without one")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")


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
