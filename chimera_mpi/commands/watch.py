"""Watch a run in progress: how far it is, its loss, its speed, and which worker waits for whom.

It reads the log of the run, also over a shared file system and while the run writes, and never disturbs it. On a
terminal it goes on until the run ends; elsewhere, and with --once, it shows what there is and ends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, complain
from ..lock import beside, owner, owner_lives
from ._plan import seconds
from ._terminal import speaks_unicode

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from ..runlog import Run
    from ..watch import View

EXAMPLE = """\
  chimera-mpi watch runs/20261130-091500-chimera.h5
  chimera-mpi watch RUN.h5 --wait --every 10
  chimera-mpi watch RUN.h5 --once"""

READING = 10  # times as long as a log takes to be read, it is let alone
RETRIES = 5  # readings in a row that may fail once one has not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="RUN.h5", help="the log of a run")
    parser.add_argument("--once", action="store_true", help="show what there is and end")
    parser.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS", help="between two looks; default: 2")
    parser.add_argument(
        "--wait", action="store_true", help="wait for a log that is not there, and for a run that stopped to be resumed"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    follower = Follower(args.log)
    if not os.path.exists(args.log):
        if not args.wait:
            raise InputError(f"{args.log} is not there: is the name right? --wait waits for it")
        _await(args.log, args.every)
    if args.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(_Screen(follower.look(), limited=False), end="")
    else:
        _follow(follower, console, args.every, args.wait)
    return 0


class Follower:
    """Reads a log when it has grown, and remembers when that was."""

    def __init__(self, path: Path):
        self.path, self.read_s = path, 0.0
        self._run: Run | None = None
        self._stamp = (0, 0, 0)
        self._changed = datetime.now(timezone.utc)
        self._failures = 0

    def look(self) -> View:
        """What there is now. Raises InputError if the log cannot be read, once it has been only after a few times."""
        from ..watch import Writer, view_of

        # Who held the lock before the log was read: a writer that ends says so, then how many rows there are, and lets
        # go of the lock last.
        lock = beside(self.path)
        name = owner(lock) if os.path.exists(lock) else ""
        before = owner_lives(lock)
        run = self._read()
        after = owner_lives(lock)
        writer = Writer(name, before if after is False else after)
        return view_of(run, datetime.now().astimezone(), self._changed, writer)

    def _read(self) -> Run:
        from ..runlog import read_run

        try:
            stamp = _stamp(self.path)
            if self._run is None or stamp != self._stamp:
                began_s = time.monotonic()
                run = read_run(self.path)
                self.read_s = time.monotonic() - began_s
                now = datetime.now(timezone.utc)
                written = datetime.fromtimestamp(stamp[0] / 1e9, timezone.utc)
                self._changed = min(written, now) if self._run is None else now
                self._run, self._stamp, self._failures = run, stamp, 0
        except InputError:
            self._failures += 1
            if self._run is None or self._failures > RETRIES:
                raise
        assert self._run is not None
        return self._run


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written. It is opened for that: NFS then asks the server, and not its memory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): was it moved?") from error
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _await(path: Path, every_s: float) -> None:
    complain(f"waiting for {path}")
    while not os.path.exists(path):
        time.sleep(every_s)


def _follow(follower: Follower, console: Console, every_s: float, waits: bool) -> None:
    from rich.live import Live

    view = follower.look()
    try:
        with Live(_Screen(view), console=console, auto_refresh=False) as live:
            while not view.is_over(waits):
                time.sleep(max(every_s, READING * follower.read_s))
                view = follower.look()
                live.update(_Screen(view), refresh=True)
    finally:
        console.show_cursor()  # also where an interrupt came before `with`


class _Screen:
    """A view as rich draws it."""

    def __init__(self, view: View, limited: bool = True):
        """`limited` to the height of the terminal."""
        self.view, self.limited = view, limited

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        from ..watch import lines

        height = console.height - 1 if self.limited else None  # the last row is the prompt's
        for line in lines(self.view, options.max_width, height, ascii=not speaks_unicode()):
            yield Text.assemble(*line, no_wrap=True, overflow="crop")
