"""The documentation tells the truth: its commands print what it shows, its Python runs, its jobs can be had."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from logs import Made, write_log

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


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with the made-up study of docs/scaling.md."""
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


@pytest.mark.parametrize("block", shown())
def test_commands_print_what_is_shown(block, capsys, monkeypatch, request):
    command, _, expected = block.removeprefix("$ chimera-mpi ").partition("\n")
    monkeypatch.setenv("COLUMNS", "80")
    if command.startswith("report "):
        monkeypatch.chdir(request.getfixturevalue("study"))
    assert main(expanded(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    wanted = expected.splitlines()
    assert printed[: len(wanted)] == wanted


SCALING = (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^chimera-mpi ((?:report|plan) .*)$", SCALING, re.MULTILINE))
def test_commands_that_read_a_study_do(command, study, capsys, monkeypatch):
    monkeypatch.chdir(study)
    assert main(expanded(command)) == 0
    words = shlex.split(command)
    for made in (
        words[at + 1] for at, word in enumerate(words) if word in ("--plot", "--html", "--svg", "--tensorboard")
    ):
        assert Path(made).exists()


@pytest.mark.parametrize("command", re.findall(r"^(.*scripts/slurm/scaling.sh --dry-run.*)$", SCALING, re.MULTILINE))
def test_commands_that_submit_a_study_would(command, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = command if command.startswith("STUDY=") else f"STUDY={tmp_path}/study {command}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("would run") == 4 and "left out" not in done.stdout


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
