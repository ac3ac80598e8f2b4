"""A timeline as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .geometry import GUTTER, Box, Picture, fits, picture
from .look import Colours, Titled, duration

FONT = "font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\""
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f4"/><rect width="1.3" height="6" fill="#c2c2c2"/></pattern>'
)


def svg(timelines: Titled) -> str:
    """Draw one timeline, or several by title one above the other on a common time axis.

    Rows are workers, boxes are ops with their micro-batch, what is hatched is bubble; its share stands at
    the right of each row. Each box has a `<title>`, which browsers show when one points at it.
    """
    made = picture(timelines)
    size = f'width="{made.width:g}" height="{made.height:g}" viewBox="0 0 {made.width:g} {made.height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} font-size="12" fill="#111">',
        f"<defs>{HATCH}</defs>",
        f'<rect width="{made.width:g}" height="{made.height:g}" fill="#fff"/>',
        *_axis(made),
        *_panels(made),
        *_legend(made),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rgb(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def describe(box: Box) -> str:
    """An op in a line, for who points at it."""
    kind, pipe, stage, index = box.span.op
    start, end = duration(box.span.start_s), duration(box.span.end_s)
    return f"{box.label}: {kind.name.lower()} {index}, stage {stage}, pipeline {pipe}, {start} to {end}"


def _axis(made: Picture) -> Iterator[str]:
    top, bottom = made.panels[0].top, made.axis
    for tick in made.ticks:
        x = made.x(tick.x)
        yield f'<path d="M{x:.2f} {top:g}V{bottom + 4:g}" stroke="#d9d9d9"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 17:g}" text-anchor="middle" font-size="11">{tick.words}</text>'
    yield f'<path d="M{GUTTER} {bottom:g}H{made.x(1):g}" stroke="#666"/>'
    yield f'<text x="{made.x(1) + 22:g}" y="{bottom + 17:g}" font-size="11">time ({made.unit})</text>'


def _panels(made: Picture) -> Iterator[str]:
    for panel in made.panels:
        title = f'<text x="{GUTTER}" y="{panel.title.y + 2:g}" font-weight="bold" font-size="13">'
        yield f"{title}{escape(panel.title.words)}</text>"
        share_x = made.x(1) + 22
        yield f'<text x="{share_x:g}" y="{panel.title.y + 2:g}" font-size="11" fill="#555">bubble</text>'
        for name, share in zip(panel.workers, panel.shares, strict=True):
            yield f'<text x="{GUTTER - 8}" y="{name.y + 4:g}" text-anchor="end">{name.words}</text>'
            yield f'<text x="{share_x:g}" y="{share.y + 4:g}" font-size="11" fill="#555">{share.words}</text>'
        for bubble in panel.bubbles:
            yield (
                f'<rect class="bubble" x="{made.x(bubble.x):.2f}" y="{bubble.y:g}" '
                f'width="{bubble.width * made.chart:.2f}" height="{bubble.height:g}" fill="url(#hatch)"/>'
            )
        for box in panel.boxes:
            yield _box(made, box)


def _box(made: Picture, box: Box) -> str:
    x, width = made.span_of(box)
    rect = _rect(x, box.y, width, box.height, box.colours, box.thin > 0)
    words = ""
    if not box.thin and fits(box.label, width):
        words = _label(x + width / 2, box.y + box.height / 2, box.colours, box.label)
    return f'<g class="op" data-op="{box.span.op}"><title>{escape(describe(box))}</title>{rect}{words}</g>'


def _rect(x: float, y: float, width: float, height: float, colours: Colours, thin: bool = False) -> str:
    edge = 'stroke="#fff" stroke-width="0.6"' if thin or width < 3 else 'stroke="#fff" rx="2"'
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{rgb(colours.fill)}" {edge}/>'


def _label(x: float, y: float, colours: Colours, words: str) -> str:
    return (
        f'<text x="{x:.2f}" y="{y + 4:g}" text-anchor="middle" font-size="11.5" '
        f'fill="{rgb(colours.ink)}">{escape(words)}</text>'
    )


def _legend(made: Picture) -> Iterator[str]:
    for swatch in made.swatches:
        if swatch.colours:
            yield _rect(swatch.x, swatch.y, 24, 14, swatch.colours)
            yield _label(swatch.x + 12, swatch.y + 7, swatch.colours, swatch.label)
        else:
            yield f'<rect x="{swatch.x:g}" y="{swatch.y:g}" width="24" height="14" fill="url(#hatch)"/>'
        yield f'<text x="{swatch.x + 30:g}" y="{swatch.y + 11:g}" font-size="11.5">{escape(swatch.words)}</text>'
