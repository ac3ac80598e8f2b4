"""The command line, as its users meet it: output, exit codes, one-line errors, quick answers."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from chimera_mpi.cli import COMMANDS, main
from chimera_mpi.schedule import SCHEMES

SHOW = ["show", "chimera", "--depth", "4", "--micro-batches", "4"]
COMPARE = ["compare", "--depth", "4", "--micro-batches", "4,8"]


def test_show_draws_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--backward", "2", "--width", "80"]) == 0
    out, err = capsys.readouterr()
    assert "P0 F0─ F1─ ··· f2─ b2───── f3─ b3─────R··· B0───── ······· B1─────RU" in out
    assert "makespan          16 s" in out
    assert "C_f = 4, C_b = 6" in out
    assert "live activations      3     4     4     3" in out
    assert not err and "\x1b" not in out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_show_keeps_to_the_width(capsys: pytest.CaptureFixture[str], width: int) -> None:
    assert main(["show", "chimera", "--depth", "8", "--micro-batches", "8", "--width", str(width)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_show_in_colour_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SHOW, "--color", "always"])
    assert "\x1b[38;5;" in capsys.readouterr().out


@pytest.mark.parametrize("scheme", [*SCHEMES, "dapple"])
def test_show_as_json(capsys: pytest.CaptureFixture[str], scheme: str) -> None:
    assert main(["show", scheme, "--depth", "4", "--micro-batches", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["workers"]) == 4
    assert 0 <= found["bubble_ratio"] < 1
    assert {worker for worker, *_ in found["spans"]} == {0, 1, 2, 3}


def test_costs_are_exact_and_may_differ_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--json", "--forward", "0.1", "--backward", "0.2"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == 1.6
    assert main([*SHOW, "--json", "--forward", "1,2,3,4"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] > 16


def test_show_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {suffix: tmp_path / f"a.{suffix}" for suffix in ("svg", "html", "trace")}
    names["svg"].write_text("an older picture")
    assert main([*SHOW, *(f"--{suffix}={path}" for suffix, path in names.items())]) == 0
    ET.fromstring(names["svg"].read_text(encoding="utf-8"))
    assert names["html"].read_text(encoding="utf-8").startswith("<!doctype html>")
    json.loads(names["trace"].read_text(encoding="utf-8"))


def test_options_of_schemes_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "chimera", "--depth", "8", "--micro-batches", "8", "--pairs", "2", "--sync", "lazy", "--json"])
    assert len(json.loads(capsys.readouterr().out)["pipes"]) == 4


WRONG = {
    "unknown command 'shwo': did you mean 'show'?": ["shwo"],
    "unknown option '--vers": ["--vers"],
    "unknown scheme 'chimra': did you mean 'chimera'?": ["show", "chimra", *SHOW[2:]],
    "has no option '--dept': did you mean '--depth'?": ["show", "chimera", "--dept", "4", "--micro-batches", "4"],
    "required: --micro-batches": ["show", "chimera", "--depth", "4"],
    "chimera needs an even depth, not 5: try depth=4 or depth=6": ["show", "chimera", "--depth=5", *SHOW[4:]],
    "--depth: must be a whole number of 1 or more, not '0'": ["show", "chimera", "--depth", "0", *SHOW[4:]],
    "not '4.5'": ["show", "chimera", "--depth", "4.5", *SHOW[4:]],
    "1f1b has no option 'pairs'": ["show", "1f1b", *SHOW[2:], "--pairs", "2"],
    "--forward has 3 values, but chimera has 4 stages": [*SHOW, "--forward", "1,2,3"],
    "'x' is no number of seconds": [*SHOW, "--forward", "x"],
    "not -1": [*SHOW, "--forward=-1"],
    "not nan": [*SHOW, "--forward", "nan"],
    "not 1e999999999": [*SHOW, "--forward", "1e999999999"],
    "takes 0 s": [*SHOW, "--forward", "0", "--backward", "0"],
    "unknown sync 'never'": [*SHOW, "--sync", "never"],
    "invalid choice: 'maybe'": [*SHOW, "--color", "maybe"],
    "cannot write /: Is a directory": [*SHOW, "--svg", "/"],
    "cannot write /no/such/folder/a.svg: No such file or directory": [*SHOW, "--svg", "/no/such/folder/a.svg"],
    "unknown scheme 'gpip': did you mean 'gpipe'?": ["compare", "gpip", *COMPARE[1:]],
    "'pair=2' is no option of chimera": ["compare", "chimera:pair=2", *COMPARE[1:]],
    "pairs must be int, not 'two'": ["compare", "chimera:pairs=two", *COMPARE[1:]],
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert main(WRONG[message]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("chimera-mpi: ") and err.count("\n") == 1 and not out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("chimera-mpi ")
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(command in overview for command in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("command", ["show", "compare"])
def test_help_has_an_example_that_runs(
    capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main([command, "--help"]) == 0
    example = capsys.readouterr().out.partition("example:\n")[2].splitlines()[0].split()
    monkeypatch.chdir(tmp_path)
    assert example[0] == "chimera-mpi" and main(example[1:]) == 0


def test_compare_marks_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMPARE) == 0
    out = capsys.readouterr().out
    block = out.partition("N = 8")[0]
    assert "N = 4" in block and "16 s" in block
    assert "21 s " in next(line for line in block.splitlines() if line.startswith("gpipe"))


def test_compare_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--depth", "5", "--micro-batches", "5"]) == 0
    assert "left out: chimera needs an even depth, not 5" in capsys.readouterr().out
    assert main(["compare", "chimera", "--depth", "5", "--micro-batches", "5"]) == 2


def test_compare_as_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["scheme"] for row in found["schemes"]} | {row["scheme"] for row in found["refused"]} == set(SCHEMES)
    assert main([*COMPARE, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["makespan_s"]) for row in rows] == [row["makespan_s"] for row in found["schemes"]]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


def test_plans_need_neither_torch_nor_mpi() -> None:
    heavy = "torch mpi4py numpy h5py pydantic rich matplotlib"
    for words in SHOW, COMPARE:
        code = (
            f"import sys; from chimera_mpi.cli import main; main({words}); "
            f"print([m for m in '{heavy}'.split() if m in sys.modules], file=sys.stderr)"
        )
        assert python("-c", code).stderr == "[]\n"


def test_as_a_module_and_into_a_closed_pipe() -> None:
    assert python("-m", "chimera_mpi", "--version").returncode == 0
    script = f"{sys.executable} -m chimera_mpi show 1f1b --depth 8 --micro-batches 64 --json"
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script} | head -1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (piped.returncode, piped.stderr) == (0, "")


def test_a_terminal_without_unicode() -> None:
    code = "import sys; from chimera_mpi.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, *SHOW, "--forward", "1e-6"],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.isascii()
