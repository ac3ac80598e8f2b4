"""What `doctor` finds, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

State = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """`what` was found of `name`, in a line; where it is not ok, the `remedy` in another."""

    name: str
    state: State
    what: str
    remedy: str = ""


Found = Finding | Iterator[Finding] | None  # by a check


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def warning(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "warning", what, remedy)


def error(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "error", what, remedy)


def from_message(name: str, state: State, message: str) -> Finding:
    """A message of an InputError, which ends with its remedy."""
    what, _, remedy = message.rpartition(": ")
    return Finding(name, state, what, remedy) if what else Finding(name, state, message)


def each(found: Found) -> Iterator[Finding]:
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield from found


def worst(findings: Sequence[Finding]) -> State:
    states: tuple[State, ...] = ("ok", "warning", "error")
    return max((finding.state for finding in findings), key=states.index, default="ok")


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each, another for its remedy, and how many there are of each state."""
    width = max((len(finding.name) for finding in findings), default=0)
    told = []
    for name, state, what, remedy in findings:
        told.append(f"{state:9}{name:{width}}  {what}")
        if remedy:
            told.append(f"{'':9}{'':{width}}  -> {remedy}")
    counts = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warning", "error")}
    return [*told, f"{counts['ok']} ok, {counts['warning']} to look at, {counts['error']} wrong"]
