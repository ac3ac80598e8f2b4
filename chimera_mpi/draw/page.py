"""The page that `html` fills in: everything between percent signs in capitals."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; padding: 12px 14px 40px; font: 14px/1.45 Helvetica, Arial, 'DejaVu Sans', sans-serif; color: #111;
  background: #fff; }
p { margin: 0 0 8px; }
#controls { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center; margin: 10px 0; }
#controls label { white-space: nowrap; cursor: pointer; }
#controls button { font: inherit; min-width: 34px; padding: 3px 10px; border: 1px solid #999; border-radius: 5px;
  background: #fafafa; cursor: pointer; }
#controls button:hover { background: #eee; }
#legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 10px 0; font-size: 12.5px; }
#legend span { white-space: nowrap; }
#legend i { display: inline-block; min-width: 26px; padding: 0 5px; margin-right: 6px; text-align: center;
  font-style: normal; border-radius: 3px; }
.hatched { height: 1.2em; vertical-align: middle;
  background: repeating-linear-gradient(45deg, #f4f4f4 0 4px, #c2c2c2 4px 5.3px); }
#drawing { display: flex; border: 1px solid #ddd; border-radius: 6px; }
#scroll { overflow-x: auto; flex: 1; min-width: 0; padding-right: 22px; scrollbar-width: thin; }
svg { display: block; overflow: visible; font-size: 12px; }
.small { font-size: 9px; fill: #555; }
.time { font-size: 11px; }
.title { font-size: 13px; font-weight: bold; }
.grid { stroke: #ddd; }
.bubble { fill: url(#hatch); }
.memory { fill: #9aa7b1; shape-rendering: crispEdges; }
.op { stroke: #fff; stroke-width: 1; rx: 2px; cursor: pointer; }
.dense .op { stroke: none; }
.thin { transform: translateX(calc(var(--n) * 4px)); stroke-width: .5; rx: 0; }
.label { text-anchor: middle; font-size: 11.5px; pointer-events: none; }
.show-critical .op:not(.critical), .show-critical .op:not(.critical) + text { opacity: .25; }
.show-critical .critical { stroke: #000; stroke-width: 2; }
.show-bubbles .bubble { fill: #cc0044; }
.show-bubbles .op, .show-bubbles .op + text { opacity: .35; }
.hide-memory .memory { visibility: hidden; }
.op.pointed { stroke: #000; stroke-width: 2.5; opacity: 1 !important; }
.op.cause { stroke: #000; stroke-width: 2.5; stroke-dasharray: 4 2; opacity: 1 !important; }
#tip { position: fixed; display: none; max-width: min(340px, 92vw); padding: 8px 11px; background: #fff;
  border: 1px solid #555; border-radius: 6px; box-shadow: 0 3px 12px #0004; font-size: 13px; pointer-events: none;
  z-index: 2; }
#tip ul { margin: 2px 0 0; padding-left: 18px; }
#tip .last { font-weight: bold; }
%COLOURS%
</style>
</head>
<body>
%FIGURES%
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
<span><i style="background:#9aa7b1">&nbsp;</i>live activations</span>
</div>
<p class="hint">Point at an op to see what it waited for. Zoom with the buttons, with + and &minus;, or with Ctrl
and the wheel.</p>
<div id="tip" role="status"></div>
<script>
"use strict";
const details = %DETAILS%;
const letter = %LETTER%, readable = %READABLE%, shortest = %SHORT%;
const find = id => document.getElementById(id);
const chart = find("chart"), scroll = find("scroll"), tip = find("tip");
const boxes = [...chart.querySelectorAll(".op")], labels = [...chart.querySelectorAll(".label")];
const times = [...chart.querySelectorAll(".time")];
const index = new Map(boxes.map((box, i) => [box, i]));
const room = () => scroll.clientWidth - 24;
let width = Math.max(room(), Math.min(readable, 1.6 * room()));

function zoom(to, at) {
  // The time under `at`, pixels from the left edge, stays where it is.
  const time = (scroll.scrollLeft + at) / width;
  width = Math.min(Math.max(to, room()), Math.max(40 * readable, room()), 4e6);
  chart.setAttribute("width", width);
  for (const label of labels) {
    const fits = label.textContent.length * letter + 3 <= label.dataset.share * width;
    label.style.display = fits ? "" : "none";
  }
  const every = Math.ceil(58 / (times.length > 1 ? (times[1].x.baseVal[0].value - times[0].x.baseVal[0].value) : 58));
  times.forEach((label, i) => { label.style.display = i % every ? "none" : ""; });
  chart.classList.toggle("dense", shortest * width < 8);
  scroll.scrollLeft = time * width - at;
}

function line(parent, words, tag = "div", name = "") {
  const node = document.createElement(tag);
  node.textContent = words;
  node.className = name;
  parent.append(node);
  return node;
}

let marked = [];
function point(box, event) {
  for (const other of marked) other.classList.remove("pointed", "cause");
  marked = [];
  tip.style.display = box ? "block" : "none";
  if (!box) return;
  const i = index.get(box), detail = details[i];
  marked.push(box);
  box.classList.add("pointed");
  for (let j = 0; j < boxes.length; j++)
    if (detail.last && details[j].op === detail.last && details[j].panel === detail.panel) {
      boxes[j].classList.add("cause");
      marked.push(boxes[j]);
    }
  tip.replaceChildren();
  line(tip, detail.name, "b");
  line(tip, detail.where);
  line(tip, detail.when);
  if (detail.waits.length) {
    line(tip, "waits for");
    const list = line(tip, "", "ul");
    for (const [op, words] of detail.waits) line(list, words, "li", op === detail.last ? "last" : "");
  }
  line(tip, detail.idle || (detail.last ? "no time idle before it" : "its worker was busy until it started"));
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const top = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = Math.max(top, 4) + "px";
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
const toggle = (name, set, when) =>
  find(name).onchange = event => chart.classList.toggle(set, event.target.checked === when);
toggle("critical", "show-critical", true);
toggle("bubbles", "show-bubbles", true);
toggle("memory", "hide-memory", false);
zoom(width, 0);
</script>
</body>
</html>
"""
