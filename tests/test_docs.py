"""The documentation tells the truth: its commands print what it shows, its Python runs, its jobs can be had."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from chimera_mpi.cli import main
from chimera_mpi.config import load
from chimera_mpi.schedule import SCHEMES
from chimera_mpi.train import plan_job

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(found[2], id=f"{page.name}-{number}")
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text()))
        if found[1] == language
    ]


def shown():
    """Commands with what they print."""
    return [block for block in blocks("") if block.values[0].startswith("$ chimera-mpi ")]


def jobs():
    """The words of every `train` that is to be started on several ranks, and on how many."""
    pattern = re.compile(r"mpirun(?: --?[\w-]+(?: none)?)*? -n (\d+) chimera-mpi train ([^\n`#]+)")
    return [
        pytest.param(int(ranks), words, id=f"{page.name}: {words.strip()}")
        for page in PAGES
        for ranks, words in pattern.findall(page.read_text())
    ]


@pytest.mark.parametrize("block", shown())
def test_commands_print_what_is_shown(block, capsys, monkeypatch):
    command, _, expected = block.removeprefix("$ chimera-mpi ").partition("\n")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    wanted = expected.splitlines()
    assert printed[: len(wanted)] == wanted


@pytest.mark.parametrize("block", [block for block in blocks("python") if "MPI.COMM_WORLD" not in block.values[0]])
def test_python_runs(block):
    before = dict(SCHEMES)
    try:
        exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})
    finally:
        SCHEMES.clear()
        SCHEMES.update(before)


@pytest.mark.parametrize(("ranks", "words"), jobs())
def test_jobs_can_be_had(ranks, words, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(BLOCK.findall((ROOT / "docs/your_model.md").read_text())[0][1])
    shutil.copy(ROOT / "chimera_mpi/presets/gpt-tiny.toml", tmp_path / "my.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source, *overrides = shlex.split(words)
    plan_job(load(source, [word for word in overrides if "=" in word]), ranks)
