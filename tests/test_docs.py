"""The documentation tells the truth: its commands print what it shows, its Python runs, its jobs can be had, its links
lead somewhere, and what it quotes the program really says.

A block without a language that begins with a program of `CARRIED_OUT` is commands, a line each: all are tried as far
as this takes no cluster and no time. A block that begins with `$ chimera-mpi` is one command and what it prints.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

from chimera_mpi import runlog
from chimera_mpi.cli import COMMANDS, _parser, main
from chimera_mpi.commands import module_of
from chimera_mpi.config import load, presets
from chimera_mpi.schedule import SCHEMES
from chimera_mpi.train import plan_job

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:chimera-mpi|mpirun|mpiexec|srun|python|bash|sbatch) [^`]+)`(?!`)")
SETTING = re.compile(r"[A-Z_]+=")


def blocks(language):
    return [
        pytest.param(found[2], id=f"{page.name}-{number}")
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text()))
        if found[1] == language
    ]


def is_shown(text: str) -> bool:
    return text.startswith("$ chimera-mpi ")


def shown():
    """Commands with what they print."""
    return [block for block in blocks("") if is_shown(block.values[0])]


def commands():
    """Those in a block one after the other, since one may use what the last has made."""
    return [block for block in blocks("") if program_of(block.values[0].split()) in CARRIED_OUT]


def program_of(words: list[str]) -> str:
    """Its name, or of a script its kind; behind settings for its environment."""
    name = next(dropwhile(SETTING.match, words), "")
    return name if name in CARRIED_OUT else Path(name).suffix


def inline():
    return [
        pytest.param(words, id=f"{page.name}: {words}")
        for page in PAGES
        for words in dict.fromkeys(INLINE.findall(BLOCK.sub("", page.read_text())))
    ]


@pytest.mark.parametrize("block", shown())
def test_commands_print_what_is_shown(block, capsys, monkeypatch):
    command, _, expected = block.removeprefix("$ chimera-mpi ").partition("\n")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    wanted = expected.splitlines()
    assert printed[: len(wanted)] == wanted


def test_the_plan_is_what_plan_prints(capsys, monkeypatch, tmp_path):
    """The README's, of which it leaves out lines. Only the schemes that it shows are looked at again: all of them would
    take five times as long. Columns are wider where a name is longer."""
    command, lines = re.search(
        r"^```\nchimera-mpi (plan .*?)\n```.*?^```text\n(.*?)^```$", PAGES[0].read_text(), re.MULTILINE | re.DOTALL
    ).groups()
    monkeypatch.chdir(tmp_path)
    schemes = sorted(SCHEMES.keys() & lines.split())
    assert len(schemes) > 2 and "1f1b" in schemes
    assert main([*shlex.split(command), "--schemes", ",".join(schemes)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines.splitlines() if line != "..." and line.split() not in printed] == []


@pytest.mark.parametrize("block", [block for block in blocks("python") if "MPI.COMM_WORLD" not in block.values[0]])
def test_python_runs(block):
    before = dict(SCHEMES)
    try:
        exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})
    finally:
        SCHEMES.clear()
        SCHEMES.update(before)


# ---- commands


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder like a clone, with the files that the pages speak of as the reader's own."""
    (tmp_path / "my_models.py").write_text(BLOCK.findall((ROOT / "docs/your_model.md").read_text())[0][1])
    for name in ("my.toml", "train.toml", "plan.toml"):
        shutil.copy(ROOT / "chimera_mpi/presets/gpt-tiny.toml", tmp_path / name)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "docs" / "img").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def carry_out(words: list[str]) -> None:
    """One command, with what it may have before it and the file that it may write to."""
    settings = dict(word.split("=", 1) for word in takewhile(SETTING.match, words))
    words = words[len(settings) :]
    if ">" in words:
        with open(words[words.index(">") + 1], "w") as target, redirect_stdout(target):
            carry_out(words[: words.index(">")])
        return
    assert program_of(words) in CARRIED_OUT, f"nobody knows how to try '{' '.join(words)}'"
    CARRIED_OUT[program_of(words)](words, settings)


def ours(words: list[str], settings: dict[str, str], ranks: int = 1) -> None:
    """A command of this program: run where that takes no time, else its arguments are read."""
    name, *rest = words[1:]
    if name == "train":
        source, *overrides = rest
        plan_job(load(source, [word for word in overrides if "=" in word]), ranks)
    elif name in ("show", "compare", "slurm", "completion"):
        assert main([name, *rest]) == 0
    else:
        arguments(name, rest)


def arguments(name: str, words: list[str]) -> argparse.Namespace:
    """As its parser reads them; configurations, machines and schemes that they name are there."""
    assert name in COMMANDS, name
    args = _parser(name, module_of(name)).parse_args(words)
    if name == "plan":
        from chimera_mpi.commands._asked import asked_of

        asked_of(args)
    elif name == "calibrate":
        load(args.source, args.overrides)
    return args


def launched(words: list[str], settings: dict[str, str]) -> None:
    """By mpirun or srun."""
    start = next((at for at, word in enumerate(words) if word in ("chimera-mpi", "python")), None)
    if start is None:
        return
    ranks = re.search(r"-n (\d+)", " ".join(words[:start]))
    if words[start] == "python":
        script(words[start:], settings)
    else:
        ours(words[start:], settings, int(ranks[1]) if ranks else 1)


def script(words: list[str], settings: dict[str, str]) -> None:
    """By python or bash: it is there, and knows the options."""
    path = Path(words[1])
    if words[1] == "-m":
        return
    text = path.read_text() + "".join(map(Path.read_text, path.parent.glob("_*.py")))
    for option in [word for word in words[2:] if word.startswith("--")]:
        assert re.search(rf"{option.partition('=')[0]}\b", text), option
    if path.suffix == ".sh":
        reads(path)


def reads(path: Path) -> None:
    """The shell understands it."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and path.stat().st_size, done.stderr


def submitted(words: list[str], settings: dict[str, str]) -> None:
    """By sbatch: the job is there, and train would take its keys on as many ranks."""
    at = next(at for at, word in enumerate(words) if word.endswith(".sbatch"))
    reads(Path(words[at]))
    options = dict(word.removeprefix("--").split("=", 1) for word in words[1:at])
    if words[at].endswith("/train.sbatch"):
        plan_job(load("gpt-tiny", words[at + 1 :]), int(options.get("nodes", 1)))


def studied(words: list[str], settings: dict[str, str]) -> None:
    """A script that submits: what it would."""
    reads(Path(words[0]))
    if "--dry-run" in words:
        env = {**os.environ, **settings, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env)
        assert done.returncode == 0 and "would run" in done.stdout, done.stdout + done.stderr


def installed(words: list[str], settings: dict[str, str]) -> None:
    """By pip: the extras are there."""
    settings_of = configparser.ConfigParser()
    settings_of.read(ROOT / "setup.cfg")
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(settings_of["options.extras_require"])


def other(words: list[str], settings: dict[str, str]) -> None:
    """A program that is not ours."""


CARRIED_OUT = {
    "chimera-mpi": ours,
    "mpirun": launched,
    "mpiexec": launched,
    "srun": launched,
    "python": script,
    "bash": script,
    "sbatch": submitted,
    ".sh": studied,
    "pip": installed,
    **dict.fromkeys(
        ("h5dump", "tensorboard", "scontrol", "squeue", "scancel", "cd", "export", "source", "xdg-open"), other
    ),
}


@pytest.mark.parametrize("block", commands())
def test_commands_can_be_given(block, place):
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            carry_out(words)


@pytest.mark.parametrize("words", inline())
def test_commands_in_the_text_can_be_given(words, place):
    """With an ellipsis or a capital for what the reader fills in, only their names are looked at."""
    program, *rest = shlex.split(words)
    if re.search(r"…|\.\.\.|\b[A-Z]{2,}\b", words) or len(rest) < 2:
        assert program != "chimera-mpi" or rest[0] in COMMANDS
    else:
        carry_out([program, *rest])


# ---- tables, links and quotations


def test_the_log_has_the_columns_that_are_listed():
    text = (ROOT / "docs/log.md").read_text()
    tables = {
        "/steps/*": [column.name for column in runlog.STEPS],
        "/workers/*": [column.name for column in runlog.WORKERS],
        "/evaluations/*": [column.name for column in runlog.EVALUATIONS],
        "/spans": runlog.SPAN.names,
        "/sessions": runlog.SESSION.names,
    }
    for name, columns in tables.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|(.+)$", text, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == list(columns), name


def test_all_commands_and_presets_are_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [name for name in [*COMMANDS, *presets()] if f"`{name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]+))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not heading or heading in anchors(path.read_text()), f"{page.name} links to {target}#{heading}"


def anchors(text: str) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@cache
def said() -> str:
    """All texts of the program, with an ellipsis for what varies."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(value) for value in node.values)
        return str(node.value) if isinstance(node, ast.Constant) else "…"

    files = (ROOT / "chimera_mpi").rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    strings = [text(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return "\n".join(re.sub("…+", "…", " ".join(string.split())) for string in strings)


def quoted() -> Iterator[str]:
    for page in PAGES:
        yield from re.findall(r"^> (.+)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", [*quoted()])
def test_messages_are_quoted_as_they_are(message):
    assert message in said()
