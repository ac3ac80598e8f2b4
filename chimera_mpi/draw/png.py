"""A timeline as a PNG, by matplotlib: the extra `plot`."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from typing import Any

from ..errors import InputError, unwritable
from .geometry import GUTTER, Box, Picture, fits, picture
from .look import Colours, Titled

Axes = Any  # of matplotlib, which may not be installed

_POINTS = 72 / 96  # a pixel of the geometry is 1/96 inch, matplotlib's text is in points


def png(timelines: Titled, path: str | PathLike[str], scale: float = 2) -> None:
    """Write the picture that `svg` draws, at `scale` pixels for each of its own.

    Raises InputError where matplotlib is missing or the file cannot be written.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        raise InputError("a PNG needs matplotlib: pip install 'chimera-mpi[plot]', or write an SVG instead") from None
    made = picture(timelines)
    # No image may be wider than 2^16 pixels.
    dpi = min(96 * scale, 96 * 60_000 / max(made.width, made.height))
    figure = figures.Figure(figsize=(made.width / 96, made.height / 96), dpi=dpi)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, made.width), ylim=(made.height, 0))
    axes.axis("off")
    _axis(axes, made)
    _panels(axes, made)
    _legend(axes, made)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise unwritable(path, error) from None


def _write(axes: Axes, x: float, y: float, words: str, size: float = 12, **looks: Any) -> None:
    axes.text(x, y, words, fontsize=size * _POINTS, va="center", parse_math=False, **looks)


def _rect(axes: Axes, x: float, y: float, width: float, height: float, colours: Colours | None) -> None:
    """No colours are a bubble: hatched."""
    if colours is None:
        looks: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#c2c2c2", "hatch": "/////", "linewidth": 0}
    else:
        looks = {"facecolor": _share(colours.fill), "edgecolor": "white", "linewidth": 0.6}
    axes.add_patch(import_module("matplotlib.patches").Rectangle((x, y), width, height, **looks))


def _share(colour: tuple[int, int, int]) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour)


def _axis(axes: Axes, made: Picture) -> None:
    for tick in made.ticks:
        x = made.x(tick.x)
        axes.plot([x, x], [made.panels[0].top, made.axis + 4], color="#d9d9d9", linewidth=0.7, zorder=0)
        _write(axes, x, made.axis + 13, tick.words, 11, ha="center")
    axes.plot([GUTTER, made.x(1)], [made.axis, made.axis], color="#666666", linewidth=0.7)
    _write(axes, made.x(1) + 22, made.axis + 13, f"time ({made.unit})", 11)


def _panels(axes: Axes, made: Picture) -> None:
    for panel in made.panels:
        _write(axes, GUTTER, panel.title.y - 2, panel.title.words, 13, weight="bold")
        _write(axes, made.x(1) + 22, panel.title.y - 2, "bubble", 11, color="#555555")
        for name, share in zip(panel.workers, panel.shares, strict=True):
            _write(axes, GUTTER - 8, name.y, name.words, ha="right")
            _write(axes, made.x(1) + 22, share.y, share.words, 11, color="#555555")
        for bubble in panel.bubbles:
            _rect(axes, made.x(bubble.x), bubble.y, bubble.width * made.chart, bubble.height, None)
        for box in panel.boxes:
            _box(axes, made, box)


def _box(axes: Axes, made: Picture, box: Box) -> None:
    x, width = made.span_of(box)
    _rect(axes, x, box.y, width, box.height, box.colours)
    if not box.thin and fits(box.label, width):
        middle = x + width / 2, box.y + box.height / 2
        _write(axes, *middle, box.label, 11.5, ha="center", color=_share(box.colours.ink))


def _legend(axes: Axes, made: Picture) -> None:
    for swatch in made.swatches:
        _rect(axes, swatch.x, swatch.y, 24, 14, swatch.colours)
        if swatch.colours:
            ink = _share(swatch.colours.ink)
            _write(axes, swatch.x + 12, swatch.y + 7, swatch.label, 11.5, ha="center", color=ink)
        _write(axes, swatch.x + 30, swatch.y + 7, swatch.words, 11.5)
