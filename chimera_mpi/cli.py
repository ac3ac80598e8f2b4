"""The command line: find the subcommand, let it parse and run, say what went wrong in one line.

Exit codes: 0 done; 1 failed while running; 2 bad input or usage; 75 stopped early with a checkpoint, run it again;
130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import ModuleType
from typing import NoReturn

from .commands import module_of
from .commands._terminal import ReaderLeft, printing, settle
from .errors import InputError, RunFailed, complain
from .schedule import nearest

# Each subcommand is the module of that name in `commands/` (`import_` for a word of Python's): to add one, write the
# module and a line here.
COMMANDS = {
    "show": "draw a schedule and say what it costs",
    "compare": "a table of all schemes for one shape",
    "check": "check a schedule in a CSV file and draw it",
    "data": "make the token file that train reads",
    "import": "make a checkpoint of GPT-2's or BERT's weights as Hugging Face keeps them",
    "export": "write a checkpoint as transformers loads it",
    "generate": "continue a text by a checkpoint, on one process",
    "train": "train a model on all ranks of an MPI job",
    "plan": "choose how to train a model on a machine, and predict the step",
    "bench": "measure schedules on this machine and network, without a GPU",
    "calibrate": "measure this machine, for what plans on it and checks a run against its plan",
    "slurm": "write the Slurm job of a training",
    "watch": "watch a run in progress, from its log",
    "report": "sum up a run and draw its planned and its measured step",
    "doctor": "look at this machine, try its MPI, compare training with one process",
    "completion": "what completes all this in bash, fish or zsh",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `chimera-mpi` with these arguments (those of the process by default) and return its exit code."""
    if sys.stdout is None:  # closed by who started this: it fails to print like all that cannot
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows another
    # Once a rank has left with another code than 0, srun --kill-on-bad-exit ends those that are leaving, and their code
    # would be that of the signal.
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    atexit.register(settle)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with printing():
            return _run(words)
    except InputError as error:
        complain(f"chimera-mpi: {error}")
        return 2
    except RunFailed as error:
        complain(f"chimera-mpi: {error}")
        return 1
    except ReaderLeft:
        return 0
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"chimera-mpi {_version()}")
        return 0
    if words[0] not in COMMANDS:
        what = "option" if words[0].startswith("-") else "command"
        raise InputError(f"unknown {what} '{words[0]}': {nearest(words[0], [*COMMANDS, '--help', '--version'])}")
    command = module_of(words[0])
    try:
        args = _parser(words[0], command).parse_args(words[1:])
    except SystemExit as stop:  # --help has been printed
        return int(stop.code or 0)
    return int(command.run(args))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: chimera-mpi COMMAND ... (chimera-mpi COMMAND --help says more and has an example)",
            "",
            "Pipeline-parallel training over MPI: plan, check, draw, run and measure schedules.",
            "",
            *(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()),
            f"  {'--version':{width}}  say which version this is",
        ]
    )


def _version() -> str:
    from importlib.metadata import version

    return version("chimera-mpi")


class Parser(argparse.ArgumentParser):
    """Names the nearest option for a misspelt one, and leaves usage errors to `main`."""

    def parse_args(self, args=None, namespace=None):
        """As argparse does, but words such as key=value may stand on either side of options."""
        if self._subparsers is not None:
            return super().parse_args(args, namespace)
        return self.parse_intermixed_args(args, namespace)

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, but a misspelt option is named before others are missed."""
        if self._subparsers is not None:  # the action's own parser knows its options
            return super().parse_known_args(args, namespace)
        for word in args or ():
            option = word.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions and option != "--":
                command = self.prog.removeprefix("chimera-mpi ")
                raise InputError(f"{command} has no option '{option}': {nearest(option, self._long_options())}")
        return super().parse_known_args(args, namespace)

    def print_help(self, file=None):
        """As argparse does, but that it cannot be printed is not passed over."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}: see {self.prog} --help")

    def _long_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def _parser(name: str, command: ModuleType) -> Parser:
    parser = Parser(
        prog=f"chimera-mpi {name}",
        description=command.__doc__,
        epilog=f"example:\n{command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser
