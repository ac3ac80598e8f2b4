"""The subcommands, a module each.

A module has `EXAMPLE`, lines for the end of its `--help`; `add_arguments(parser)`; and `run(args)`, which
returns the exit code. A module is imported only when its command is called, and itself imports what is slow
(torch, MPI, HDF5) only where it needs it. Its name and one line of help stand in `cli.COMMANDS`.
"""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from types import ModuleType


def module_of(command: str) -> ModuleType:
    """That of a subcommand; one named by a word of Python has an underscore behind its own name."""
    return import_module(f".{command}{'_' * iskeyword(command)}", __package__)
