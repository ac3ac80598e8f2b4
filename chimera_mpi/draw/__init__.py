"""Draw timelines. A forecast and a measured step are the same type, so they are drawn by the same code.

Each function takes one `Timeline`, or several by title, which then share a time axis:
`svg({"planned": forecast, "measured": run})`.
"""

from .html import drawing as html_drawing
from .html import html
from .png import png
from .svg import svg
from .text import text
from .trace import SampledStep, chrome_trace, run_trace

__all__ = ["SampledStep", "chrome_trace", "html", "html_drawing", "png", "run_trace", "svg", "text"]
