"""What the terminal can show."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from ._plan import count


def add_terminal(output: argparse._ArgumentGroup) -> None:
    """The options of a command that draws in characters."""
    output.add_argument("--width", type=count, metavar="COLUMNS", help="default: the terminal's, 80 without one")
    output.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")


def columns(asked: int | None) -> int:
    return asked or shutil.get_terminal_size().columns


def wants_color(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return when == "always"


def speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
