"""Print what completes chimera-mpi's commands, options, presets, schemes, keys and their values in a shell.

Put the line of your shell into its start-up file; it asks this program again each time, so that it never is of an
older version. To save those 0.3 s, write the output to a file and source that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

from . import module_of
from ._keys import keys

EXAMPLE = """\
  source <(chimera-mpi completion bash)             # in ~/.bashrc
  source <(chimera-mpi completion zsh)              # in ~/.zshrc, after compinit
  chimera-mpi completion fish | source              # in ~/.config/fish/config.fish"""

KEYS = "KEY=VALUE"


@dataclass(frozen=True)
class Place:
    """After a command: words that may follow, and after an option of it its values; no values: a file or any word.

    `options` are those that take a value; `takes_keys`, whether key=value may follow.
    """

    words: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_keys: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SHELLS), help="which one completes")


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](places(), keys()), end="")
    return 0


# ---- what there is


def places() -> dict[str, Place]:
    """By the command, and by command and action where it has several."""
    modules = [module.name for module in iter_modules([str(Path(__file__).parent)]) if module.name[0] != "_"]
    commands = [name.rstrip("_") for name in modules]
    found = {"": Place((*commands, "--help", "--version"))}
    for name in commands:
        parser = argparse.ArgumentParser(prog=name)
        module_of(name).add_arguments(parser)
        found |= _places(name, parser)
    return found


def _places(name: str, parser: argparse.ArgumentParser) -> dict[str, Place]:
    words: list[str] = []
    options: dict[str, tuple[str, ...]] = {}
    below: dict[str, Place] = {}
    takes_keys = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                words.append(word)
                below |= _places(f"{name} {word}", sub)
        elif not action.option_strings:
            words += _values(action)
            takes_keys |= action.metavar == KEYS
        else:
            words += action.option_strings
            if action.nargs != 0:
                options |= dict.fromkeys(action.option_strings, _values(action))
    return {name: Place(tuple(words), options, takes_keys), **below}


def _values(action: argparse.Action) -> tuple[str, ...]:
    """What an argument may be, as far as its choices or its name in the help tell."""
    from ..config import presets
    from ..predict.machine import machines
    from ..schedule import ALIASES, SCHEMES, SYNCS

    if action.choices:
        return tuple(map(str, action.choices))
    named: dict[str, Iterable[str]] = {
        "PRESET|FILE.toml": presets(),
        "NAME|FILE": machines(),
        "SCHEME": [*SCHEMES, *ALIASES],
        "SCHEME|FILE.csv": [*SCHEMES, *ALIASES],
        "NAME,...": SCHEMES,
        "WHEN": SYNCS,
    }
    if (name := str(action.metavar)) in named:
        return tuple(named[name])
    words = name.split("|")
    return tuple(words) if len(words) > 1 and all(map(str.islower, words)) and name.replace("|", "").isalpha() else ()


# ---- how shells are told


class Answer(NamedTuple):
    """`words` may stand where PLACE:OPTION-BEFORE:WORD begins with one of `beginnings`, or, if `anywhere`, has it in
    it. Without words it is a file, or nobody knows."""

    beginnings: Sequence[str]
    words: Sequence[str]
    anywhere: bool = False

    @property
    def patterns(self) -> list[str]:
        return [f"{'*' * self.anywhere}{beginning}*" for beginning in self.beginnings]


def _answers(places: Mapping[str, Place], keys: Mapping[str, tuple[str, ...]]) -> Iterator[Answer]:
    """In the order to look in."""
    options: dict[tuple[str, ...], list[str]] = {}
    for name, place in places.items():
        for option, values in place.options.items():
            options.setdefault(values, []).append(f"{name}:{option}:")
    for values, beginnings in options.items():
        yield Answer(beginnings, values)
    for key, values in keys.items():
        if values:
            yield Answer([f":{key}="], [f"{key}={value}" for value in values], anywhere=True)
    for name, place in places.items():
        yield Answer([f"{name}:"], [*place.words, *(f"{key}=" for key in keys if place.takes_keys)])


def _posix(places: Mapping[str, Place], keys: Mapping[str, tuple[str, ...]]) -> str:
    """Functions that bash and zsh both understand."""
    actions = " | ".join(f'"{name}"' for name in places if " " in name)
    cases = []
    for answer in _answers(places, keys):
        patterns = " | ".join(pattern.replace(" ", r"\ ") for pattern in answer.patterns)
        cases.append(f"        {patterns}) set -- {' '.join(answer.words)} ;;\n")
    return f"""\
_chimera_mpi_place() {{  # THE FIRST WORDS
    case "$1 $2" in
        {actions}) echo "$1 $2" ;;
        *) echo "$1" ;;
    esac
}}

_chimera_mpi_candidates() {{  # PLACE OPTION-BEFORE WORD
    case "$1:$2:$3" in
{"".join(cases)}        *) set -- ;;
    esac
    echo "$@"
}}
"""


def bash(places: Mapping[str, Place], keys: Mapping[str, tuple[str, ...]]) -> str:
    return _posix(places, keys) + _BASH


def zsh(places: Mapping[str, Place], keys: Mapping[str, tuple[str, ...]]) -> str:
    return "#compdef chimera-mpi\n" + _posix(places, keys) + _ZSH


def fish(places: Mapping[str, Place], keys: Mapping[str, tuple[str, ...]]) -> str:
    actions = " ".join(f"'{name}'" for name in places if " " in name)
    cases = []
    for answer in _answers(places, keys):
        patterns = " ".join(f"'{pattern}'" for pattern in answer.patterns)
        cases.append(f"        case {patterns}\n            set words {' '.join(answer.words)}\n")
    return f"""\
function __chimera_mpi_candidates
    set -l typed (commandline -opc)
    set -l place ''
    if set -q typed[2]
        set place $typed[2]
        if contains -- "$typed[2] $typed[3]" {actions}
            set place "$typed[2] $typed[3]"
        end
    end
    set -l option (string match -- '-*' $typed[-1])
    set -l words
    switch "$place:$option:"(commandline -ct)
{"".join(cases)}    end
    string match -r -- '^'(string escape --style=regex -- (commandline -ct))'.*' $words
end
complete -c chimera-mpi -f -n 'count (__chimera_mpi_candidates) >/dev/null' -a '(__chimera_mpi_candidates)'
"""


# Words are taken from the line: readline would part them at each =. Behind a launcher that has no completion of its own
# what follows chimera-mpi is completed too.
_BASH = r"""
_chimera_mpi() {
    local line=${COMP_LINE:0:COMP_POINT} place='' option='' words word at
    read -ra words <<<"$line"
    case $line in *[[:space:]]) words+=('') ;; esac
    while [ ${#words[@]} -gt 1 ] && [ "${words[0]##*/}" != chimera-mpi ]; do
        words=("${words[@]:1}")
    done
    at=$((${#words[@]} - 1))
    [ "$at" -gt 0 ] || return 0
    word=${words[at]}
    [ "$at" -eq 1 ] || place=$(_chimera_mpi_place "${words[1]}" "${words[2]}")
    case ${words[at - 1]} in -*) option=${words[at - 1]} ;; esac
    # shellcheck disable=SC2207  # candidates have no spaces
    COMPREPLY=($(compgen -W "$(_chimera_mpi_candidates "$place" "$option" "$word")" -- "$word"))
    case $COMP_WORDBREAKS in
        *=*) case $word in *=*) COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}") ;; esac ;;
    esac
    case ${COMPREPLY[*]} in *=) compopt -o nospace 2>/dev/null ;; esac
    return 0
}

complete -o default -F _chimera_mpi chimera-mpi
for launcher in mpirun mpiexec srun; do
    complete -p "$launcher" >/dev/null 2>&1 || complete -o default -F _chimera_mpi "$launcher"
done
unset launcher
"""

_ZSH = r"""
_chimera_mpi() {
    local place='' option='' found
    ((CURRENT == 2)) || place=$(_chimera_mpi_place "${words[2]}" "${words[3]}")
    [[ ${words[CURRENT - 1]} != -* ]] || option=${words[CURRENT - 1]}
    found=(${=$(_chimera_mpi_candidates "$place" "$option" "${words[CURRENT]}")})
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    ((compstate[nmatches])) || _files
}

compdef _chimera_mpi chimera-mpi
"""

SHELLS = {"bash": bash, "fish": fish, "zsh": zsh}
