"""docs/scaling.md tells the truth: its commands read a study, and print the tables that it shows."""

from __future__ import annotations

import re
import shlex
from glob import glob
from pathlib import Path

import pytest
from logs import Made, write_log

from chimera_mpi.cli import main

PAGE = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()
COMMANDS = re.findall(r"^chimera-mpi (report .*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with the made-up study: one node three times, in two folders."""
    folder = tmp_path_factory.mktemp("study")
    for scheme, forward_s in (("1f1b", 0.02), ("chimera", 0.0165)):
        for nodes, seeds in ((1, 3), (2, 1), (4, 1)):
            for seed in range(seeds):
                place = folder / f"runs/scaling{'-again' * (seed > 0)}/{nodes}-nodes/{scheme}-{seed}/log.h5"
                made = Made(
                    4 * nodes, steps=30, chance=seed, forward_s=forward_s, allreduce_s=0.003 * nodes, noise=0.04,
                    hosts=[f"node{node}" for node in range(nodes)],
                )  # fmt: skip
                write_log(place, made, scheme=scheme, seed=seed, micro_batches=8, micro_batch_size=4)
    return folder


def expanded(command: str) -> list[str]:
    """The words of a command as a shell hands them over, here."""
    return [name for word in shlex.split(command) for name in (sorted(glob(word)) if "*" in word else [word])]


def test_the_tables_are_those_that_report_prints(study, capsys, monkeypatch):
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(study)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(expanded(COMMANDS[0])) == 0
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_what_is_written_is_there(command, study, monkeypatch):
    if "pdf" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(study)
    assert main(expanded(command)) == 0
    words = shlex.split(command)
    names = [words[at + 1] for at, word in enumerate(words) if word in ("--plot", "--html", "--svg", "--tensorboard")]
    assert names or "--json" in words
    assert all(Path(name).exists() for name in names)
