"""The parts of a self-contained page. What `filled` puts in stands between percent signs in capitals."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with its parts, each once: what a part says is not looked into."""
    return re.sub(r"%([A-Z_]+)%", lambda found: parts[found[1]], template)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
%STYLE%
</style>
</head>
<body>
%BODY%
<div id="tip" role="status"></div>
<script>
"use strict";
%SCRIPT%
</script>
</body>
</html>
"""

STYLE = """:root { color-scheme: light dark; --ink: #111; --paper: #fff; --faint: #555; --line: #ddd; --edge: #999;
  --button: #fafafa; --over: #eee; --memory: #9aa7b1; --back: #f4f4f4; --stripe: #c2c2c2; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --faint: #a5a9ad; --line: #3a3f45; --edge: #6b7178; --button: #24282d;
    --over: #31363c; --memory: #5d6a75; --back: #24282d; --stripe: #565c63; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 12px 14px 40px; font: 14px/1.45 Helvetica, Arial, 'DejaVu Sans', sans-serif;
  color: var(--ink); background: var(--paper); }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
svg { display: block; overflow: visible; font-size: 12px; fill: var(--ink); }
#tip { position: fixed; display: none; max-width: min(340px, 92vw); padding: 8px 11px; color: var(--ink);
  background: var(--paper); border: 1px solid var(--edge); border-radius: 6px; box-shadow: 0 3px 12px #0004;
  font-size: 13px; pointer-events: none; z-index: 2; }
#tip ul { margin: 2px 0 0; padding-left: 18px; }
#tip .last { font-weight: bold; }
@media print { #tip, .hint, #controls { display: none !important; } * { print-color-adjust: exact; } }"""

TIP = """const tip = document.getElementById("tip");

function line(parent, words, tag = "div", name = "") {
  const node = document.createElement(tag);
  node.textContent = words;
  node.className = name;
  parent.append(node);
  return node;
}

function show(event, fill) {
  tip.replaceChildren();
  fill(tip);
  tip.style.display = "block";
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const top = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = Math.max(top, 4) + "px";
}

const hide = () => { tip.style.display = "none"; };
addEventListener("keydown", event => { if (event.key === "Escape") hide(); });"""

# ---- a drawn schedule

DRAWING_STYLE = """#controls { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center; margin: 10px 0; }
#controls label { white-space: nowrap; cursor: pointer; }
#controls button { font: inherit; color: inherit; min-width: 34px; padding: 3px 10px; border: 1px solid var(--edge);
  border-radius: 5px; background: var(--button); cursor: pointer; }
#controls button:hover { background: var(--over); }
#legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 10px 0; font-size: 12.5px; }
#legend span { white-space: nowrap; }
#legend i { display: inline-block; min-width: 26px; padding: 0 5px; margin-right: 6px; text-align: center;
  font-style: normal; border-radius: 3px; }
.hatched { height: 1.2em; vertical-align: middle;
  background: repeating-linear-gradient(45deg, var(--back) 0 4px, var(--stripe) 4px 5.3px); }
#drawing { display: flex; border: 1px solid var(--line); border-radius: 6px; }
#scroll { overflow-x: auto; flex: 1; min-width: 0; padding-right: 22px; scrollbar-width: thin; }
#hatch rect { fill: var(--back); }
#hatch rect + rect { fill: var(--stripe); }
.small { font-size: 9px; fill: var(--faint); }
.time { font-size: 11px; }
#chart .title { font-size: 13px; font-weight: bold; fill: var(--ink); }
.grid { stroke: var(--line); }
.bubble { fill: url(#hatch); }
.memory { fill: var(--memory); shape-rendering: crispEdges; }
.op { stroke: var(--paper); stroke-width: 1; rx: 2px; cursor: pointer; }
.dense .op { stroke: none; }
.thin { transform: translateX(calc(var(--n) * 4px)); stroke-width: .5; rx: 0; }
.label { text-anchor: middle; font-size: 11.5px; pointer-events: none; }
.show-critical .op:not(.critical), .show-critical .op:not(.critical) + text { opacity: .25; }
.show-critical .critical { stroke: var(--ink); stroke-width: 2; }
.show-bubbles .bubble { fill: #cc0044; }
.show-bubbles .op, .show-bubbles .op + text { opacity: .35; }
.hide-memory .memory { visibility: hidden; }
.op.pointed { stroke: var(--ink); stroke-width: 2.5; opacity: 1 !important; }
.op.cause { stroke: var(--ink); stroke-width: 2.5; stroke-dasharray: 4 2; opacity: 1 !important; }
@media print { #scroll { overflow: visible; } }
%COLOURS%
@media screen and (prefers-color-scheme: dark) {
  .op.c111111 { stroke: var(--edge); }
  #legend i { outline: 1px solid var(--line); }
}"""

DRAWING = """%FIGURES%
<div id="controls">
  <span><button id="out" title="zoom out (-)">&minus;</button>
  <button id="in" title="zoom in (+)">+</button>
  <button id="fit" title="the whole step (0)">fit</button></span>
  <label><input type="checkbox" id="critical"> critical path</label>
  <label><input type="checkbox" id="bubbles"> bubbles</label>
  <label><input type="checkbox" id="memory" checked> live activations</label>
</div>
<div id="drawing">
<svg width="%GUTTER_WIDTH%" height="%HEIGHT%" aria-hidden="true">
%GUTTER%
</svg>
<div id="scroll">
<svg id="chart" width="%READABLE%" height="%HEIGHT%" role="img" aria-label="%TITLE%">
<defs>%HATCH%</defs>
%CHART%
</svg>
</div>
</div>
<div id="legend">
%LEGEND%
<span><i style="background:var(--memory)">&nbsp;</i>live activations</span>
</div>
<p class="hint">Point at an op to see what it waited for. Zoom with the buttons, with + and &minus;, or with Ctrl
and the wheel.</p>"""

DRAWING_SCRIPT = """{
const details = %DETAILS%;
const letter = %LETTER%, readable = %READABLE%, shortest = %SHORT%;
const find = id => document.getElementById(id);
const chart = find("chart"), scroll = find("scroll");
const boxes = [...chart.querySelectorAll(".op")], labels = [...chart.querySelectorAll(".label")];
const times = [...chart.querySelectorAll(".time")];
const index = new Map(boxes.map((box, i) => [box, i]));
const room = () => scroll.clientWidth - 24;
let width = Math.max(room(), Math.min(readable, 1.6 * room()));

function draw(across) {
  chart.setAttribute("width", across);
  for (const label of labels) {
    const fits = label.textContent.length * letter + 3 <= label.dataset.share * across;
    label.style.display = fits ? "" : "none";
  }
  const every = Math.ceil(58 / (times.length > 1 ? (times[1].x.baseVal[0].value - times[0].x.baseVal[0].value) : 58));
  times.forEach((label, i) => { label.style.display = i % every ? "none" : ""; });
  chart.classList.toggle("dense", shortest * across < 8);
}

function zoom(to, at) {
  // The time under `at`, pixels from the left edge, stays where it is.
  const time = (scroll.scrollLeft + at) / width;
  width = Math.min(Math.max(to, room()), Math.max(40 * readable, room()), 4e6);
  draw(width);
  scroll.scrollLeft = time * width - at;
}

let marked = [];
function point(box, event) {
  for (const other of marked) other.classList.remove("pointed", "cause");
  marked = [];
  if (!box) return hide();
  const i = index.get(box), detail = details[i];
  marked.push(box);
  box.classList.add("pointed");
  for (let j = 0; j < boxes.length; j++)
    if (detail.last && details[j].op === detail.last && details[j].panel === detail.panel) {
      boxes[j].classList.add("cause");
      marked.push(boxes[j]);
    }
  show(event, tip => {
    line(tip, detail.name, "b");
    line(tip, detail.where);
    line(tip, detail.when);
    if (detail.waits.length) {
      line(tip, "waits for");
      const list = line(tip, "", "ul");
      for (const [op, words] of detail.waits) line(list, words, "li", op === detail.last ? "last" : "");
    }
    line(tip, detail.idle || (detail.last ? "no time idle before it" : "its worker was busy until it started"));
  });
}

const pointed = event => { const box = event.target.closest(".op"); return index.has(box) ? box : null; };
chart.addEventListener("pointermove", event => point(pointed(event), event));
chart.addEventListener("click", event => point(pointed(event), event));
chart.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") point(null, event); });
find("in").onclick = () => zoom(width * 1.5, room() / 2);
find("out").onclick = () => zoom(width / 1.5, room() / 2);
find("fit").onclick = () => zoom(0, 0);
scroll.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(width * Math.exp(-event.deltaY / 300), event.clientX - scroll.getBoundingClientRect().left);
}, { passive: false });
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "+" || event.key === "=") zoom(width * 1.5, room() / 2);
  if (event.key === "-") zoom(width / 1.5, room() / 2);
  if (event.key === "0") zoom(0, 0);
  if (event.key === "Escape") point(null, event);
});
addEventListener("resize", () => zoom(width, 0));
addEventListener("beforeprint", () => draw(560));
addEventListener("afterprint", () => draw(width));
const toggle = (name, set, when) =>
  find(name).onchange = event => chart.classList.toggle(set, event.target.checked === when);
toggle("critical", "show-critical", true);
toggle("bubbles", "show-bubbles", true);
toggle("memory", "hide-memory", false);
zoom(width, 0);
}"""
