"""A timeline as one self-contained page: zoom, point at an op, highlight the critical path and the bubbles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from ..schedule import COMPUTE, needs
from ..timeline import Span
from . import look
from .geometry import FOOT, GUTTER, LETTER, Box, Panel, Picture, picture
from .look import Titled, duration
from .page import DRAWING, DRAWING_SCRIPT, DRAWING_STYLE, PAGE, STYLE, TIP, filled
from .svg import HATCH, rgb


class Parts(NamedTuple):
    """What a page takes in: each text goes to its own place."""

    style: str
    body: str
    script: str


def html(timelines: Titled) -> str:
    """The text of a page that shows one timeline, or several by title on a common time axis.

    It loads nothing from elsewhere and works without a network. Under each worker runs the curve of the
    activations that it holds.
    """
    made = picture(look.titled(timelines), with_memory=True)
    return page(_title(made), [_drawing(made)])


def drawing(timelines: Titled) -> Parts:
    """The same drawing for a page that shows more. There may be one on a page."""
    return _drawing(picture(look.titled(timelines), with_memory=True))


def page(title: str, parts: Sequence[Parts]) -> str:
    """A self-contained page of these parts, one below the other. Their scripts find `show`, `hide` and `line`, which
    put words beside the pointer."""
    return filled(
        PAGE,
        {
            "TITLE": escape(title),
            "STYLE": "\n".join([STYLE, *(part.style for part in parts if part.style)]),
            "BODY": "\n".join(part.body for part in parts),
            "SCRIPT": "\n".join([TIP, *(part.script for part in parts if part.script)]),
        },
    )


def _title(made: Picture) -> str:
    return " · ".join(panel.title.words for panel in made.panels)


def _drawing(made: Picture) -> Parts:
    details = {id(box): detail for number, panel in enumerate(made.panels) for box, detail in _details(number, panel)}
    boxes = [box for panel in made.panels for box in panel.boxes]
    parts = {
        "TITLE": escape(_title(made)),
        "COLOURS": "\n".join(_classes(made)),
        "FIGURES": "\n".join(_figures(panel) for panel in made.panels),
        "LEGEND": "\n".join(_legend(made)),
        "GUTTER": "\n".join(_gutter(made)),
        "CHART": "\n".join(_chart(made)),
        "GUTTER_WIDTH": f"{GUTTER + 12}",
        "HEIGHT": f"{made.axis + FOOT:g}",
        "READABLE": f"{made.chart:.0f}",
        "SHORT": f"{made.short:.8f}",
        "LETTER": f"{LETTER}",
        "HATCH": HATCH,
        # No "</" may stand in a script.
        "DETAILS": json.dumps([details[id(box)] for box in boxes], separators=(",", ":")).replace("</", "<\\/"),
    }
    return Parts(*(filled(template, parts) for template in (DRAWING_STYLE, DRAWING, DRAWING_SCRIPT)))


def _percent(share: float) -> str:
    return f"{100 * share:.4f}".rstrip("0").rstrip(".") + "%"


def _class(box: Box) -> str:
    return "c" + rgb(box.colours.fill)[1:]


def _classes(made: Picture) -> Iterator[str]:
    colours = {_class(box): box.colours for panel in made.panels for box in panel.boxes}
    for name, (fill, ink) in colours.items():
        yield f".{name}{{fill:{rgb(fill)}}} .{name}+text{{fill:{rgb(ink)}}}"


def _figures(panel: Panel) -> str:
    timeline = panel.timeline
    passes = ", ".join(
        f"{count} {look.NAMES[kind]}{'s' if count > 1 else ''}"
        for kind in look.NAMES
        if kind in COMPUTE and (count := timeline.on_critical_path(kind))
    )
    return f"<p><b>{escape(panel.title.words)}</b><br>critical path: {passes}</p>"


def _legend(made: Picture) -> Iterator[str]:
    for swatch in made.swatches:
        looks = f"background:{rgb(swatch.colours.fill)};color:{rgb(swatch.colours.ink)}" if swatch.colours else ""
        mark = "" if swatch.colours else ' class="hatched"'
        yield f'<span><i{mark} style="{looks}">{escape(swatch.label)}</i>{escape(swatch.words)}</span>'


def _gutter(made: Picture) -> Iterator[str]:
    x = GUTTER + 6
    for panel in made.panels:
        for name, share, peak in zip(panel.workers, panel.shares, panel.peaks, strict=True):
            yield f'<text x="{x}" y="{name.y + 1:g}" text-anchor="end">{name.words}</text>'
            yield f'<text class="small" x="{x}" y="{share.y + 13:g}" text-anchor="end">{share.words}</text>'
            yield f'<text class="small" x="{x}" y="{peak.y + 3:g}" text-anchor="end">{peak.words}</text>'


def _chart(made: Picture) -> Iterator[str]:
    for tick in made.ticks:
        x = _percent(tick.x)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{made.panels[0].top:g}" y2="{made.axis + 4:g}"/>'
        anchor = "start" if tick.x == 0 else "end" if tick.x > 0.99 else "middle"
        words = f"{tick.words} {made.unit}"
        yield f'<text class="time" x="{x}" y="{made.axis + 17:g}" text-anchor="{anchor}">{words}</text>'
    for panel in made.panels:
        if len(made.panels) > 1:
            yield f'<text class="title" x="0" y="{panel.title.y + 2:g}">{escape(panel.title.words)}</text>'
        for bubble in panel.bubbles:
            place = f'x="{_percent(bubble.x)}" width="{_percent(bubble.width)}" y="{bubble.y:g}"'
            yield f'<rect class="bubble" {place} height="{bubble.height:g}"/>'
        for step in panel.curve:
            place = f'x="{_percent(step.x)}" width="{_percent(step.width)}" y="{step.y:.1f}"'
            yield f'<rect class="memory" {place} height="{step.height:.1f}"><title>{step.live} live</title></rect>'
        critical = {span.op for span in panel.timeline.critical_path}
        for box in panel.boxes:
            yield _box(box, box.span.op in critical)


def _box(box: Box, critical: bool) -> str:
    classes = f"op {_class(box)}" + (" critical" if critical else "")
    place = f'x="{_percent(box.x)}" y="{box.y:g}" height="{box.height:g}"'
    if box.thin:
        return f'<rect class="{classes} thin" {place} width="3.5" style="--n:{box.thin - 1}"/>'
    middle = f'x="{_percent(box.x + box.width / 2)}" y="{box.y + box.height / 2 + 4:g}"'
    words = f'<text class="label" {middle} data-share="{box.width:.6f}">{escape(box.label)}</text>'
    return f'<rect class="{classes}" {place} width="{_percent(box.width)}"/>{words}'


def _details(number: int, panel: Panel) -> Iterator[tuple[Box, dict[str, Any]]]:
    """What the page says of each op that is pointed at."""
    timeline = panel.timeline
    lane_of = look.lanes(timeline.schedule)
    ends = {span.op: span for span in timeline.spans}
    for box in panel.boxes:
        span, wait = box.span, timeline.waits[box.span.op]
        kind, pipe, stage, index = span.op
        needed = [need for need in needs(timeline.schedule, span.op) if need in ends]
        what = f"{'micro-batch' if kind in COMPUTE else 'update'} {index}"
        yield (
            box,
            {
                "name": f"{look.NAMES[kind]}, {what}",
                "where": f"worker P{span.worker}, stage {stage}, pipeline {pipe} "
                f"({'up' if lane_of[span.op.place].up else 'down'})",
                "when": f"{duration(span.start_s)} to {duration(span.end_s)} ({duration(span.end_s - span.start_s)})",
                "waits": [_need(ends[need]) for need in needed[:6]],
                "idle": f"{duration(wait.idle_s)} idle before it" if wait.idle_s else "",
                "panel": number,
                "op": str(span.op),
                "last": str(wait.cause.op) if wait.cause and wait.cause.op in needed else "",
            },
        )


def _need(span: Span) -> list[str]:
    name = f"{look.NAMES[span.op.kind]} {span.op.index} of P{span.worker}"
    return [str(span.op), f"{name}, ended at {duration(span.end_s)}"]
