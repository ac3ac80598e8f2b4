"""The command line, as its users meet it: output, exit codes, one-line errors, quick answers."""

from __future__ import annotations

import csv
import errno
import html
import io
import json
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from chimera_mpi.cli import COMMANDS, main
from chimera_mpi.commands._plan import write
from chimera_mpi.errors import InputError
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
    shape = ["--depth", "8", "--micro-batches", "8", "--json"]
    for asked in (["chimera", "--pairs", "2", "--sync", "lazy"], ["chimera:pairs=2,sync=lazy"]):
        main(["show", *asked, *shape])
        assert len(json.loads(capsys.readouterr().out)["pipes"]) == 4
    assert main(["show", "chimera:pairs=2", "--pairs", "4", *shape]) == 2
    assert "chimera:pairs=2 has its own pairs: leave out --pairs" in capsys.readouterr().err


# ---- schedules in files


@pytest.fixture
def torchs(tmp_path: Path) -> Path:
    """A schedule as torch writes it: 1F1B on two workers, with a mark and line ends of another system."""
    path = tmp_path / "torch.csv"
    path.write_bytes("\ufeff0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n".encode())
    return path


def test_check_says_what_is_sound_and_draws_it(torchs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(torchs), "--backward", "2", "--width", "80"]) == 0
    out = capsys.readouterr().out
    assert "is sound: 2 workers, 2 stages, 1 pipeline, 2 micro-batches, 1 update, 12 ops" in out
    assert "torch.csv, D=2, N=2: makespan 9 s" in out
    assert main(["show", str(torchs), "--backward", "2", "--width", "80"]) == 0
    assert capsys.readouterr().out == out.partition("\n\n")[2]
    assert main(["check", str(torchs), "--as", "dapple", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "1f1b"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_show_writes_check_reads(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "mine.csv")
    shape = ["--depth", "4", "--micro-batches", "6"]
    assert main(["show", scheme, *shape, "--json", "--csv", path]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(["check", path, "--as", scheme, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ["line 1: 0B1 is missing"]),
        ("0F0,0F1,0B0,0B1,0B1\n1F0,1B0,1F1,1B1\n", ["line 1, cell 5: 0B1 is there twice, first in cell 4"]),
        ("0F0,0F1,0B0,0b1\n1F0,1B0,1F1,1B1\n", ["line 1, cell 4: '0b1' is no op"]),
        ("", ["there is no op in it"]),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n",
            [
                "deadlock: worker 0 is at 0B0 and waits for 1B0, worker 1 is at 1F1",
                "v",
                "worker 0: 0F0 0B0 0F1 0B1",
                "v",
            ],
        ),
    ],
)
def test_check_shows_what_is_wrong(
    cells: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(cells)
    assert main(["check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"chimera-mpi: {path}: ")
    for said, line in zip(lines, err.splitlines(), strict=False):
        assert said in line


def test_a_schedule_is_held_to_what_a_scheme_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "gpipe.csv")
    main(["show", "gpipe", "--depth", "2", "--micro-batches", "8", "--csv", path])
    capsys.readouterr()
    assert main(["check", path, "--as", "1f1b"]) == 2
    assert "it is the 3. activation held at once, the scheme allows 2" in capsys.readouterr().err
    assert main(["check", path, "--as", "chimera"]) == 2
    assert "1 x 2 pipelines x stages on 2 workers, where chimera has 2 x 2: is it" in capsys.readouterr().err
    Path(path).write_text("".join(reversed(Path(path).read_text().splitlines(keepends=True))))
    assert main(["check", path]) == 0
    assert main(["check", path, "--as", "gpipe"]) == 2
    assert "worker 1 holds stage 0 of pipeline 0, in gpipe worker 0: is it" in capsys.readouterr().err


# ---- costs, orders, steps


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_further_costs_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    for words, makespan_s in {
        "": 16,
        "--recompute": 22,
        "--transfer 1": 23,
        "--link 0.5,0.25 --message-bytes 2": 23,
        "--link 0.5,0.25 --node-link 0,0 --workers-per-node 4 --message-bytes 2": 16,
        "--transfer 1 --sends-block": 24,
        "--allreduce 5": 21,
        "--gradient-bytes 8 --link 0,1": 24,
        "--gradient-bytes 8 --link 0,1 --groups 2": 28,
    }.items():
        assert figures(capsys, *SHOW, *words.split())["makespan_s"] == makespan_s, words
    jittered = [figures(capsys, *SHOW, "--jitter", "0.2", "--seed", seed)["makespan_s"] for seed in "112"]
    assert jittered[0] == jittered[1] != jittered[2]


def test_an_allreduce_needs_two_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """A scheme of one pipeline has none unless there are groups side by side."""
    for groups, exposed_s in ("1", {"1f1b": 0, "chimera": 3}), ("2", {"1f1b": 3, "chimera": 3}):
        found = figures(capsys, "compare", "1f1b", "chimera", *COMPARE[1:], "--allreduce", "3", "--groups", groups)
        assert {row["scheme"]: row["exposed_allreduce_s"] for row in found["schemes"]} == exposed_s


def test_orders_for_the_costs_and_better_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--depth", "4", "--micro-batches", "8"]
    drawn = figures(capsys, "show", "chimera", *shape)
    ordered = figures(capsys, "show", "chimera", *shape, "--order", "costs")
    path = str(tmp_path / "better.csv")
    better = figures(
        capsys, "show", "chimera", *shape, "--order", "costs", "--improve", "60", "--moves", "60", "--csv", path
    )
    assert drawn["makespan_s"] == 30 > ordered["makespan_s"] >= better["makespan_s"] >= better["lower_bound_s"] == 27
    assert figures(capsys, "check", path)["makespan_s"] == better["makespan_s"]
    rows = figures(capsys, "compare", "chimera", *shape, "--order", "costs")["schemes"]
    assert rows[0]["makespan_s"] == ordered["makespan_s"]
    assert main(["show", "chimera", *shape, "--order", "costs", "--width", "60"]) == 0
    assert f"lower bound       27 s, the order takes {100 * (ordered['makespan_s'] / 27 - 1):.1f} % more" in (
        capsys.readouterr().out
    )


def test_steps_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "show", "zb_h2", "--depth", "4", "--micro-batches", "8", "--steps", "3")
    assert (found["micro_batches"], found["steady_step_s"]) == (24, 24)


def test_compare_draws_one_above_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.svg"
    assert (
        main(
            ["compare", "chimera", "chimera:concat=doubling", *COMPARE[1:3], "--micro-batches", "8", "--svg", str(path)]
        )
        == 0
    )
    words = path.read_text(encoding="utf-8")
    assert ">chimera, D=4, N=8: makespan 30 s" in words and ">chimera:concat=doubling, D=4, N=8: makespan 27 s" in words


@pytest.mark.parametrize("scheme", SCHEMES)
def test_show_never_fails(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Any shape and costs: a drawing within the width, or one line that says why not."""
    chance = random.Random(scheme)
    for depth, micro_batches, width in (
        (1, 1, 40),
        (2, 1, 40),
        (3, 5, 20),
        (4, 4, 1),
        (5, 17, 40),
        (8, 3, 60),
        (12, 25, 40),
    ):
        costs = [
            f"--{name}={chance.choice(['0', '1', '0.1', '1e15', '1e-15', '3.7'])}"
            for name in ("forward", "backward", "input", "weight", "transfer", "allreduce", "update")
        ]
        shape = ["--depth", str(depth), "--micro-batches", str(micro_batches)]
        code = main(["show", scheme, *shape, *costs, "--groups", "2", "--width", str(width)])
        out, err = capsys.readouterr()
        if code == 0:
            assert width < 40 or max(map(len, out.splitlines())) <= width
        else:
            assert code == 2 and err.count("\n") == 1 and ("try" in err or "takes 0 s" in err), err


WRONG = {
    "mine.csv has a shape of its own: leave out --depth and --pairs": ["show", "mine.csv", "--depth=4", "--pairs=2"],
    "no.csv cannot be read (No such file or directory): give a CSV file": ["check", "no.csv"],
    "'' cannot be read (No such file or directory): give a CSV file": ["check", ""],
    "'a\\nb.csv' cannot be read": ["check", "a\nb.csv"],
    ". cannot be read (Is a directory): give a CSV file": ["check", "."],
    "more than can be planned at once, 1,000,000: try --steps 62500 or fewer": [*SHOW, "--steps", "99999999"],
    "1,000,000: try chunks=62500 or micro_batches=2 or fewer": ["show", "interleaved", *SHOW[2:], "--chunks", "100000"],
    "1,000,000: try waves=31250 or micro_batches=1 or fewer": ["show", "hanayo", *SHOW[2:], "--waves", "100000"],
    "invalid choice: 'nothing'": ["check", "no.csv", "--as", "nothing"],
    "takes seconds and seconds per byte, such as 1e-6,1e-10, not '1'": [*SHOW, "--link", "1"],
    "--groups: must be a whole number of 1 or more, not '0'": [*SHOW, "--groups", "0"],
    "jitter and allreduce_busy are shares": [*SHOW, "--jitter", "2"],
    "--message-bytes has 2 values, but chimera has 4 stages": [*SHOW, "--message-bytes", "1,2", "--link", "0,1"],
    "--message-bytes takes no time without a link: give --link A,B": [*SHOW, "--message-bytes", "1"],
    "--gradient-bytes takes no time without": [*COMPARE, "--gradient-bytes", "1", "--groups=8", "--node-link=0,1"],
    "pipedream updates each stage as soon as": ["show", "pipedream", *SHOW[2:], "--sync", "lazy"],
    "pipedream_2bw updates each stage as soon as": ["compare", "pipedream_2bw:sync=lazy", *COMPARE[1:]],
    "pipedream is a stream: only the order of a flush": ["show", "pipedream", *SHOW[2:], "--improve", "1"],
    "--improve: 'soon' is no number": [*SHOW, "--improve", "soon"],
    "--steps: must be a whole number of 1 or more, not '0'": [*SHOW, "--steps", "0"],
    "invalid int value: 'x'": [*SHOW, "--seed", "x"],
    "a drawing is of one number of micro-batches, not of 2": [*COMPARE, "--svg", "a.svg"],
    "unknown command 'shwo': did you mean 'show'?": ["shwo"],
    "unknown option '--vers": ["--vers"],
    "unknown scheme 'chimra': did you mean 'chimera'?": ["show", "chimra", *SHOW[2:]],
    "has no option '--dept': did you mean '--depth'?": ["show", "chimera", "--dept", "4", "--micro-batches", "4"],
    "required: --micro-batches": ["show", "chimera", "--depth", "4"],
    "chimera needs an even depth, not 5: try depth=4 or depth=6": ["show", "chimera", "--depth=5", *SHOW[4:]],
    "--depth: must be a whole number of 1 or more, not '0'": ["show", "chimera", "--depth", "0", *SHOW[4:]],
    "--depth: must be 1,000,000,000,000,000 or less, not '9999": ["show", "chimera", "--depth", "9" * 5000, *SHOW[4:]],
    "--forward: must have at most 1000 characters, not '0.999": [*SHOW, "--forward", f"0.{'9' * 5000}"],
    "not '4.5'": ["show", "chimera", "--depth", "4.5", *SHOW[4:]],
    "1f1b has no option 'pairs'": ["show", "1f1b", *SHOW[2:], "--pairs", "2"],
    "--forward has 3 values, but chimera has 4 stages": [*SHOW, "--forward", "1,2,3"],
    "'x' is no number of seconds": [*SHOW, "--forward", "x"],
    "not -1": [*SHOW, "--forward=-1"],
    "not nan": [*SHOW, "--forward", "nan"],
    "not 1e999999999": [*SHOW, "--forward", "1e999999999"],
    "takes 0 s": [*SHOW, "--forward", "0", "--backward", "0"],
    "unknown sync 'never'": [*SHOW, "--sync", "never"],
    "--width: must be at most 10000, not 10001": [*SHOW, "--width", "10001"],
    "invalid choice: 'maybe'": [*SHOW, "--color", "maybe"],
    "cannot write / (Is a directory): give a path": [*SHOW, "--svg", "/"],
    "cannot write /no/such/folder/a.svg (No such file or directory)": [*SHOW, "--svg", "/no/such/folder/a.svg"],
    "unknown scheme 'gpip': did you mean 'gpipe'?": ["compare", "gpip", *COMPARE[1:]],
    "'pair=2' is no option of chimera": ["compare", "chimera:pair=2", *COMPARE[1:]],
    "pairs must be int, not 'two'": ["compare", "chimera:pairs=two", *COMPARE[1:]],
    "'' is no option of chimera": ["compare", "chimera:", *COMPARE[1:]],
    "gives pairs twice": ["compare", "chimera:pairs=2,pairs=4", *COMPARE[1:]],
    "'pair=2' is no option": ["show", "chimera:pair=2"],
    "and has no options": ["show", "a.csv:pairs=2"],
    "logs of runs are compared by chimera-mpi report": ["compare", "a.h5", "b.h5", *COMPARE[1:]],
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert main(WRONG[message]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("chimera-mpi: ") and err.count("\n") == 1 and not out


def test_without_stderr_a_mistake_is_told_nowhere(capsys, monkeypatch):
    """As with 2>&-: what reads stdout wants no complaint in it."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", None)
        assert main(["show", "chimaera"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stdout", ["/dev/full", None])
@pytest.mark.parametrize(
    "words",
    [["--version"], ["--help"], ["plan", "--help"], SHOW, [*SHOW, "--json"], COMPARE, [*COMPARE, "--csv"],
     ["completion", "bash"], ["doctor"]],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_printed_is_one_line_and_exit_code_1(words, stdout, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", stdout and open(stdout, "w"))  # noqa: SIM115
    assert main(words) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith("chimera-mpi: stdout cannot be written (") and wrong.count("\n") == 1
    assert "No space left" in wrong if stdout else "Bad file descriptor" in wrong
    sys.stdout.close()


UNREAD = """
import atexit, sys
from chimera_mpi.commands._terminal import settle
from chimera_mpi.errors import complain
atexit.register(settle)
sys.stdin.read()  # until nobody reads what follows
complain("unread")
sys.stdout.write("unread")
raise SystemExit(75)
"""


def test_what_nobody_reads_changes_no_exit_code(monkeypatch):
    """What is still buffered fails again when Python flushes it at exit, and the code would be 120."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-c", UNREAD], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.wait(60) == 75


LONG = "x" * 300  # no file has such a name


@pytest.mark.parametrize(
    "words",
    [
        ["data", "prepare", "-o", LONG],
        ["data", "prepare", "-o", "a.h5", LONG],
        ["data", "prepare", "-o", "a.h5", "--tokenizer", LONG],
        ["report", LONG],
        ["watch", LONG],
        ["generate", LONG],
        ["import", LONG, "-o", "a"],
        ["export", LONG, "-o", "a"],
        ["plan", LONG, "--machine", "small-box", "--workers", "4"],
        ["plan", "gpt-tiny", "--machine", LONG, "--workers", "4"],
        ["slurm", LONG, "--env", "a.sh"],
        ["slurm", "gpt-tiny", "--env", LONG],
        ["check", LONG],
        ["show", f"{LONG}.csv"],
        ["calibrate", LONG, "-o", "a"],
        ["calibrate", "-o", LONG],
        ["bench", "emulate", "--json", LONG],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "..."),
)
def test_names_that_are_too_long_are_refused_in_a_line(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.sh").touch()
    assert main(words) == 2
    told, wrong = capsys.readouterr()
    assert not told and wrong.startswith("chimera-mpi: ") and wrong.count("\n") == 1 and LONG in wrong
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.sh"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\udcff.csv", r"'a\udcff.csv'"), ("a\x01.csv", r"'a\x01.csv'")],
    ids=["no UTF-8", "no letter"],
)
def test_pictures_spell_out_of_a_name_what_cannot_be_shown(name, shown, torchs, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(torchs.parent)
    torchs.rename(name)
    assert main(["check", name, "--svg", "a.svg", "--html", "a.html", "--trace", "a.json"]) == 0
    assert f"{shown} is sound" in capsys.readouterr().out
    assert shown in "".join(ET.parse("a.svg").getroot().itertext())
    assert html.escape(shown) in Path("a.html").read_text(encoding="utf-8")


def test_a_picture_stays_until_another_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.open("wb").write(content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    picture, link = tmp_path / "a.svg", tmp_path / "b.svg"
    picture.write_text("older")
    picture.chmod(0o600)
    link.symlink_to(picture)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="No space left"):
        patch.setattr(Path, "write_bytes", full)
        write(picture, "newer")
    assert picture.read_text() == "older" and sorted(os.listdir(tmp_path)) == ["a.svg", "b.svg"]
    write(picture, "newer, \udcff")
    assert picture.read_text() == "newer, ?" and picture.stat().st_mode & 0o777 == 0o600
    write(link, "by its other name")
    assert link.is_symlink() and picture.read_text() == "by its other name"
    write(Path(os.devnull), "nothing")
    assert not Path(os.devnull).is_file()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("chimera-mpi ")
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(command in overview for command in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("command", ["show", "compare"])  # check's needs a file
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


def test_compare_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "chimera:pairs=2,concat=doubling,sync=eager_opt"
    assert main(["compare", *SCHEMES, long, "--depth", "8", "--micro-batches", "1024,7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    at = next(at for at, line in enumerate(lines) if line.startswith("chimera:pairs=2,"))
    assert [line.split()[0] for line in lines[at : at + 3]] == [
        "chimera:pairs=2,",
        "concat=doubling,",
        "sync=eager_opt",
    ]
    assert lines[1].split() == ["bubble", "live", "exposed"] and lines[2].split()[-1] == "all-reduce"


def test_compare_counts_once_and_breaks_no_words(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "3")
    assert main(["compare", "1f1b", "--depth", "4", "--micro-batches", "4,4"]) == 0
    out = capsys.readouterr().out
    assert out.count("1f1b") == 1 and "* best of its column. Weights\n" in out


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
