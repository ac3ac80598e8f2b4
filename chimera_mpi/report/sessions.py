"""The sessions of a run: what each did, in which layout, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from ..draw.look import clock
from ..draw.table import Table
from ..runlog import Run
from ..sampled import Start, starts_of
from .part import INCIDENTAL, LEARNING, SHAPE, differing, without


@dataclass(frozen=True, eq=False)
class Sessions:
    run: Run

    @cached_property
    def starts(self) -> list[Start]:
        return starts_of(self.run)

    def table(self) -> Table:
        hosts = {str(start.number): str(len(start.hosts)) for start in self.starts}
        heads = ["session", "started (UTC)", "took", "layout", "steps", "why it ended"]
        rows = [_row(start, layout) for start, layout in zip(self.starts, self._layouts, strict=True)]
        if set(hosts.values()) != {"1"}:
            heads.insert(3, "hosts")
            rows = [[*row[:3], hosts[row[0]], *row[3:]] for row in rows]
        return Table("", heads, rows)

    @cached_property
    def _layouts(self) -> list[str]:
        """Of each start the scheme and its shape, and what else the others had otherwise."""
        told = [without(start.keys, INCIDENTAL, LEARNING, SHAPE, frozenset({"scheme"})) for start in self.starts]
        names = differing(told)
        return [_layout(start, names) for start in self.starts]

    def figures(self) -> list[dict[str, Any]]:
        return [
            {
                "session": start.number,
                **{name: getattr(start.session, name) for name in ("start", "end", "reason", "host", "ranks")},
                "first_step": start.session.first_step,
                "steps": self.run.steps["step"][start.rows[[0, -1]]].tolist() if len(start.rows) else [],
                "layout": layout,
            }
            for start, layout in zip(self.starts, self._layouts, strict=True)
        ]


def deaths(run: Run) -> list[str]:
    """A line for each time that ranks died, and whether the others went on."""
    lines = []
    for session in run.sessions:
        of = session.attributes
        if "recovery_s" in of:
            went_on = f"{session.ranks} rank{'s' * (session.ranks > 1)} went on in {of['recovery_s']:.2f} s"
            lines.append(f"survived    {of['death']}; after {of['steps_done']} steps {went_on}")
        elif "death" in of:
            lines.append(f"ended       {of['death']}; after {of['steps_done']} steps nobody could go on")
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """`0-39, 80-99`; the numbers rise."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _row(start: Start, layout: str) -> list[str]:
    session, steps = start.session, start.run.steps["step"][start.rows]
    return [
        str(start.number),
        session.start[:16].replace("T", " "),
        _took(start),
        layout,
        ranges(steps.tolist()) or "none",
        session.reason or _without_reason(start),
    ]


def _took(start: Start) -> str:
    session = start.session
    if not session.end:
        return "-"
    return clock((datetime.fromisoformat(session.end) - datetime.fromisoformat(session.start)).total_seconds())


def _without_reason(start: Start) -> str:
    return "at work, or killed" if start.number == len(start.run.sessions) - 1 else "killed"


def _layout(start: Start, more: Sequence[str]) -> str:
    keys = start.keys
    if "scheme" not in keys:
        return f"{start.ranks} ranks"
    others = "".join(f" {key}={keys.get(key)}" for key in more)
    return f"{keys['scheme']} D={keys['depth']} W={start.width} N={keys['micro_batches']}{others}"
