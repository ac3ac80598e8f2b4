"""Reports of one run and of several, from logs of all kinds."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from logs import KEYS, Made, write_log

from chimera_mpi import report
from chimera_mpi.cli import main
from chimera_mpi.commands.report import _named
from chimera_mpi.config import schedule_of
from chimera_mpi.draw import plot
from chimera_mpi.draw.axes import between
from chimera_mpi.draw.chart import Bar, Bars, Chart, Series, thinned
from chimera_mpi.draw.chart_svg import chart_svg
from chimera_mpi.draw.chart_text import chart_text
from chimera_mpi.draw.table import Table, table_html, table_text
from chimera_mpi.errors import InputError
from chimera_mpi.report import stats
from chimera_mpi.report.stats import Interval
from chimera_mpi.runlog import RunLog, StepRow, read_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The logs that no test changes."""
    folder = tmp_path_factory.mktemp("logs")
    write_log(folder / "chimera.h5")
    return folder


@pytest.fixture
def told(capsys):
    """`chimera-mpi report ...` in this process: exit code, output and errors."""

    def run(*words):
        code = main(["report", *map(str, words)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def figures(told):
    def run(*words):
        code, out, err = told(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def the_one(found):
    (run,) = found["runs"]
    return run


# ---- intervals


def test_quantiles_are_students():
    for freedom, known in (1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962):
        assert stats.t_quantile(freedom) == pytest.approx(known, abs=6e-4)


def test_intervals_hold_what_they_promise():
    """95 of 100 hold the true value: of independent runs, and of one whose steps follow each other."""
    rng = np.random.default_rng(1)
    runs = [stats.over_runs(rng.normal(10, 1, 4).tolist()) for _ in range(2000)]
    assert np.mean([each.ends[0] <= 10 <= each.ends[1] for each in runs]) == pytest.approx(0.95, abs=0.015)
    held = []
    for _ in range(400):
        noise, steps = rng.normal(0, 1, 600), np.zeros(600)
        for at in range(1, 600):
            steps[at] = 0.7 * steps[at - 1] + noise[at]
        low, high = stats.over_blocks(10 + steps).ends
        held.append(low <= 10 <= high)
    assert np.mean(held) > 0.88  # taken as independent, the steps would hold it in 60 of 100


def test_an_interval_is_of_whole_blocks_and_told_only_where_there_are_two():
    assert stats.over_blocks(range(100)) == Interval(49.5, pytest.approx(21.658, abs=1e-3), "10 blocks of 10 steps")
    assert np.isnan(stats.over_blocks([1, 2, 3]).half) and stats.over_blocks(range(6)).over == "2 blocks of 3 steps"
    assert stats.over_blocks(np.repeat([1.0, 2, 3, 4, 5, 6], 5), together=5).over == "2 blocks of 15 steps"
    assert np.isnan(stats.over_blocks([np.nan]).value)


def test_relative_errors_of_a_ratio_add_in_squares():
    found = stats.ratio(Interval(6.0, 0.3), Interval(2.0, 0.04))
    assert (found.value, found.half) == (3.0, pytest.approx(3 * np.hypot(0.05, 0.02)))


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (Interval(123.45, 2.14), "123.5 ± 2.1"),
        (Interval(12345.6, 300.0), "12346 ± 300"),
        (Interval(0.98765, 0.0123), "0.988 ± 0.012"),
        (Interval(1.0, 0.0), "1.00 ± 0.00"),
        (Interval(5.0), "5"),
    ],
)
def test_an_interval_in_words(interval, words):
    assert str(interval) == words


# ---- tables and charts

WIDE = Table("a title of some words", ["run", *(f"P{w}" for w in range(16))], [["planned", *["12.5 %"] * 16]] * 2)
WORDY = Table("", ["session", "why"], [["0", "nan or inf in the sum of all losses or gradients, now in the weights"]])


@pytest.mark.parametrize("width", [30, 40, 80, 200])
@pytest.mark.parametrize("table", [WIDE, WORDY], ids=["numbers", "words"])
def test_a_table_keeps_its_width_and_all_its_cells(table, width):
    text = table_text(table, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert words.count("12.5 %") == sum(row.count("12.5 %") for row in table.rows)
    assert all(f"P{w}" in words for w in range(16) if table is WIDE)
    if table is WORDY:
        assert sorted(words.split()) == sorted(["session", "why", "0", *table.rows[0][1].split()])


def test_a_table_as_html_escapes():
    root = ET.fromstring(table_html(Table("<a>", ["&"], [["</td>"]], "<b>")).replace("class=number", ""))
    assert [cell.text for cell in root.iter("td")] == ["</td>"]


LINES = Chart(
    "loss", "steps", "nats",
    [Series("training <1>", [(float(x), 5 - x / 300) for x in range(1, 900)]), Series("validation", [(300.0, 4.2)])],
    log_x=False, from_zero=False,
)  # fmt: skip
POINTS = Chart(
    "weak", "ranks", "samples/s",
    [
        Series("chimera", [(4.0, 80.0), (8.0, 150.0)], spread=[(78.0, 82.0), (-5.0, 160.0)]),
        Series("ideal", [(4.0, 80.0), (8.0, 160.0)], guide=True),
    ],
    log_y=True,
)  # fmt: skip
GROUPS = Bars("fastest", "samples/s", ["4 ranks", "8 ranks"], [
    Bar("1f1b", [50.0, float("nan")], [(48, 52), (float("nan"), float("nan"))]), Bar("chimera_zb", [80.0, 150.0]),
])  # fmt: skip
STACK = Bars("time", "ms", ["P0", "P1"], [Bar("compute", [3.0, 4.0]), Bar("wait", [2.0, 1.0])], stacked=True)
ALL = [LINES, POINTS, GROUPS, STACK]


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("drawn", ALL, ids=lambda drawn: drawn.title)
def test_a_chart_in_characters_keeps_its_width(drawn, width):
    for ascii in (False, True):
        text = chart_text(drawn, width, ascii=ascii)
        assert max(map(len, text.splitlines())) <= width
        assert not ascii or text.isascii()


def test_stacked_bars_in_characters_are_as_long_as_their_sums():
    rows = chart_text(STACK, 60, ascii=True).splitlines()[1:3]
    assert [row.split()[-1] for row in rows] == ["5", "5"]
    first, second = (row.split()[1] for row in rows)
    assert len(first) == len(second) and abs(second.count("#") - 4 * second.count("=")) < 4


def test_a_chart_as_svg_has_every_point_and_bar_inside():
    root = ET.fromstring(chart_svg(ALL))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert sum("training <1>" in title for title in titles) == 899
    assert "chimera: 150 at 8" in titles and "P1, wait: 1 ms" in titles
    assert len(titles) == 899 + 1 + 2 + 3 + 4
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(circle.get("cx")) <= 520 and -0.1 <= float(circle.get("cy")) <= 240.1
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("y", 0)) >= 0


def test_thinning_keeps_the_ends_and_the_peaks():
    points = [(float(x), float(np.sin(x / 50))) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1] and (4321.0, 99.0) in kept
    assert thinned(points[:50], 100) == points[:50]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (100_000, 100_100, [100_000, 100_020, 100_040, 100_060, 100_080, 100_100])],
)
def test_marks_of_an_axis_are_round_and_within(low, high, found):
    assert between(low, high, 6) == pytest.approx(found)


# ---- one run


def test_one_run_says_all_that_is_asked_of_it(told, folder):
    code, out, err = told(folder / "chimera.h5", "--width", 100)
    assert code == 0 and not err
    for words in (
        "gpt, 393,216 parameters: chimera, depth 4 x width 1, 4 micro-batches, 8 samples of 64 tokens a step",
        "steps       20 of 20", "validation", "samples/s", "medians without warm-up", "predicted   50 ms",
        "bubble", "1f1b planned", "memory, MB", "grew by", "exposed all-reduce",
        "why it ended", "done", "nats per token", "chimera, planned", "chimera, measured",
    ):  # fmt: skip
        assert words in out, words
    assert "\x1b" not in out


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("ranks", [4, 16])
def test_the_tables_and_drawings_fit_the_terminal(told, tmp_path, width, ranks):
    log = write_log(tmp_path / "run.h5", Made(ranks=ranks, steps=6), depth=ranks, layers=16, micro_batches=ranks)
    code, out, _ = told(log, "--width", width)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    for worker in range(ranks):
        assert re.search(rf"^P{worker} ", out, re.MULTILINE)


def test_a_terminal_that_speaks_ascii_gets_ascii(folder, capsysbinary, monkeypatch):
    monkeypatch.setattr("chimera_mpi.commands.report.speaks_unicode", lambda: False)
    assert main(["report", str(folder / "chimera.h5")]) == 0
    assert capsysbinary.readouterr().out.isascii()


def test_colour_is_of_terminals_and_of_who_asks(told, folder, monkeypatch):
    assert "\x1b" in told(folder / "chimera.h5", "--color", "always")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in told(folder / "chimera.h5")[1]


def test_figures_are_those_of_the_log(figures, folder):
    run, found = read_run(folder / "chimera.h5"), the_one(figures(folder / "chimera.h5"))
    counted = ~run.steps["warmup"]
    assert found["samples_per_s"]["value"] == pytest.approx(float(np.median(run.steps["samples_per_s"][counted])))
    assert found["step_s"]["value"] == pytest.approx(float(np.median(run.steps["seconds"][counted])))
    assert found["samples_per_s"]["over"] == "6 blocks of 3 steps"
    assert found["loss"] == run.steps["loss"][-1] and found["validation_loss"] == run.evaluations["loss"][-1]
    for worker, of in enumerate(found["workers"]):
        for name in ("compute_s", "wait_s", "allreduce_wait_s", "update_s"):
            assert of[name] == pytest.approx(float(np.median(run.workers[name][counted, worker])))
        assert sum(of[name] for name in report.one.TIMES) == pytest.approx(found["step_s"]["value"])
        assert of["predicted_bytes"] == 4e6 + 5e5 * worker and of["measured_bytes"] == 8e6
    steps = report.steps_of(run)
    assert found["bubble"]["planned"] == pytest.approx(steps.planned.bubble_ratio)
    assert found["planned_step_s"] == steps.planned.makespan_s
    assert found["sampled_steps"] == [4, 9, 14, 19]
    (session,) = found["sessions"]
    assert (session["steps"], session["reason"], session["layout"]) == ([0, 19], "done", "chimera D=4 W=1 N=4")


def test_a_step_whose_messages_and_sums_are_free_is_as_planned(figures, tmp_path):
    log = write_log(tmp_path / "run.h5", Made(noise=0.0, allreduce_s=0.0, transfer_s=0.0), scheme="1f1b")
    found = the_one(figures(log))
    assert found["bubble"]["measured"] == pytest.approx(found["bubble"]["planned"])
    assert found["bubble"]["planned_1f1b"] == pytest.approx(found["bubble"]["planned"])


# ---- sessions


@pytest.fixture(scope="module")
def resumed(folder):
    """Killed, gone on with in another layout, and then in the first one again; the last start did no step."""
    log = folder / "resumed.h5"
    write_log(log, Made(steps=20, asked=60, reason=None, forward_s=0.004))
    write_log(
        log, Made(ranks=2, first=20, steps=40, asked=60, reason="a signal", forward_s=0.02), depth=2, scheme="gpipe"
    )
    write_log(log, Made(first=40, steps=60, forward_s=0.004, chance=1))
    write_log(log, Made(first=60, steps=60, asked=80))
    return log


def test_medians_are_of_the_last_layout_and_say_so(told, figures, resumed):
    found = the_one(figures(resumed))
    assert found["scheme"] == "chimera" and found["of_sessions"] == [0, 2] and found["of_steps"] == 36
    steps = read_run(resumed).steps
    mine = ~steps["warmup"] & (steps["session"] != 1)
    assert found["step_s"]["value"] == pytest.approx(float(np.median(steps["seconds"][mine])))
    assert found["sampled_steps"] == [4, 9, 14, 19, 44, 49, 54, 59]
    assert len(found["workers"]) == 4 and all(np.isfinite(of["compute_s"]) for of in found["workers"])
    out = told(resumed)[1]
    assert "sessions 0, 2, steps 0-19, 40-59: medians, costs and memory are of these" in out
    assert "steps       60 of 80" in out


def test_another_session_is_told_of_when_asked_for(told, figures, resumed):
    found = the_one(figures(resumed, "--session", 1))
    assert (found["scheme"], found["depth"], found["ranks"], found["of_steps"]) == ("gpipe", 2, 2, 18)
    assert found["sampled_steps"] == [24, 29, 34, 39] and len(found["workers"]) == 2
    run = read_run(resumed)
    counted = (run.steps["session"] == 1) & ~run.steps["warmup"]
    assert found["step_s"]["value"] == pytest.approx(float(np.median(run.steps["seconds"][counted])))
    assert found["workers"][1]["compute_s"] == pytest.approx(float(np.median(run.workers["compute_s"][counted, 1])))
    for session, last in ((0, 19), (1, 39), (2, 59)):
        found = the_one(figures(resumed, "--session", session))
        assert found["validation_loss"] == pytest.approx(2.6 + 3 * 0.97**last)
    code, out, err = told(resumed, "--session", 4)
    assert (code, out) == (2, "") and err.strip().endswith("has no session 4: give one from 0 to 3")
    assert "no step yet" in told(resumed, "--session", 3)[1]


def test_spans_of_another_layout_are_not_drawn(told, resumed):
    code, _, err = told(resumed, "--step", 24)
    assert code == 2 and "step 24 was done in another layout: give --session 1" in err
    assert "gpipe, measured" in told(resumed, "--step", 24, "--session", 1)[1]
    code, _, err = told(resumed, "--step", 3)
    assert code == 2 and "no spans of step 3" in err


def test_sessions_say_when_how_and_why(told, figures, resumed):
    rows = the_one(figures(resumed))["sessions"]
    assert [row["layout"] for row in rows] == ["chimera D=4 W=1 N=4", "gpipe D=2 W=1 N=4", *["chimera D=4 W=1 N=4"] * 2]
    assert [row["steps"] for row in rows] == [[0, 19], [20, 39], [40, 59], []]
    assert [row["reason"] for row in rows] == ["", "a signal", "done", "done"]
    assert [row["first_step"] for row in rows] == [0, 20, 40, -1]
    lines = told(resumed, "--width", 120)[1].splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("session ")) :]
    assert table[1].endswith("killed") and table[2].endswith("a signal") and "none" in table[4]


def test_what_sessions_differ_in_besides_their_shape_is_named(figures, tmp_path):
    log = write_log(tmp_path / "run.h5", Made(steps=5, asked=10))
    write_log(log, Made(first=5, steps=10), recompute="stage")
    found = the_one(figures(log))
    assert [row["layout"].split(" ")[-1] for row in found["sessions"]] == ["recompute=none", "recompute=stage"]
    assert found["of_sessions"] == [1]


def test_a_session_may_have_learnt_otherwise_in_the_same_layout(figures, tmp_path):
    log = write_log(tmp_path / "run.h5", Made(steps=5, asked=10))
    write_log(log, Made(first=5, steps=10), learning_rate=1e-5, checkpoint="elsewhere")
    assert the_one(figures(log))["of_sessions"] == [0, 1]


def test_spans_that_a_killed_session_left_of_a_later_ones_step_are_not_taken(figures, tmp_path):
    log = write_log(tmp_path / "run.h5", Made(steps=10, asked=20, reason=None))
    write_log(log, Made(ranks=2, first=5, steps=20), depth=2)  # steps 5 to 9 were there: its own begin at 10
    with RunLog.append(log, read_run(log).sessions[1].attributes, 2) as more:
        more._spans_before = -1
        more.spans(19, 1, read_run(log).spans(9))
    assert the_one(figures(log))["sampled_steps"] == [14]


def test_a_line_for_each_death_that_was_survived():
    death = {"death": "rank 3 died (op 1F1@1)", "steps_done": 13, "recovery_s": 0.7912}
    last = {"death": "rank 0 died", "steps_done": 15}
    sessions = [SimpleNamespace(attributes=of, ranks=ranks) for of, ranks in (({}, 4), (death, 2), (last, 1))]
    assert report.deaths(SimpleNamespace(sessions=sessions)) == [
        "survived    rank 3 died (op 1F1@1); after 13 steps 2 ranks went on in 0.79 s",
        "ended       rank 0 died; after 15 steps nobody could go on",
    ]


# ---- runs of all kinds


@pytest.mark.parametrize(
    ("made", "keys", "words"),
    [
        (Made(steps=1), {}, "medians of the warm-up: there are no other steps"),
        (Made(reason=None, asked=100), {}, "at work, or killed"),
        (Made(ranks=16), {"depth": 16, "layers": 16, "micro_batches": 16}, "P15"),
        (Made(ranks=8), {}, "and over 2 replicas"),
        (Made(steps=40), {"scheme": "pipedream", "depth": 4}, "pipedream, measured"),
        (Made(steps=40), {"scheme": "pipedream_2bw", "depth": 4, "eval_every": 20}, "pipedream_2bw, measured"),
        (Made(), {"model": "bert"}, "of a masked token and of the next sentence"),
        (Made(), {"scheme": "zb_v", "order": "costs"}, "zb_v, measured"),
        (Made(ranks=1), {"scheme": "gpipe", "depth": 1}, "depth 1 x width 1"),
        (Made(), {"accumulate": 2}, "chimera, measured"),
        (Made(steps=3), {"spans_every": 99, "log": "x"}, "P3"),
    ],
    ids=[
        "one-step",
        "killed",
        "16-ranks",
        "replicas",
        "pipedream",
        "2bw",
        "bert",
        "order",
        "serial",
        "accumulate",
        "few",
    ],
)
def test_runs_of_all_kinds_are_reported(told, tmp_path, made, keys, words):
    log = write_log(tmp_path / "run.h5", made, **keys)
    pictures = ("--svg", tmp_path / "step.svg", "--plot", tmp_path / "run.svg", "--html", tmp_path / "run.html")
    code, out, err = told(log, *pictures)
    assert code == 0 and not err and words in " ".join(out.split())
    for picture in pictures[1::2]:
        assert picture.stat().st_size
    ET.parse(tmp_path / "step.svg"), ET.parse(tmp_path / "run.svg")
    json.loads(told(log, "--json")[1])


def test_the_log_of_a_run_at_work_is_read_and_left_alone(told, tmp_path):
    log = tmp_path / "run.h5"
    with RunLog.create(log, {}, 4):
        assert told(log)[0] == 2  # without a configuration
    log.unlink()
    write_log(log, Made(reason=None, asked=100))
    with RunLog.append(log, {}, 4) as writer:
        before = log.read_bytes()
        assert "20 of 100" in told(log)[1]
        assert log.read_bytes() == before
        writer.flush()


def test_losses_that_are_none_are_left_out(told, tmp_path, monkeypatch):
    monkeypatch.setattr("logs.StepRow", lambda **of: StepRow(**(of | ({"loss": np.nan} if of["step"] == 7 else {}))))
    log = write_log(tmp_path / "run.h5")
    assert told(log, "--plot", tmp_path / "run.svg")[0] == 0
    assert "nan" not in (tmp_path / "run.svg").read_text()


def test_a_step_of_whose_workers_nothing_is_known_hides_no_other(figures, tmp_path, monkeypatch):
    """As a death leaves it, when another rank makes the log good."""
    step = RunLog.step

    def forgetting(self, row, workers):
        return step(self, row, workers * (np.nan if row.step == 7 else 1))

    monkeypatch.setattr(RunLog, "step", forgetting)
    for worker in the_one(figures(write_log(tmp_path / "run.h5")))["workers"]:
        assert worker["measured_bytes"] == 8e6 and worker["compute_s"] > 0


NOTHING = {"seconds": np.nan, "loss": np.nan, "bubble_ratio": np.nan, "grad_norm": np.nan}


@pytest.mark.parametrize("odd", [NOTHING, {"seconds": 0.0}, {"seconds": np.inf}], ids=str)
@pytest.mark.parametrize("logs", [1, 2, 3])
def test_steps_without_numbers_are_reported_all_the_same(told, tmp_path, monkeypatch, odd, logs):
    """A table of nothing but nan, too."""
    step = RunLog.step
    monkeypatch.setattr("logs.StepRow", lambda **of: StepRow(**(of | odd)))
    if odd is NOTHING:
        monkeypatch.setattr(RunLog, "step", lambda self, row, workers: step(self, row, workers * np.nan))
    paths = [study(tmp_path, "1f1b", 4 * ranks, None) for ranks in range(1, logs + 1)]
    pictures = [tmp_path / name for name in ("steps.svg", "run.svg", "run.html")]
    files = zip(("--svg", "--plot", "--html"), pictures, strict=True)
    code, out, err = told(*paths, *(word for pair in files for word in pair))
    assert (code, err) == (0, "") and out
    assert all(path.stat().st_size for path in pictures)
    assert json.loads(told(*paths, "--json")[1])
    chimera = write_log(tmp_path / "other.h5")
    assert told(*paths, chimera, "--plot", tmp_path / "several.svg")[0] == 0


def test_each_of_many_runs_is_planned_once(told, tmp_path, monkeypatch):
    planned = []
    paths = [write_log(tmp_path / f"{n}.h5", Made(steps=2, ranks=1), depth=1, scheme="1f1b", micro_batches=n)
             for n in range(31, 49)]  # fmt: skip
    monkeypatch.setattr("chimera_mpi.sampled.schedule_of", lambda *of: planned.append(of[0]) or schedule_of(*of))
    assert told(*paths)[0] == 0
    assert len(planned) == len(paths)


def test_a_loss_that_diverged_is_no_row_of_digits(told, tmp_path, monkeypatch):
    monkeypatch.setattr("logs.StepRow", lambda **of: StepRow(**(of | {"loss": 1e300})))
    assert "loss        1e+300\n" in told(write_log(tmp_path / "run.h5"))[1]


def test_files_are_written_though_nobody_reads_on(tmp_path):
    log, page = write_log(tmp_path / "run.h5", Made(steps=200, ranks=16)), tmp_path / "run.html"
    script = f"{sys.executable} -m chimera_mpi report {log} --html {page} --width 4000 | true"
    piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "</html>" in page.read_text()


def test_a_scheme_that_nobody_knows_here_is_reported_without_its_plan(told, tmp_path):
    keys = json.loads(read_run(write_log(tmp_path / "known.h5")).attributes["config"]) | {"scheme": "mine"}
    log = write_log(tmp_path / "run.h5", Made(attributes={"config": json.dumps(keys)}))
    code, out, _ = told(log)
    assert code == 0 and "mine, depth 4" in out and "planned" not in out
    code, _, err = told(log, "--step", 9)
    assert code == 2 and "unknown scheme 'mine'" in err


def test_keys_of_another_version_are_passed_over(told, tmp_path):
    keys = json.loads(read_run(write_log(tmp_path / "known.h5")).attributes["config"]) | {"of_later": 1}
    assert told(write_log(tmp_path / "run.h5", Made(attributes={"config": json.dumps(keys)})))[0] == 0


# ---- what is none


@pytest.fixture
def wrong(tmp_path):
    """Files of which nothing can be told, by what is said of them."""
    (tmp_path / "empty.h5").touch()
    (tmp_path / "text.h5").write_text("no log")
    RunLog.create(tmp_path / "bare.h5", {}, 1).close()
    write_log(tmp_path / "shape.h5", Made(attributes={"width": 3}))
    write_log(tmp_path / "key.h5", Made(attributes={"config": '{"model": "gpt-tiny"}'}))
    for name, damage in (("torn", {"config": '{"dep'}), ("width", {"width": None}), ("hosts", {"hosts": "["})):
        write_log(tmp_path / f"{name}.h5", Made(steps=3, asked=5))
        write_log(tmp_path / f"{name}.h5", Made(first=3, steps=5, attributes=damage))
    return {
        "missing.h5": "No such file",
        "empty.h5": "empty",
        "text.h5": "not an HDF5 file",
        "bare.h5": "has no 'config'",
        "shape.h5": "4 ranks with depth=4 and width=3",
        "key.h5": "its configuration cannot be read: model='gpt-tiny'",
        "torn.h5": "its configuration cannot be read: Unterminated string",
        "width.h5": "its configuration cannot be read: int() argument must be",
        "hosts.h5": "its configuration cannot be read: Expecting value",
    }


def test_what_is_no_log_is_refused_in_one_line(told, tmp_path, wrong):
    for name, reason in wrong.items():
        code, out, err = told(tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1), name
        assert name in err and reason in err


def test_others_are_reported_beside_what_is_no_log(told, figures, folder, tmp_path, wrong):
    write_log(tmp_path / "none.h5", Made(steps=0, asked=10))
    several = [folder / "chimera.h5", *(tmp_path / name for name in wrong), tmp_path / "none.h5"]
    code, out, err = told(*several)
    assert code == 0 and "chimera" in out
    lines = err.splitlines()
    assert len(lines) == len(wrong) + 1 and all(line.startswith("chimera-mpi: left out: ") for line in lines)
    assert "none.h5 has no step yet" in lines[-1]
    assert len(figures(*several)["left_out"]) == len(lines)
    code, out, err = told(*several[1:])
    assert (code, out) == (2, "") and f"none of the {len(wrong) + 1} logs has a step to compare" in err


def test_a_run_without_a_step_is_said_to_be_one(told, figures, tmp_path):
    log = write_log(tmp_path / "run.h5", Made(steps=0, asked=10))
    code, out, _ = told(log, "--html", tmp_path / "run.html")
    assert code == 0 and "no step yet" in " ".join(out.split()) and "why it ended" in out
    assert the_one(figures(log))["steps_done"] == 0
    for option in ("--svg", "--plot"):
        code, _, err = told(log, option, tmp_path / "run.svg")
        assert code == 2 and err.count("\n") == 1


# ---- several runs


def study(folder, scheme, ranks, mini_batch, chance=0, forward_s=0.004, **keys):
    depth = keys.pop("depth", 4)
    name = f"{scheme}-{ranks}-{mini_batch}-{depth}-{chance}.h5"
    made = Made(ranks=ranks, chance=chance, forward_s=forward_s, steps=14)
    keys = {"micro_batch_size": 2, **keys} if mini_batch is None else {"mini_batch_size": mini_batch, **keys}
    keys.setdefault("micro_batches", depth)
    return write_log(folder / name, made, scheme=scheme, depth=depth, seed=chance, **keys)


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    """Two schemes on 4, 8 and 16 ranks with 16 samples for each 4 ranks, and on 8 also with 16 of all; 4 ranks
    three times."""
    folder = tmp_path_factory.mktemp("scaling")
    logs = []
    for scheme, forward_s in (("1f1b", 0.005), ("chimera", 0.004)):
        logs += [study(folder, scheme, 4, 16, chance, forward_s) for chance in range(3)]
        logs += [study(folder, scheme, 8, 32, 0, forward_s), study(folder, scheme, 16, 64, 0, forward_s)]
        logs += [study(folder, scheme, 8, 16, 0, forward_s / 2)]
    return logs


def test_repeats_are_one_configuration_with_an_interval_over_runs(figures, scaling):
    found = figures(*scaling)
    assert len(found["runs"]) == 12 and len(found["configurations"]) == 8
    for made in found["configurations"]:
        of_runs = [run["samples_per_s"]["value"] for run in found["runs"] if run["path"] in made["paths"]]
        interval = made["samples_per_s"]
        if made["ranks"] == 4:
            assert interval["over"] == "3 runs" and interval["value"] == pytest.approx(np.mean(of_runs))
            assert interval["half_width_95"] == pytest.approx(4.3027 * np.std(of_runs, ddof=1) / 3**0.5, rel=1e-3)
        else:
            assert interval["over"] == "4 blocks of 3 steps" and interval["value"] == of_runs[0]


def test_scaling_is_beside_the_fewest_ranks(figures, scaling):
    found = figures(*scaling)
    (weak,), strong = found["weak_scaling"], found["strong_scaling"]
    assert weak["batch"] == 4 and [each["batch"] for each in strong] == [16]
    of_number = {made["number"]: made for made in found["configurations"]}
    for kind, ranks in (weak, [4, 8, 16]), (strong[0], [4, 8]):
        assert set(kind["schemes"]) == {"1f1b", "chimera"}
        for points in kind["schemes"].values():
            assert [point["ranks"] for point in points] == ranks
            first = of_number[points[0]["configuration"]]["samples_per_s"]
            for point in points:
                throughput = of_number[point["configuration"]]["samples_per_s"]
                speedup = throughput["value"] / first["value"]
                assert point["speedup"]["value"] == pytest.approx(speedup)
                assert point["efficiency"]["value"] == pytest.approx(speedup * ranks[0] / point["ranks"])
                relative = [of["half_width_95"] / of["value"] for of in (throughput, first)]
                half = 0 if point is points[0] else speedup * np.hypot(*relative)
                assert point["speedup"]["half_width_95"] == pytest.approx(half)


def test_of_each_scheme_the_fastest_scales(figures, tmp_path):
    logs = [study(tmp_path, "1f1b", 4, 16), study(tmp_path, "1f1b", 8, 32)]
    logs += [study(tmp_path, "1f1b", 8, 32, forward_s=0.001, depth=2)]
    found = figures(*logs)
    (points,) = found["weak_scaling"][0]["schemes"].values()
    assert [found["configurations"][point["configuration"] - 1]["depth"] for point in points] == [4, 2]


def test_the_tables_say_what_the_figures_are(told, figures, scaling):
    out, found = told(*scaling, "--width", 200)[1], figures(*scaling)
    for title in ("Strong scaling, 16 samples a step", "Weak scaling, 4 samples a step and rank"):
        assert title in out
    for made in found["configurations"]:
        row = next(line for line in out.splitlines() if re.match(rf"{made['number']} +{made['scheme']} ", line))
        assert made["samples_per_s"]["over"] in row
        number = made["samples_per_s"]
        assert str(Interval(number["value"], number["half_width_95"])) in row
        assert f"{made['loss']:.4f}" in row and f"{100 * made['bubble_measured']:.1f} %" in row
    assert all(str(log) in out.replace("\n", "") for log in scaling)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_comparisons_fit_the_terminal(told, scaling, width, monkeypatch):
    monkeypatch.chdir(scaling[0].parent)
    out = told(*(log.name for log in scaling), "--width", width)[1]
    assert max(map(len, out.splitlines())) <= width


def test_what_runs_differ_in_is_their_label(figures, tmp_path):
    for name, keys in {"a": {}, "b": {"concat": "doubling"}, "c": {"recompute": "stage"}}.items():
        write_log(tmp_path / f"{name}.h5", Made(steps=6), micro_batches=8, **keys)
    found = figures(*sorted(tmp_path.glob("*.h5")))
    labels = {made["label"] for made in found["configurations"]}
    assert labels == {
        "chimera recompute=none", "chimera concat=doubling recompute=none", "chimera recompute=stage"
    }  # fmt: skip


def test_what_is_learnt_is_named_only_where_nothing_else_tells_runs_apart(figures, tmp_path):
    """It does not change how long a step takes, so runs that learn otherwise still scale together."""
    rates = {"a": (4, 1e-3), "b": (4, 2e-3), "c": (8, 2e-3)}
    logs = [
        write_log(tmp_path / f"{name}.h5", Made(ranks=ranks, chance=ranks), learning_rate=rate)
        for name, (ranks, rate) in rates.items()
    ]
    found = figures(*logs)
    told = {Path(made["paths"][0]).stem: (made["label"], made["learning"]) for made in found["configurations"]}
    assert told["a"] == ("chimera", "learning_rate=0.001") and told["b"] == ("chimera", "learning_rate=0.002")
    assert told["c"] == ("chimera", "")
    assert [point["ranks"] for point in found["weak_scaling"][0]["schemes"]["chimera"]] == [4, 8]


@pytest.mark.parametrize("keys", [{"hidden": 128}, {"sequence_length": 32}, {"model": "bert"}], ids=str)
def test_runs_of_different_models_are_compared_only_when_that_is_meant(told, figures, folder, tmp_path, keys):
    other = write_log(tmp_path / "other.h5", Made(ranks=8), **keys)
    code, out, err = told(folder / "chimera.h5", other)
    ((key, value),) = keys.items()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"other.h5 has {key}={value} and" in err and str(KEYS.get(key, "gpt")) in err and "--different" in err
    found = figures(folder / "chimera.h5", other, "--different")
    assert any(f"{key}={value}" in made["label"] for made in found["configurations"])
    assert found["weak_scaling"] == []


def test_the_same_file_counts_once(figures, folder):
    assert len(figures(folder / "chimera.h5", folder / ".." / folder.name / "chimera.h5")["runs"]) == 1


def test_options_of_one_run_are_refused_for_several(told, scaling):
    for option in ("--session", "--step"):
        code, out, err = told(*scaling, option, 0)
        assert (code, out) == (2, "") and f"{option} is of one run, not of 12" in err


def test_a_run_in_two_layouts_is_compared_by_its_last(told, figures, resumed, folder):
    found = figures(resumed, folder / "chimera.h5", "--width", 300)
    assert {made["scheme"] for made in found["configurations"]} == {"chimera"}
    assert f"{resumed} (sessions 0, 2)" in told(resumed, folder / "chimera.h5", "--width", 300)[1]


# ---- pictures


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_plots_of_several_are_those_of_the_paper(told, scaling, tmp_path, kind):
    path = tmp_path / f"plot.{kind}"
    code, _, err = told(*scaling, "--plot", path)
    if kind != "svg":
        pytest.importorskip("matplotlib")
    assert code == 0, err
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<svg")
    if kind == "svg":
        texts = [text.text for text in ET.parse(path).iter(f"{SVG}text")]
        for title in ("Weak scaling, 4 samples a step and rank", "Throughput, fastest of each scheme", "Loss"):
            assert title in texts
        assert len([each for each in ET.parse(path).iter(f"{SVG}path") if each.get("class") == "error"]) > 10


def test_matplotlib_draws_what_the_svg_has():
    figures = pytest.importorskip("matplotlib.figure")
    for drawn in ALL:
        axes = figures.Figure().subplots()
        (plot._bars if isinstance(drawn, Bars) else plot._points)(axes, drawn)
        plot._finish(axes, drawn)
        assert axes.get_title(loc="left") == drawn.title and axes.get_ylabel() == drawn.y
        if isinstance(drawn, Bars):
            heights = [[patch.get_height() for patch in each] for each in axes.containers if hasattr(each, "patches")]
            assert heights == [[v for v in bar.values if np.isfinite(v)] for bar in drawn.bars]
        else:
            for series in drawn.series:
                lines = [line.get_xydata().tolist() for line in axes.lines]
                assert [list(point) for point in series.points] in lines


def test_without_matplotlib_the_remedy_is_named(told, folder, tmp_path, monkeypatch):
    def missing(name, *_):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(plot, "import_module", missing)
    code, out, err = told(folder / "chimera.h5", "--plot", tmp_path / "run.pdf")
    assert code == 2 and not out and err.count("\n") == 1
    assert "a PDF needs matplotlib: pip install 'chimera-mpi[plot]'" in err
    assert told(folder / "chimera.h5", "--plot", tmp_path / "run.svg")[0] == 0


def test_names_of_files_that_cannot_be_are_refused_first(told, folder, tmp_path):
    for option, name, words in (
        ("--plot", "run.jpeg", "must end with .png, .svg, .pdf"),
        ("--html", "run.h5", "is the name of a log, which is never overwritten"),
    ):
        code, out, err = told(folder / "chimera.h5", option, tmp_path / name)
        assert (code, out) == (2, "") and words in err and not (tmp_path / name).exists()
    log = shutil.copy(folder / "chimera.h5", tmp_path / "run.log")
    code, out, err = told(log, "--html", log)
    assert (code, out) == (2, "") and "run.log is a log that is reported, and never overwritten" in err
    assert read_run(log).sampled_steps


@pytest.mark.parametrize("option", ["--svg", "--plot", "--html", "--tensorboard"])
def test_what_cannot_be_written_is_one_line_instead_of_the_report(told, folder, tmp_path, option):
    (tmp_path / "file").touch()
    names = ["run.png", "run.svg"] if option == "--plot" else ["run.svg"]
    for name in names:
        for path in tmp_path / "file" / name, tmp_path / ("x" * 300 + name):
            code, out, err = told(folder / "chimera.h5", option, path)
            assert (code, out) == (2, "") and err.count("\n") == 1
            assert f"cannot write {tmp_path}" in err


# ---- TensorBoard


@pytest.fixture
def events():
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder):
        return reading.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()

    return read


def test_tensorboard_reads_what_the_log_has(told, events, folder, tmp_path):
    assert told(folder / "chimera.h5", "--tensorboard", tmp_path / "board")[0] == 0
    found, run = events(tmp_path / "board"), read_run(folder / "chimera.h5")
    for tag, values in {
        "loss/training": run.steps["loss"],
        "steps/samples_per_s": run.steps["samples_per_s"],
        "wait_s/rank2": run.workers["wait_s"][:, 2],
    }.items():
        scalars = found.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(20))
        assert [scalar.value for scalar in scalars] == pytest.approx(values.tolist())
    validation = found.Scalars("loss/validation")
    assert [(each.step, each.value) for each in validation] == [
        (step, pytest.approx(loss)) for step, loss in zip(*map(list, list(run.evaluations.values())[:2]), strict=True)
    ]
    gaps = np.diff([scalar.wall_time for scalar in found.Scalars("loss/training")])
    assert gaps == pytest.approx(run.steps["seconds"][1:].tolist(), abs=1e-5)
    (text,) = found.Tensors("configuration")
    assert b"scheme = chimera" in text.tensor_proto.string_val[0]
    assert sorted(path.name[:8] for path in (tmp_path / "board").iterdir()) == ["events.o"]


def test_events_of_the_same_run_are_replaced_and_others_refused(told, events, folder, tmp_path):
    log, board = tmp_path / "run.h5", tmp_path / "board"
    write_log(log, Made(steps=5, asked=10, reason=None))
    for steps in (5, 10):
        assert told(log, "--tensorboard", board)[0] == 0
        assert len(events(board).Scalars("loss/training")) == steps
        assert len(list(board.iterdir())) == 1
        if steps == 5:
            write_log(log, Made(first=5, steps=10))
    (there,) = board.iterdir()
    before = there.read_bytes()
    code, _, err = told(folder / "chimera.h5", "--tensorboard", board)
    assert code == 2 and err.count("\n") == 1 and there.name in err and "take another folder" in err
    assert list(board.iterdir()) == [there] and there.read_bytes() == before


def test_several_runs_have_a_folder_each(told, events, scaling, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(scaling[0], tmp_path / name / "log.h5")
    board = tmp_path / "board"
    assert told(tmp_path / "a/log.h5", tmp_path / "b/log.h5", scaling[1], "--tensorboard", board)[0] == 0
    assert len(list(board.iterdir())) == 3
    assert all(events(each).Scalars("loss/training") for each in board.iterdir())


def test_runs_are_named_apart():
    def names(*paths):
        return [*_named([SimpleNamespace(run=SimpleNamespace(path=Path(path))) for path in paths])]

    assert names("/a/x.h5", "/a/y.h5") == ["x", "y"] and names("/a/x.h5", "/b/x.h5") == ["a-x", "b-x"]
    assert names("/a/b-c.h5", "/a-b/c.h5", "/a/c.h5") == ["1", "2", "3"], "all would be a-b-c"
    assert names("/a/x.h5", "/a/x.hdf5") == ["1", "2"]


def test_without_tensorboard_the_remedy_is_named(told, folder, tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("chimera_mpi.report.events.import_module", missing)
    code, _, err = told(folder / "chimera.h5", "--tensorboard", tmp_path / "board")
    assert code == 2 and "pip install 'chimera-mpi[tensorboard]'" in err and not (tmp_path / "board").exists()


def test_nothing_is_drawn_that_was_not_asked_for(told, folder):
    before = sorted(folder.iterdir())
    told(folder / "chimera.h5")
    assert sorted(folder.iterdir()) == before


def test_names_that_others_use_stay():
    assert {"summary", "steps_of", "plan_of", "config_of", "costs_of"} <= set(report.__all__)
    with pytest.raises(InputError):
        report.part_of(read_run(Path("nowhere.h5")))
