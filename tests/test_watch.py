"""The live view: what it shows follows from the log, it disturbs no writer, and it ends when the run does."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from run_logs import attributes, config, log, row, workers

from chimera_mpi.cli import main
from chimera_mpi.commands.watch import RETRIES, Follower
from chimera_mpi.errors import InputError
from chimera_mpi.lock import owner_lives
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.runlog import RunLog, read_run
from chimera_mpi.schedule import Kind, build, needs
from chimera_mpi.timeline import Timeline
from chimera_mpi.watch import SILENT_S, STARTING_S, Cause, Rank, State, Writer, blames, curve, lines, plain, view_of

NOBODY = Writer("", None)
ALIVE, DEAD = Writer("process 7 on node1", True), Writer("process 7 on node1", False)


def timeline(scheme: str = "chimera", depth: int = 4, **costs: float) -> Timeline:
    return simulate(build(scheme, depth, 4), Costs(**{"forward_s": 0.01, "backward_s": 0.02, **costs}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


def seen(path: Path, writer: Writer = NOBODY, silent_s: float = 1.0):
    """The view of a log, on the clock of Greenwich, as it was last written `silent_s` ago."""
    start = datetime.fromisoformat(read_run(path).sessions[0].start)
    now = start + timedelta(seconds=300)
    return view_of(replace(read_run(path), path=Path("run.h5")), now, now - timedelta(seconds=silent_s), writer)


def text(view, width: int = 80, height: int | None = None, ascii: bool = False) -> list[str]:
    return [plain(line) for line in lines(view, width, height, ascii)]


# ------------------------------------------------------------------------------------------------- views


GOLDEN = """\
run.h5
gpt with chimera  depth 4 x width 1  4 micro-batches  32 samples a step
running: process 7 on node1

step        40 of 50  80.0 %  0:00:05 left  █████████████████████████████░░░░░░░
    5.0000  █▇▆▆▅▄▃▂▂▁
            ███████████▇▆▆▅▄▃▂▂▁
            █████████████████████▇▇▆▅▄▃▃▂▁
    3.0500  ███████████████████████████████▇▇▆▅▄▃▃▂▁
loss        3.0500  grad norm 0.500  learning rate 0.001
speed       64.0 samples/s  6,400 tokens/s  500 ms a step  bubble 25.0 %
validation  3.4400 after step 39  best 3.4400 after step 39
checkpoints at the end, in saved

  worker  compute  wait  all-reduce  update  peak MB  waits most for (step 39)
      P0     50 %   0 %        10 %    20 %      100  P1, backward: 75 % of it
      P1     50 %   1 %        10 %    20 %      100  P0, forward: 50 % of it
      P2     50 %   2 %        10 %    20 %      100  P3, forward: 50 % of it
      P3     50 %   3 %        10 %    20 %      100  P2, backward: 75 % of it"""


def test_the_view_of_a_run(path) -> None:
    log(path, 0, 39, reason=None)
    assert text(seen(path, ALIVE)) == GOLDEN.splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 18, 24, None])
@pytest.mark.parametrize("ascii", [False, True])
def test_the_screen_is_kept_to(path, width, height, ascii) -> None:
    log(path, 0, 39, width=3)
    view = seen(path)
    drawn = text(view, width, height, ascii)
    assert max(map(len, drawn)) <= width and (height is None or len(drawn) <= height)
    assert not ascii or all(line.isascii() for line in drawn)
    assert drawn[0] == "run.h5" and (height == 5 or any(line.startswith("step") for line in drawn))
    if width >= 40 and height in (24, None):
        assert any("P3 rank 11" in line for line in drawn), "the one that waits most"


def test_of_many_workers_those_that_wait_most_are_shown(path) -> None:
    log(path, 0, 9, width=3)
    drawn = text(seen(path), 100, 20)
    assert drawn[-1].endswith("more, which wait less")
    hidden = int(drawn[-1].split()[0])
    shown = [int(found[1]) for line in drawn if (found := re.match(r" +P\d rank (\d+)", line))]
    assert shown == list(range(hidden, 12))


def test_numbers_are_those_of_the_log(path) -> None:
    log(path, 0, 39)
    view = seen(path)
    assert (view.done, view.steps, view.sampled) == (40, 50, 39)
    assert view.left_s == pytest.approx(5.0) and view.samples_per_s == pytest.approx(64)
    assert view.validation == ((19, 5 - 0.76), (39, pytest.approx(5 - 1.56)))
    assert [worker.rank for worker in view.workers] == [Rank(0, w) for w in range(4)]
    assert [worker.wait for worker in view.workers] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert all(worker.compute == 0.5 and worker.peak_bytes == 1e8 for worker in view.workers)


def test_rates_are_those_of_the_last_session_once_it_is_warm(path) -> None:
    for first, seconds in ((0, 3.0), (30, 0.5)):
        with (RunLog.append if first else RunLog.create)(path, attributes(config()), 4) as writer:
            for step in range(first, first + 5):
                writer.step(row(step, first, seconds=9.0 if step < first + 2 else seconds), workers(4))
        assert seen(path).step_s == seconds and seen(path).samples_per_s == 32 / seconds


def test_a_log_without_steps_and_one_with_one(path) -> None:
    log(path, 0, -1, reason=None)
    view = seen(path, ALIVE)
    assert view.state is State.RUNNING and view.status.startswith("starting: no step yet since ")
    assert view.done == 0 and not view.workers
    assert "0 of 50  0.0 %" in "\n".join(text(view)) and "nan" not in "\n".join(text(view))
    log(path, 0, 0)
    view = seen(path)
    assert view.done == 1 and len(view.losses) == 1 and "1 of 50" in "\n".join(text(view))


def test_losses_that_are_none_leave_a_gap(path) -> None:
    with RunLog.create(path, attributes(config()), 4) as writer:
        for step in range(6):
            bad = step == 3
            loss, norm = (np.nan, np.inf) if bad else (5.0 - step, 1.0)
            writer.step(row(step, loss=loss, grad_norm=norm, skipped=bad), workers(4))
    view = seen(path)
    drawn = text(view)
    assert "skipped     1 steps, the last was step 3" in drawn
    assert view.skipped == (3,) and curve(view.losses, 10)[0][3] == " "
    assert any(line.startswith("    5.0000  ") for line in drawn)


def test_curves_rise_with_their_values() -> None:
    values = np.arange(16.0)
    for ascii, marks in ((False, "▁▂▃▄▅▆▇█"), (True, ".:#")):
        rows = curve(values, 16, 2, ascii)
        heights = [sum(marks.find(row[x]) + 1 for row in rows) for x in range(16)]
        assert heights == sorted(heights) and heights[0] == 1 and heights[-1] == 2 * len(marks)
    assert curve([], 10) == curve([np.nan, np.inf], 10) == []
    assert curve([3.0], 10) == ["▁"] and curve([3.0] * 3, 10, 2) == ["   ", "▁▁▁"]
    assert len(curve(np.arange(1000.0), 30)[0]) == 30


# ----------------------------------------------------------------------------------- running, silent, ended


def test_states(path) -> None:
    log(path, 0, 9, reason=None)
    assert seen(path, ALIVE).state is State.RUNNING
    assert seen(path, ALIVE, SILENT_S + 1).state is State.SILENT
    assert seen(path, DEAD).state is State.KILLED
    assert seen(path, DEAD).status.startswith("killed: process 7 on node1 is gone, its last rows are of ")
    told = {writer: seen(path, writer, 200).status for writer in (ALIVE, NOBODY, Writer("process 7 on node2", None))}
    assert told_left(seen(path, ALIVE)) and told_left(seen(path, ALIVE, SILENT_S + 1))
    assert not told_left(seen(path, DEAD))
    assert [status.partition(", for 0:03:20: ")[2] for status in told.values()] == [
        "process 7 on node1 lives",
        "nobody holds its lock",
        "whether process 7 on node2 lives cannot be seen from here",
    ]
    log(path, 10, 19, reason="SIGUSR1 on rank 0: stopped after 20 of 50 steps, saved in saved: go on by resume=auto")
    stopped = seen(path, DEAD)
    assert stopped.state is State.ENDED and "SIGUSR1 on rank 0: stopped after 20 of 50 steps" in stopped.status
    assert stopped.is_over(waits=False) and not stopped.is_over(waits=True)
    assert not told_left(stopped)
    assert seen(path, ALIVE).status == "ending or going on: process 7 on node1" and not seen(path, ALIVE).is_over(
        waits=False
    )
    assert seen(path, ALIVE, SILENT_S + 1).state is State.ENDED, "the lock of one that was killed at the very end"
    log(path, 20, 49)
    done = seen(path)
    assert done.status.startswith("done at ") and done.is_over(waits=True)


def told_left(view) -> bool:
    return any(" left" in line for line in text(view))


def test_slow_steps_are_no_silence(path) -> None:
    with RunLog.create(path, attributes(config()), 4) as writer:
        for step in range(4):
            writer.step(row(step, seconds=60.0), workers(4))
        writer.flush()
        assert seen(path, ALIVE, 500).state is State.RUNNING
        assert seen(path, ALIVE, 700).state is State.SILENT
    log(path.with_name("new.h5"), 0, -1, reason=None)
    assert seen(path.with_name("new.h5"), ALIVE, STARTING_S - 1).state is State.RUNNING
    assert seen(path.with_name("new.h5"), ALIVE, STARTING_S + 1).state is State.SILENT


def test_a_resumed_run_in_another_layout(path) -> None:
    """The last session counts; who waited for whom before it does not until it has been sampled itself."""
    log(path, 0, 29, reason=None)
    log(path, 30, 34, width=2, depth=2, scheme="1f1b", steps=80, reason=None)
    view = seen(path, ALIVE)
    assert view.what[:2] == ("gpt with 1f1b", "depth 2 x width 2") and view.steps == 80
    assert [worker.rank for worker in view.workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(worker.most is None for worker in view.workers)
    assert "4 ranks, from step 0: killed" in view.sessions[0]
    assert "4 ranks, from step 30: has not ended" in view.sessions[1]
    log(path, 35, 44, width=2, depth=2, scheme="1f1b", steps=80)
    assert seen(path).sampled == 39 and any(worker.most for worker in seen(path).workers)
    log(path, 44, 44, width=2, depth=2, scheme="1f1b", steps=80, reason=None)
    assert seen(path, ALIVE).status.startswith("starting again, steps up to 44 are in the log")


# ----------------------------------------------------------------------------------------- who waits for whom


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b", "chimera", "zb_h1", "interleaved"])
def test_all_idle_time_before_a_message_has_its_cause(scheme) -> None:
    """What is blamed is what the timeline says was idle, and on the worker that made what was needed."""
    step = timeline(scheme)
    found = blames([step])
    expected: Counter[tuple[int, int]] = Counter()
    span_of = {span.op: span for span in step.spans}
    for mine in step.rows:
        for before, span in pairwise(mine):
            idle_s = span.start_s - before.end_s
            makers = [span_of[n] for n in needs(step.schedule, span.op) if span_of[n].worker != span.worker]
            if idle_s > 1e-9 and span.op.kind is not Kind.UPDATE:
                assert makers, "a worker is idle for a message"
                expected[span.worker, max(makers, key=lambda maker: maker.end_s).worker] += idle_s
        if makers := [span_of[n] for n in needs(step.schedule, mine[0].op)]:
            expected[mine[0].worker, makers[0].worker] += mine[0].start_s - step.begin_s
    blamed: Counter[tuple[int, int]] = Counter()
    for rank, causes in found.items():
        for cause, seconds in causes.items():
            if cause.kind is not Kind.REDUCE:
                blamed[rank.worker, cause.rank.worker] += seconds
    assert {key: pytest.approx(value) for key, value in expected.items()} == blamed


def test_who_waits_for_nobody_blames_nobody() -> None:
    alone = simulate(build("gpipe", 1, 4), Costs(forward_s=0.01, backward_s=0.02))
    spans = (s._replace(start_s=s.start_s + n / 1e3, end_s=s.end_s + n / 1e3) for n, s in enumerate(alone.rows[0]))
    assert blames([Timeline(alone.schedule, tuple(spans))]) == {}


def test_an_update_waits_for_the_last_replica_or_for_the_sum() -> None:
    alone = timeline("gpipe")
    end_s = 1.2 * alone.makespan_s

    def slower(factor: float) -> Timeline:
        """All updates wait for the last sum."""
        spans = (s._replace(start_s=factor * s.start_s, end_s=factor * s.end_s) for s in alone.spans)
        summed = (s._replace(start_s=end_s, end_s=end_s + 1) if s.op.kind is Kind.UPDATE else s for s in spans)
        return Timeline(alone.schedule, tuple(summed))

    found = blames([slower(1.0), slower(1.1)])
    for worker in range(4):
        sums = {cause for cause in found[0, worker] if cause.kind is Kind.REDUCE}
        assert sums == {Cause(Rank(1, worker), Kind.REDUCE)}, "all wait for the slow one, which waits for the sum"
        assert {cause for cause in found[1, worker] if cause.kind is Kind.REDUCE} == sums
    assert not any(cause.kind is Kind.REDUCE for causes in blames([slower(1.0)]).values() for cause in causes)


# -------------------------------------------------------------------------------------------- the command


def test_once(path, capsys, monkeypatch) -> None:
    log(path, 0, 39)
    monkeypatch.setenv("COLUMNS", "70")
    for words in (["--once"], []):
        assert main(["watch", str(path), *words]) == 0
        out, err = capsys.readouterr()
        assert "40 of 50  80.0 %" in out and "done at" in out and not err and "\x1b" not in out
        assert max(map(len, out.splitlines())) <= 70


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "run.h5 is not there: is the name right? --wait waits for it"),
        (lambda path: path.write_text("no log"), "run.h5 is not an HDF5 file, so not a run log"),
        (lambda path: path.mkdir(), "run.h5 cannot be read (Is a directory)"),
    ],
)
def test_what_is_no_log_is_refused_in_a_line(path, capsys, make, message) -> None:
    make(path)
    assert main(["watch", str(path)]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_logs_of_other_writers_and_of_newer_versions(path, capsys) -> None:
    RunLog.create(path, {}, 4).close()
    assert main(["watch", str(path)]) == 2
    assert "run.h5 has no 'config': is it the log of chimera-mpi train?" in capsys.readouterr().err
    for name, keys in (("newer.h5", {"colour": "blue"}), ("wrong.h5", {"depth": -4})):
        known = {**json.loads(config().model_dump_json()), **keys}
        RunLog.create(path.with_name(name), {"config": json.dumps(known)}, 4).close()
    assert main(["watch", str(path.with_name("newer.h5"))]) == 0
    assert main(["watch", str(path.with_name("wrong.h5"))]) == 2
    err = capsys.readouterr().err
    assert "wrong.h5: its configuration cannot be read: depth=-4" in err and err.count("\n") == 1
    assert err.count("cannot be read") == 1


def test_who_holds_a_lock_lives_or_not(tmp_path) -> None:
    lock = tmp_path / "run.h5.lock"
    assert owner_lives(lock) is None
    with RunLog.create(tmp_path / "run.h5", attributes(config()), 4):
        assert owner_lives(lock) is True
    gone = subprocess.Popen(["true"])
    lock.write_text(f"process {gone.pid} on {os.uname().nodename}")
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert owner_lives(lock) is False, "ended, but not waited for"
    gone.wait()
    assert owner_lives(lock) is False
    lock.write_text(f"process {gone.pid} on another-node")
    assert owner_lives(lock) is None


def test_the_writer_is_seen_by_a_link_to_the_log(path) -> None:
    log(path, 0, 9, reason=None)
    holder, link = f"process {os.getpid()} on {os.uname().nodename}", path.with_name("latest.h5")
    path.with_name("run.h5.lock").write_text(holder)
    link.symlink_to(path)
    assert Follower(link).look().status == f"running: {holder}"


def test_a_log_that_cannot_be_read_for_a_moment_is_tried_again(path) -> None:
    log(path, 0, 9, reason=None)
    whole, follower = path.read_bytes(), Follower(path)
    assert follower.look().done == 10
    path.write_bytes(whole[:100])
    for _ in range(RETRIES):
        assert follower.look().done == 10
    with pytest.raises(InputError):
        follower.look()
    path.write_bytes(whole)
    assert follower.look().done == 10
    with pytest.raises(InputError):
        path.write_bytes(whole[:100])
        Follower(path).look()


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, {tests!r})
import run_logs as of
path = Path(sys.argv[1])
log = of.RunLog.create(path, of.attributes(of.config(steps=100)), 4, flush_every_s=0)
for step in range(100):
    log.step(of.row(step), of.workers(4))
    time.sleep(0.002)
log.close("done")
"""


def writer(path: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WRITER.format(tests=str(Path(__file__).parent)), path])


def test_a_writer_and_a_watcher_at_once(path) -> None:
    """Each look is a prefix of the run and never less than the one before; the writer notices nothing."""
    process = writer(path)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    follower, done = Follower(path), [0]
    while not (view := follower.look()).is_over(waits=False):
        assert view.state is State.RUNNING and (not view.done or view.status.startswith(("running", "ending")))
        assert np.array_equal(view.losses, 5 - 0.05 * np.arange(view.done))
        done.append(view.done)
    assert process.wait(timeout=20) == 0
    assert done == sorted(done) and len(set(done)) > 5
    assert (view.done, view.status[:8]) == (100, "done at ") and not list(path.parent.glob("*.lock"))


def test_a_killed_writer_is_noticed(path) -> None:
    process = writer(path)
    while not path.exists() or len(read_run(path).steps["step"]) < 20:
        time.sleep(0.01)
    follower = Follower(path)
    assert follower.look().state is State.RUNNING
    process.kill()
    process.wait()
    view = follower.look()
    assert view.state is State.KILLED and view.is_over(waits=False) and not view.is_over(waits=True)
    assert str(process.pid) in view.status
    log(path, 0, 99, steps=100)
    assert follower.look().is_over(waits=True)


class Terminal:
    """`chimera-mpi watch` on a terminal of 70 x 30."""

    def __init__(self, *words: str, **environment: str):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "chimera_mpi", "watch", *words, "--every", "0.1"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "70", "LINES": "30", **environment}
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where tests run in the background
        self.process = subprocess.Popen(command, **ends, env=environment, start_new_session=True, preexec_fn=heeds)
        os.close(slave)
        self.output = ""

    def until(self, wanted: str, timeout_s: float = 30.0) -> str:
        deadline = time.monotonic() + timeout_s
        while wanted not in self.output:
            assert time.monotonic() < deadline, self.output
            if not self._read():
                assert wanted in self.output, self.output
        return self.output

    def end(self) -> int:
        while self._read():
            pass
        os.close(self.master)
        return self.process.wait(timeout=20)

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 5.0)[0]:
            return True
        try:
            found = os.read(self.master, 65536)
        except OSError:  # the other end has been closed
            return False
        self.output += found.decode(errors="replace")
        return bool(found)


def test_the_live_view_follows_waits_and_ends(path) -> None:
    """It waits for the log, then for the resumed run, and ends with the last step; all on one screen."""
    terminal = Terminal(str(path), "--wait")
    terminal.until("waiting for")
    log(path, 0, 9, reason="SIGUSR1 on rank 0: stopped after 10 of 50 steps, saved: go on by resume=auto")
    terminal.until("10 of 50")
    terminal.until("SIGUSR1 on rank 0")
    log(path, 10, 49)
    out = terminal.until("done at")
    assert terminal.end() == 0
    assert "50 of 50" in out and "\x1b[?25l" in out and "\x1b[?25h" in terminal.output, "the cursor comes back"
    assert "\x1b[32m" in out, "colour on a terminal"


def test_an_interrupt_ends_it_quietly_and_colour_is_not_needed(path) -> None:
    log(path, 0, 9, reason=None)
    path.with_name("run.h5.lock").write_text(f"process {os.getpid()} on {os.uname().nodename}")
    terminal = Terminal(str(path), NO_COLOR="1")
    terminal.until("10 of 50")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.output and not re.search("\x1b\\[3\\dm", terminal.output)
    assert "\x1b[?25h" in terminal.output


# ------------------------------------------------------------------------------------------------ its page


def test_its_page_shows_the_view_and_its_commands_run(path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parent.parent / "docs" / "watch_and_trace.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert GOLDEN in [block.rstrip("\n") for block in blocks]
    monkeypatch.chdir(path.parent)
    log(path, 0, 19)
    Path("runs").mkdir()
    for name in ("RUN.h5", "runs/20261130-091500-chimera.h5"):
        Path(name).write_bytes(path.read_bytes())
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("chimera-mpi ")]
    assert len(commands) >= 4
    for command in commands:
        assert main(command.split()[1:]) == 0, capsys.readouterr().err
    assert {made.name for made in path.parent.glob("*.json")} == {"run.json", "step.json", "chimera.json"}
