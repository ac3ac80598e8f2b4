"""Completion, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from chimera_mpi.cli import COMMANDS, main
from chimera_mpi.commands._keys import keys
from chimera_mpi.commands.completion import SHELLS, places
from chimera_mpi.config import Config, presets
from chimera_mpi.schedule import SCHEMES


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell, told in SHELLS.items():
        (folder / shell).write_text(told(places(), keys()))
    return folder


BASH = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
read -ra COMP_WORDS <<<"$2"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_chimera_mpi
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete -C $argv[2]"
ZSH = """
compdef() { :; }
compadd() {
    while [[ $1 != -- ]]; do shift; done
    print -l -- ${@:2}
}
_files() { :; }
source "$1"
words=("${(@s: :)2}") CURRENT=${#words}
typeset -A compstate=(nmatches 1)
_chimera_mpi
"""


def completed(shell: str, scripts: Path, line: str) -> set[str]:
    """What a shell offers at the end of a line. zsh itself leaves out what does not begin as the word does."""
    program = {"bash": ["bash", "--norc", "-c", BASH, "bash"], "fish": ["fish", "-N", "-c", FISH]}.get(shell)
    done = subprocess.run(
        [*(program or ["zsh", "-f", "-c", ZSH, "zsh"]), str(scripts / shell), line],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = {words.partition("\t")[0] for words in done.stdout.splitlines()}
    return {word for word in found if word.startswith(line.rpartition(" ")[2])} if shell == "zsh" else found - {""}


ALL = pytest.mark.parametrize(
    "shell", [pytest.param(s, marks=pytest.mark.skipif(not shutil.which(s), reason=f"no {s}")) for s in SHELLS]
)


@ALL
def test_commands_options_schemes_and_presets(shell, scripts):
    assert set(COMMANDS) <= completed(shell, scripts, "chimera-mpi ")
    assert completed(shell, scripts, "chimera-mpi comp") == {"compare", "completion"}
    assert completed(shell, scripts, "chimera-mpi show chimera_") == {"chimera_zb"}
    assert completed(shell, scripts, "chimera-mpi show chimera --mic") == {"--micro-batches"}
    assert completed(shell, scripts, "chimera-mpi show chimera --order ") >= {"drawn", "costs"}
    assert {"gpt-tiny", "gpt2-small", "scheme=", "depth="} <= completed(shell, scripts, "chimera-mpi train ")
    assert {"gpt-tiny", "depth="} <= completed(shell, scripts, "chimera-mpi train scheme=chimera ")
    assert completed(shell, scripts, "chimera-mpi data pre") == {"prepare"}
    assert "--validation-fraction" in completed(shell, scripts, "chimera-mpi data prepare --val")
    assert completed(shell, scripts, "chimera-mpi data prepare --errors ") == {"replace", "skip", "strict"}
    assert completed(shell, scripts, "chimera-mpi plan gpt2-small --machine pi") == {"piz-daint"}


@ALL
def test_keys_and_their_values(shell, scripts):
    def values(key: str, beginning: str = "") -> set[str]:
        found = completed(shell, scripts, f"chimera-mpi train gpt-tiny {key}={beginning}")
        return {word.removeprefix(f"{key}=") for word in found}

    assert values("scheme") == set(SCHEMES)
    assert values("precision") == {"fp32", "bf16", "fp16", "fp64"}
    assert values("tied") == {"true", "false"}
    assert values("optimizer", "adam") == {"adamw"}
    assert values("device_aware_mpi") == {"auto", "true", "false"}


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_behind_a_launcher(scripts):
    assert completed("bash", scripts, "mpirun -n 4 chimera-mpi train gpt2-s") == {"gpt2-small"}
    assert completed("bash", scripts, "srun -N 2 .venv/bin/chimera-mpi sho") == {"show"}
    assert completed("bash", scripts, "mpirun -n 4 hostn") == set()
    # readline takes scheme, = and what follows for three words, and asks for the third
    assert completed("bash", scripts, "mpirun -n 4 chimera-mpi train gpt-tiny sync=la") == {"lazy"}


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_where_nothing_is_listed_files_are(scripts):
    commands = ("data prepare --tokenizer ", "show chimera --svg ", "train my_fi", "train gpt-tiny data=")
    for line in (f"chimera-mpi {command}" for command in commands):
        assert completed("bash", scripts, line) == set()


def test_all_keys_are_offered_once():
    assert list(keys()) == list(Config.model_fields)
    assert set(presets()) <= set(places()["train"].words)
    assert all(len(set(values)) == len(values) for values in keys().values())


def test_the_command_prints_a_script(capsys):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert "chimera-mpi" in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2
