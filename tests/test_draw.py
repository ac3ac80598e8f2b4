"""Drawings: the golden one, and laws that hold for every scheme of the registry."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from chimera_mpi import draw
from chimera_mpi.cli import main
from chimera_mpi.draw import facts, geometry, look
from chimera_mpi.errors import InputError
from chimera_mpi.predict import Costs, peak_activations, simulate
from chimera_mpi.schedule import SCHEMES, Kind, Op, Schedule, build, needs
from chimera_mpi.timeline import Span, Timeline, Wait

GOLDEN = """\
chimera, D=4, N=4: makespan 16 s, bubble 25.0 %
s  0       2       4       6       8       10      12      14      16
P0 F0─ F1─ ··· f2─ b2───── f3─ b3─────R··· B0───── ······· B1─────RU
P1 ··· F0─ f2─ F1─ f3─ ··· b2───── B0───── b3───── B1─────RU······
P2 ··· f2─ F0─ f3─ F1─ ··· B0───── b2───── B1───── b3─────RU······
P3 f2─ f3─ ··· F0─ B0───── F1─ B1─────R··· b2───── ······· b3─────RU

F forward down   f forward up   B backward down   b backward up
R all-reduce starts   U update   · bubble"""

NARROW = """\
chimera, D=4, N=4: makespan 16 s, bubble
25.0 %
s  0         5         10        15
P0 F0F1· f2b2─ f3b3─R· B0─ ··· B1─RU
P1 · F0f2F1f3· b2─ B0─ b3─ B1─RU··
P2 · f2F0f3F1· B0─ b2─ B1─ b3─RU··
P3 f2f3· F0B0─ F1B1─R· b2─ ··· b3─RU

F forward down   f forward up
B backward down   b backward up
R all-reduce starts   U update
· bubble"""


def v_shaped() -> Schedule:
    """One micro-batch through four stages on two workers and back, its backward split."""
    stages = {0: (0, 3), 1: (1, 2)}
    orders = tuple(
        tuple(Op(Kind.FORWARD, 0, stage, 0) for stage in stages[worker])
        + tuple(Op(kind, 0, stage, 0) for stage in reversed(stages[worker]) for kind in (Kind.INPUT, Kind.WEIGHT))
        for worker in (0, 1)
    )
    return Schedule("v", ((0, 1, 1, 0),), orders)


def of(scheme: str, depth: int = 4, micro_batches: int = 8) -> Timeline:
    costs = Costs(forward_s=1, backward_s=2, transfer_s=0.25, allreduce_s=1, update_s=0.5)
    return simulate(build(scheme, depth, micro_batches), costs)


CHIMERA = simulate(build("chimera", depth=4, micro_batches=4), Costs(forward_s=1, backward_s=2))
TIMELINES = {**{scheme: of(scheme) for scheme in SCHEMES}, "v": simulate(v_shaped()), "plain": CHIMERA}


@pytest.fixture(params=TIMELINES)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return TIMELINES[request.param]


# ---- in characters


@pytest.mark.parametrize("width, drawing", [(80, GOLDEN), (200, None), (40, NARROW)])
def test_the_drawing_of_chimera(width: int, drawing: str | None) -> None:
    drawn = draw.text(CHIMERA, width)
    assert drawing is None or drawn == drawing
    assert max(map(len, draw.text(CHIMERA, width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_width_is_kept(timeline: Timeline, width: int) -> None:
    assert max(map(len, draw.text(timeline, width).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_op_can_be_read(timeline: Timeline, width: int) -> None:
    lane_of = look.lanes(timeline.schedule)
    drawn = "".join(line for line in draw.text(timeline, width).splitlines() if re.match(r"P\d+ ", line))
    for span in timeline.spans:
        if span.op.kind not in (Kind.REDUCE, Kind.UPDATE):
            assert look.label(span.op, lane_of[span.op.place]) in drawn


def test_both_directions_differ_without_colour() -> None:
    assert look.label(Op(Kind.FORWARD, 0, 0, 3), look.Lane(up=False, lap=0)) == "F3"
    assert look.label(Op(Kind.FORWARD, 1, 0, 3), look.Lane(up=True, lap=0)) == "f3"
    assert "f " not in draw.text(TIMELINES["1f1b"]).splitlines()[-1]


def test_split_backwards_and_laps_are_told_apart() -> None:
    drawn = draw.text(simulate(v_shaped()), 80)
    assert "F0" in drawn and "f0" in drawn and "I0" in drawn and "w0" in drawn and "input gradient up" in drawn
    interleaved = look.lanes(Schedule("interleaved", ((0, 1, 0, 1),), ((), ())))
    assert [lane.lap for lane in interleaved.values()] == [0, 0, 1, 1]
    assert not any(lane.up for lane in interleaved.values())


def test_pipelines_that_wrap_round_the_ring_keep_their_direction() -> None:
    lanes = look.lanes(build("chimera", depth=8, micro_batches=8, pairs=2))
    assert {pipe: {lanes[pipe, stage].up for stage in range(8)} for pipe in range(4)} == {
        0: {False}, 1: {True}, 2: {False}, 3: {True}
    }  # fmt: skip


def test_boxes_line_up_with_time() -> None:
    rows = [line[3:] for line in draw.text(CHIMERA, 80).splitlines() if line.startswith("P")]
    lane_of = look.lanes(CHIMERA.schedule)
    for span in CHIMERA.spans:
        if span.op.kind in (Kind.FORWARD, Kind.BACKWARD):
            assert rows[span.worker].index(look.label(span.op, lane_of[span.op.place])) == 4 * span.start_s


def test_colours_only_when_asked_for() -> None:
    plain, coloured = draw.text(CHIMERA, 80), draw.text(CHIMERA, 80, color=True)
    assert "\x1b" not in plain
    assert "\x1b[38;5;" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_ascii_has_only_ascii() -> None:
    assert draw.text(CHIMERA, 80, ascii=True).isascii()


def test_a_long_step_is_squeezed_not_endless() -> None:
    drawn = draw.text(of("1f1b", depth=8, micro_batches=400), 80)
    assert len(drawn.splitlines()) < 20
    assert "Squeezed" in drawn


def test_a_measured_step_begins_when_it_begins() -> None:
    later = Timeline(
        CHIMERA.schedule, tuple(Span(s.worker, s.op, s.start_s + 1000.5, s.end_s + 1000.5) for s in CHIMERA.spans)
    )
    assert draw.text(later, 80) == GOLDEN


def test_two_timelines_share_an_axis() -> None:
    drawn = draw.text({"planned": CHIMERA, "measured": TIMELINES["1f1b"]}, 80).splitlines()
    assert drawn[0].startswith("planned: chimera") and any(line.startswith("measured: 1f1b") for line in drawn)


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(InputError, match="takes no time"):
        draw.text(simulate(build("gpipe", 2, 2), Costs(0, 0)))


@pytest.mark.parametrize("costs", [Costs(0, 1), Costs(1e-9, 5e3), Costs([1, 2, 3, 4], [4, 3, 2, 1], transfer_s=7)])
def test_odd_costs_are_drawn(costs: Costs) -> None:
    odd = simulate(build("chimera", 4, 4), costs)
    assert draw.text(odd, 80)
    ET.fromstring(draw.svg(odd))


# ---- SVG, page and PNG

SVG = "{http://www.w3.org/2000/svg}"


def test_an_svg_has_each_op_once(timeline: Timeline) -> None:
    root = ET.fromstring(draw.svg(timeline))
    drawn = Counter(group.get("data-op") for group in root.iter(f"{SVG}g") if group.get("class") == "op")
    assert drawn == Counter(str(span.op) for span in timeline.spans)
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width + 0.01
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_an_svg_of_two_is_on_one_axis() -> None:
    both = draw.svg({"planned <1>": CHIMERA, "measured": TIMELINES["1f1b"]})
    root = ET.fromstring(both)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert sum(text.startswith(("planned <1>:", "measured:")) for text in texts) == 2
    made = geometry.picture({"a": CHIMERA, "b": TIMELINES["1f1b"]})
    longest = max(CHIMERA.makespan_s, TIMELINES["1f1b"].makespan_s)
    assert max(box.x + box.width for box in made.panels[0].boxes) == pytest.approx(16 / longest)


def test_bubbles_and_compute_fill_the_rows(timeline: Timeline) -> None:
    (panel,) = geometry.picture(timeline).panels
    begin, end = timeline.begin_s, timeline.begin_s + timeline.makespan_s
    for row, idle in zip(timeline.rows, timeline.idle_ratios, strict=True):
        bubble = sum(end_s - start_s for start_s, end_s in facts.gaps(row, begin, end))
        assert float(bubble) == pytest.approx(float(idle * timeline.makespan_s))
    assert all(0 <= bubble.x <= bubble.x + bubble.width <= 1 + 1e-9 for bubble in panel.bubbles)


def test_the_memory_curve_peaks_where_the_memory_model_says(timeline: Timeline) -> None:
    end = timeline.begin_s + timeline.makespan_s
    curves = [facts.memory(row, timeline.begin_s, end) for row in timeline.rows]
    assert [max(level.live for level in curve) for curve in curves] == peak_activations(timeline.schedule)


class Page(HTMLParser):
    """The open tags, the ops and the script of a page."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ops = 0
        self.addresses: list[str] = []
        self.feed(words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ops += "op" in (values.get("class") or "").split()
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_whole_and_loads_nothing(timeline: Timeline) -> None:
    words = draw.html(timeline)
    page = Page(words)
    assert not page.open and not page.addresses
    assert page.ops == len(timeline.spans)
    assert not re.search(r"https?://|@import|%[A-Z_]+%", words)
    (details,) = map(json.loads, re.findall(r"^const details = (.*);$", words, re.MULTILINE))
    assert Counter(detail["op"] for detail in details) == Counter(str(span.op) for span in timeline.spans)


def test_a_page_of_two_escapes_its_titles() -> None:
    words = draw.html({"</script><b>": CHIMERA, "measured": CHIMERA})
    assert "</script><b>" not in words
    assert Page(words).ops == 2 * len(CHIMERA.spans)


def test_waits_name_what_came_last() -> None:
    span_of = {span.op: span for span in CHIMERA.spans}
    for op, cause, idle_s in ("1F0", "0F0", 1), ("0F1", "0F0", 0), ("1F2@1", "0F2@1", 1), ("0F0", None, 0):
        wait = next(wait for waiting, wait in CHIMERA.waits.items() if str(waiting) == op)
        assert (wait.cause and str(wait.cause.op), wait.idle_s) == (cause, idle_s), op
    late = simulate(build("1f1b", 2, 1), Costs(1, 2, allreduce_s=7, groups=2))
    update = late.waits[Op(Kind.UPDATE, 0, 0, 0)]
    assert update == Wait(next(s for s in late.spans if s.op == Op(Kind.REDUCE, 0, 0, 0)), 7)
    assert {wait.cause for wait in late.waits.values()} <= {None, *late.spans} and len(span_of) == len(CHIMERA.waits)


def test_updates_wait_for_the_last_of_their_all_reduces(timeline: Timeline) -> None:
    end_of = {span.op: span.end_s for span in timeline.spans}
    for span in timeline.spans:
        cause, idle_s = timeline.waits[span.op]
        if span.op.kind is Kind.UPDATE and idle_s:
            assert cause and cause.end_s == max(end_of[need] for need in needs(timeline.schedule, span.op))


def test_a_png_is_written_or_its_remedy_named(tmp_path: Path) -> None:
    path = tmp_path / "chimera.png"
    if find_spec("matplotlib") is None:
        with pytest.raises(InputError, match=r"pip install 'chimera-mpi\[plot\]'"):
            draw.png(CHIMERA, path)
    else:
        draw.png(CHIMERA, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_colours_differ_in_grey_too() -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT):
        down, up = (look.colours(kind, look.Lane(up, 0)) for up in (False, True))
        assert look._luminance(down.fill) > look._luminance(up.fill) + 0.1
        for fill, ink in down, up:
            light, dark = sorted((look._luminance(fill), look._luminance(ink)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA


README = Path(__file__).parents[1] / "README.md"
PICTURES = re.findall(r"^chimera-mpi (.* --svg (docs/img/\S+))$", README.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("command", "path"), PICTURES, ids=[path for _, path in PICTURES])
def test_the_pictures_of_the_readme_come_from_the_commands_beside_them(
    command: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(PICTURES) == 3
    made = tmp_path / "made.svg"
    assert main(command.replace(path, str(made)).split()) == 0
    assert made.read_text(encoding="utf-8") == (README.parent / path).read_text(encoding="utf-8")


def test_a_step_without_end_is_not_drawn() -> None:
    endless = simulate(build("chimera", 4, 4), Costs(1e308, 1e308))
    for drawing in draw.text, draw.svg, draw.html, draw.chrome_trace:
        with pytest.raises(InputError, match="the step takes inf s"):
            drawing(endless)


# ---- trace


def test_a_trace_has_each_op_once_and_its_messages(timeline: Timeline) -> None:
    events = json.loads(draw.chrome_trace(timeline))["traceEvents"]
    ops = [event for event in events if event["ph"] == "X"]
    assert Counter(event["args"]["op"] for event in ops) == Counter(str(span.op) for span in timeline.spans)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in ops)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert all(starts[i]["ts"] <= ends[i]["ts"] and starts[i]["tid"] != ends[i]["tid"] for i in starts)
    crossing = [
        need
        for span in timeline.spans
        for need in needs(timeline.schedule, span.op)
        if need.stage != span.op.stage and timeline.schedule.worker(need) != span.worker
    ]
    assert len(starts) == len(crossing)
