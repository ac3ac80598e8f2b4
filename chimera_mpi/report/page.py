"""A report as one self-contained page: lines, charts, tables, drawn steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .. import draw
from ..draw.chart import Drawn
from ..draw.chart_svg import chart_svg
from ..draw.html import Parts, page
from ..draw.table import Table, table_html
from ..timeline import Timeline

_ACROSS, _DOWN = 300, 190  # pixels of a chart's axes: what a small screen has room for

_STYLE = """body { max-width: 1800px; margin: 0 auto; }
h1 { font-size: 19px; margin: 4px 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 22px 0 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0 0 12px; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
#charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 8px 20px; }
#charts svg { width: 100%; height: auto; max-width: 560px; }
figure { margin: 0 0 18px; }
figcaption { font-weight: bold; margin-bottom: 4px; }
.table { overflow-x: auto; scrollbar-width: thin; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: pre; }
td:last-child:not(.number) { white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
#tables { display: flex; flex-wrap: wrap; gap: 0 44px; align-items: flex-start; }
#tables figure { min-width: 0; max-width: 100%; }
th { font-weight: 600; border-bottom: 1px solid var(--edge); }
td:first-child, th:first-child { padding-left: 2px; }
.number { text-align: right; }
.note { color: var(--faint); font-size: 12.5px; margin-top: 4px; max-width: 52em; }
.paper { fill: none; }
.axis { stroke: var(--edge); }
.bar ~ .error { stroke: var(--ink); }
#charts circle:hover, #charts .near { stroke: var(--ink); stroke-width: 2.5; }
@media screen and (prefers-color-scheme: dark) {
  .s0 { color: #56b4e9; } .s1 { color: #e8833a; } .s2 { color: #2fc79a; } .s3 { color: #d58bb5; }
  .s4 { color: #cfc545; } .s5 { color: #e8e8e8; }
}
@media print {
  body { padding: 0; font-size: 11px; }
  #charts { grid-template-columns: 1fr 1fr; }
  #charts svg, figure, #drawing { break-inside: avoid; }
  h2 { break-after: avoid; }
  .table { overflow: visible; }
  table { font-size: 9px; }
  th, td { padding: 2px 5px; white-space: pre-wrap; }
}"""

_SCRIPT = """{
// A curve tells its nearest point, a bar itself. The words are those of the titles, which would come late and twice.
const charts = document.getElementById("charts");
for (const title of charts.querySelectorAll("title")) {
  title.parentNode.dataset.told = title.textContent;
  title.remove();
}
let near = null;
function mark(element, event) {
  near?.classList.remove("near");
  near = element;
  if (!element) return hide();
  element.classList.add("near");
  show(event, tip => line(tip, element.dataset.told));
}
function nearest(svg, event) {
  let best = null, least = 26 ** 2;
  for (const circle of svg.querySelectorAll("circle")) {
    const box = circle.getBoundingClientRect();
    const away = (box.x + box.width / 2 - event.clientX) ** 2 + (box.y + box.height / 2 - event.clientY) ** 2;
    if (away < least) { best = circle; least = away; }
  }
  return best;
}
const point = event => {
  const svg = event.target.closest("svg"), bar = event.target.closest(".bar");
  mark(svg ? bar ?? nearest(svg, event) : null, event);
};
charts.addEventListener("pointermove", point);
charts.addEventListener("click", point);
charts.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") mark(null, event); });
}"""


def report_page(
    title: str,
    lines: Sequence[str],
    charts: Sequence[Drawn],
    tables: Sequence[Table],
    timelines: Mapping[str, Timeline],
    heading: str,
) -> str:
    """The text of a page that loads nothing from elsewhere. `lines` are as the terminal has them: a name, two spaces
    or more, and what there is to say; `heading` is that of the drawn steps."""
    parts = [Parts(_STYLE, f"<h1>{escape(title)}</h1>\n{_lines(lines)}", "")]
    if charts:
        drawn = "\n".join(chart_svg([chart], _ACROSS, _DOWN) for chart in charts)
        parts.append(Parts("", f'<div id="charts">\n{drawn}\n</div>', _SCRIPT))
    parts.append(
        Parts("", "\n".join(["<h2>Figures</h2>", '<div id="tables">', *map(table_html, tables), "</div>"]), "")
    )
    if timelines:
        drawing = draw.html_drawing(timelines)
        parts.append(drawing._replace(body=f"<h2>{escape(heading)}</h2>\n{drawing.body}"))
    return page(title, parts)


def _lines(lines: Sequence[str]) -> str:
    named: list[tuple[str, str]] = []
    loose: list[tuple[str, str]] = []
    for line in lines:
        name, gap, rest = line.partition("  ")
        (named if gap else loose).append((name, rest.strip()))
    told = "".join(f"<p>{escape(name)}</p>" for name, _ in loose)
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(rest)}</dd>" for name, rest in named)
    return f"{told}<dl>{pairs}</dl>" if pairs else told
