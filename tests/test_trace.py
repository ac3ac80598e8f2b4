"""Traces are held to the rules of the Trace Event Format, as Perfetto's importer reads it, and read back."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import run_logs as logs

from chimera_mpi import draw
from chimera_mpi.cli import main
from chimera_mpi.config import schedule_of
from chimera_mpi.draw import SampledStep
from chimera_mpi.draw.trace import RUN, thread
from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, simulate
from chimera_mpi.report import part_of
from chimera_mpi.runlog import RunLog, read_run
from chimera_mpi.sampled import sampled, timelines, trace_of
from chimera_mpi.schedule import SCHEMES, Kind, build, messages
from chimera_mpi.timeline import Timeline

FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "b": {"name", "cat", "pid", "tid", "ts", "id", "args"},
    "e": {"name", "cat", "pid", "tid", "ts", "id"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def nanoseconds(microseconds: float) -> int:
    """Exactly: the format has microseconds, with three decimals at most."""
    whole = round(microseconds * 1000)
    assert abs(microseconds * 1000 - whole) < 1e-3
    return whole


def checked(text: str) -> dict[str, list[dict]]:
    """The events of a trace by phase, once every rule has been seen to hold."""
    trace = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert trace.keys() == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    by_phase = defaultdict(list)
    for event in trace["traceEvents"]:
        by_phase[event["ph"]].append(event)
        assert event.keys() - {"ph", "tid"} == FIELDS[event["ph"]] - {"tid"}, event
        assert event["ph"] == "M" or event["ts"] >= 0
        assert isinstance(event["pid"], int) and event["pid"] > 0 and event.get("tid", 1) > 0
        assert event.get("tid") != event["pid"], "that would be the main thread, which is drawn first"
    check_names(by_phase)
    check_slices(by_phase)
    check_arrows(trace["traceEvents"], by_phase)
    check_lanes(by_phase)
    return by_phase


def check_names(by_phase) -> None:
    assert {event["name"] for event in by_phase["M"]} == METADATA
    for kind, key in (("process_name", "pid"), ("thread_name", "tid")):
        named = Counter(event[key] for event in by_phase["M"] if event["name"] == kind)
        assert named.keys() == {event[key] for event in by_phase["X"]} and set(named.values()) == {1}
    assert all(
        isinstance(event["args"].get("name", event["args"].get("sort_index")), (str, int)) for event in by_phase["M"]
    )


def check_slices(by_phase) -> None:
    """Those of a thread follow each other, to the nanosecond."""
    rows = defaultdict(list)
    for event in by_phase["X"]:
        start, length = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        assert length >= 0
        rows[event["pid"], event["tid"]].append((start, start + length))
    for row in rows.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(row)))


def check_arrows(events, by_phase) -> None:
    """Each has one start and one end, in that order, and each lies in a slice that comes before it in the file."""
    starts, ends = ({event["id"]: event for event in by_phase[phase]} for phase in "sf")
    assert starts.keys() == ends.keys() and len(starts) == len(by_phase["s"]) == len(by_phase["f"])
    for name, start in starts.items():
        end = ends[name]
        assert start["ts"] <= end["ts"] and (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["pid"] == end["pid"] and start["tid"] != end["tid"] and end["bp"] == "e"
    slices = set()
    for event in events:
        if event["ph"] == "X":
            slices.add(
                (
                    event["pid"],
                    event["tid"],
                    nanoseconds(event["ts"]),
                    nanoseconds(event["ts"]) + nanoseconds(event["dur"]),
                )
            )
        if event["ph"] in "sf":
            where = event["pid"], event["tid"]
            at = nanoseconds(event["ts"])
            assert any(one[:2] == where and one[2] <= at <= one[3] for one in slices), event


def check_lanes(by_phase) -> None:
    begins, ends = ({(e["cat"], e["id"]): e for e in by_phase[phase]} for phase in "be")
    assert begins.keys() == ends.keys() and len(begins) == len(by_phase["b"]) == len(by_phase["e"])
    for name, begin in begins.items():
        assert isinstance(begin["id"], str), "Perfetto passes over a lane whose id is a number"
        assert (
            begin["ts"] <= ends[name]["ts"]
            and begin["name"] == ends[name]["name"]
            and begin["pid"] == ends[name]["pid"]
        )


def arrows(schedule) -> int:
    return sum(message.source != message.target for message in messages(schedule))


# ---------------------------------------------------------------------------------------------- planned


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_planned_step_of_every_scheme(scheme) -> None:
    """1/3 is in no binary number of seconds, and not in whole nanoseconds: rounding must not make slices overlap."""
    costs = Costs(forward_s=1 / 3, backward_s=2 / 3, transfer_s=0.1, allreduce_s=0.7, update_s=1 / 7)
    timeline = simulate(build(scheme, 4, 8), costs)
    found = checked(draw.chrome_trace(timeline))
    assert Counter(event["args"]["op"] for event in found["X"]) == Counter(str(span.op) for span in timeline.spans)
    assert len(found["s"]) == arrows(timeline.schedule)
    updates = [span for span in timeline.spans if span.op.kind is Kind.UPDATE]
    assert len(found["b"]) == len(updates) or len(timeline.schedule.pipes) == 1
    assert {e["args"]["live"] for e in found["C"]} >= {0, 1}
    last = {e["name"]: e for e in sorted(found["C"], key=lambda event: event["ts"])}
    assert all(event["args"]["live"] == 0 for event in last.values()), "nothing is left at the flush"


def test_lanes_are_from_the_start_of_a_sum_to_the_update() -> None:
    timeline = simulate(build("chimera", 4, 4), Costs(1, 2, allreduce_s=3, update_s=1))
    found = checked(draw.chrome_trace(timeline))
    start_of = {span.op: span.start_s for span in timeline.spans}
    ends = {event["id"]: event["ts"] for event in found["e"]}
    lanes = {(e["name"], e["args"]["pipeline"], e["ts"], ends[e["id"]]) for e in found["b"]}
    wanted = {
        (
            f"all-reduce, stage {op.stage} on P{timeline.schedule.worker(op)}",
            op.pipe,
            start_of[op._replace(kind=Kind.REDUCE)] * 1e6,
            start_s * 1e6,
        )
        for op, start_s in start_of.items()
        if op.kind is Kind.UPDATE
    }
    assert lanes == wanted and len(lanes) == 8


def test_several_timelines_are_processes_that_share_no_id() -> None:
    both = {name: simulate(build(name, 4, 4), Costs(1, 2)) for name in ("gpipe", "chimera")}
    found = checked(draw.chrome_trace(both))
    assert {event["pid"] for event in found["X"]} == {1, 2}


# --------------------------------------------------------------------------------------------- measured


def measured(timeline: Timeline, late_s: float = 0.0) -> Timeline:
    """As measured by clocks that differ: worker w's is w * `late_s` behind."""
    spans = (
        s._replace(start_s=s.start_s + late_s * (9 - s.worker), end_s=s.end_s + late_s * (9 - s.worker))
        for s in timeline.spans
    )
    return Timeline(timeline.schedule, tuple(spans))


def test_clocks_that_differ_by_more_than_an_op_takes_break_no_rule() -> None:
    timeline = simulate(build("chimera", 4, 4), Costs(0.01, 0.02))
    for late_s in (1e-6, 0.004, 0.03, 0.5):
        step = SampledStep(3, 1.0, 9.0, (measured(timeline, late_s),), {})
        there, wanted = len(checked(draw.run_trace([step]))["s"]), arrows(timeline.schedule)
        assert there == wanted if late_s < 0.01 else there < wanted, "none runs backwards"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.h5"
    logs.log(path, 0, 29, width=2, reason=None)
    logs.log(path, 30, 49, width=1, depth=2, scheme="1f1b", reason="done")
    return read_run(path)


def test_a_run_has_all_steps_of_all_replicas_one_after_the_other(run) -> None:
    """Chimera on 2 x 4 ranks with a step every 0.5 s, then 1F1B on 2."""
    found = checked(trace_of(run))
    steps = [event for event in found["X"] if event["pid"] == RUN]
    assert [(e["name"], e["ts"], e["dur"]) for e in steps] == [
        (f"step {step}", step * 500_000.0, 500_000.0) for step in (9, 19, 29, 39, 49)
    ]
    assert steps[0]["args"]["loss"] == pytest.approx(4.55) and steps[0]["args"]["step"] == 9
    ops = [event for event in found["X"] if event["pid"] > RUN]
    for step in (9, 19, 29, 39, 49):
        inside = [e for e in ops if step * 0.5e6 <= e["ts"] < (step + 1) * 0.5e6]
        wanted = Counter(
            (RUN + 1 + replica, thread(RUN + 1 + replica, span.worker), str(span.op))
            for replica, timeline in enumerate(timelines(run, step))
            for span in timeline.spans
        )
        assert Counter((e["pid"], e["tid"], e["args"]["op"]) for e in inside) == wanted
    assert {e["pid"] for e in ops} == {RUN + 1, RUN + 2}
    chimera, rival = timelines(run, 9)[0].schedule, timelines(run, 39)[0].schedule
    assert len(found["s"]) == 3 * 2 * arrows(chimera) + 2 * arrows(rival)
    assert len({e["pid"] for e in found["b"] if e["ts"] < 15e6}) == 2
    assert not [e for e in found["b"] if e["ts"] > 15e6], "one holder of a stage has nobody to add up with"


def test_read_back_a_trace_has_the_spans_of_the_log(run) -> None:
    found = checked(trace_of(run, 19))
    (step,) = sampled(run, 19)
    for replica, timeline in enumerate(step.replicas):
        pid = RUN + 1 + replica
        there = {(e["tid"], e["args"]["op"]): (e["ts"], e["ts"] + e["dur"]) for e in found["X"] if e["pid"] == pid}
        for span in timeline.spans:
            start_us, end_us = there[thread(pid, span.worker), str(span.op)]
            assert start_us / 1e6 - step.start_s == pytest.approx(span.start_s, abs=2e-9)
            assert end_us / 1e6 - step.start_s == pytest.approx(span.end_s, abs=2e-9)


def test_steps_do_not_overlap_where_a_worker_ends_after_rank_0(tmp_path) -> None:
    """Every step sampled, each 0.12 s by rank 0's clock and 0.15 s by another's."""
    asked = logs.config(steps=6)
    timeline = simulate(build("chimera", 4, 4), Costs(0.01, 0.02))
    with RunLog.create(tmp_path / "run.h5", logs.attributes(asked), 4) as log:
        for step in range(6):
            log.spans(step, 0, timeline.spans)
            log.step(logs.row(step, seconds=timeline.makespan_s * 0.8), logs.workers(4))
    found = checked(trace_of(read_run(tmp_path / "run.h5")))
    assert len([e for e in found["X"] if e["pid"] == RUN]) == 6


def test_a_stream_begins_with_the_first_of_its_steps(tmp_path) -> None:
    asked = logs.config(scheme="pipedream", steps=8, eval_every=4)
    schedule = schedule_of(asked)
    assert schedule.steps == 4
    with RunLog.create(tmp_path / "run.h5", logs.attributes(asked), 4) as log:
        for step in range(8):
            if step % 4 == 3:
                log.spans(step, 0, simulate(schedule.schedule, Costs(0.01, 0.02)).spans)
            log.step(logs.row(step), logs.workers(4))
    found = checked(trace_of(read_run(tmp_path / "run.h5")))
    assert [(e["ts"], e["dur"]) for e in found["X"] if e["pid"] == RUN] == [(0, 2e6), (2e6, 2e6)]


def test_spans_whose_step_was_lost_are_left_out(tmp_path) -> None:
    timeline = simulate(build("chimera", 4, 4), Costs(0.01, 0.02))
    log = RunLog.create(tmp_path / "run.h5", logs.attributes(logs.config()), 4, flush_every_s=1e9)
    log.step(logs.row(0), logs.workers(4))
    log.spans(1, 0, timeline.spans)
    log.flush()
    log._abandon()
    with pytest.raises(InputError, match="has no spans yet: one step in 10 has some at first"):
        trace_of(read_run(log.path))
    with pytest.raises(InputError, match="no spans of step 1: sampled are none"):
        trace_of(read_run(log.path), 1)


def test_spans_of_another_layout_than_the_step_are_left_out(tmp_path) -> None:
    """Killed after it had sampled step 9 and before it logged it; done again by 2 x 2 ranks, as many spans."""
    path = tmp_path / "run.h5"
    logs.log(path, 0, 8, scheme="1f1b", reason=None)
    with RunLog.append(path, logs.attributes(logs.config(scheme="1f1b")), 4) as log:
        log.spans(9, 0, simulate(build("1f1b", 4, 4), Costs(0.01, 0.02)).spans)
        log.flush()
    logs.log(path, 9, 19, width=2, depth=2, scheme="1f1b")
    run = read_run(path)
    assert run.sampled_steps == (9, 19)
    assert [step.step for step in sampled(run)] == [19]
    assert part_of(run).sampled_steps == (19,)


def test_of_a_long_run_the_last_steps_are_drawn(run) -> None:
    spans = {step.step: sum(len(timeline.spans) for timeline in step.replicas) for step in sampled(run)}
    assert [*spans] == [9, 19, 29, 39, 49]
    for most, steps in ((1, [49]), (spans[49] + spans[39], [39, 49]), (sum(spans.values()) - 1, [19, 29, 39, 49])):
        assert [step.step for step in sampled(run, most_spans=most)] == steps
    (alone,) = sampled(run, most_spans=1)
    assert alone == [*sampled(run)][-1], "where it lies is the same"


def test_report_writes_the_trace(run, tmp_path, capsys) -> None:
    path = tmp_path / "trace.json"
    assert main(["report", str(run.path), "--trace", str(path)]) == 0
    assert path.read_text() == trace_of(run)
    assert main(["report", str(run.path), "--trace", str(path), "--step", "19", "--session", "0"]) == 0
    assert path.read_text() == trace_of(run, 19)
    capsys.readouterr()
    assert main(["report", str(run.path), "--trace", "/no/such/folder/a.json"]) == 2
    assert "cannot write /no/such/folder/a.json" in capsys.readouterr().err
