"""A machine as its measurements show it, and how well it fits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import NamedTuple

from .costs import Link
from .fit import Fit, fit
from .machine import AllReduce, Compute, Level, Machine, Optimizer, Overlap, Point, machine_text
from .work import LayerWork

ASSUMED_LINK = Link(latency_s=1e-5, s_per_byte=2e-10)  # 10 us and 5 GB/s, until it is measured or edited
ASSUMED = "ASSUMED, and yours to edit: run on two nodes to measure it"
HOST, DEVICE = "host", "device"
DROWSY = "after a pause"  # as a message finds a rank that has waited for it


class LayerReading(NamedTuple):
    """Seconds of one layer of a kind, with micro-batches of `samples`; `noise` is how far apart the quarters of the
    repeats lie, as a share of the median."""

    kind: str
    samples: int
    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    noise: float


class UpdateReading(NamedTuple):
    """All that a step does with gradients once they are summed: mean, norm, clipping, optimizer, zeros."""

    parameters: int
    seconds: float


class MessageReading(NamedTuple):
    """Seconds that a message takes one way; `buffers` are those of the host or of the device."""

    way: str
    buffers: str
    size_bytes: int
    seconds: float


class SumReading(NamedTuple):
    """Seconds that the gradients of a stage take, `size_bytes` on each of `replicas` on `nodes` nodes: all groups of so
    many ranks sum at once. `hidden` is the share of them that goes on while the ranks compute."""

    replicas: int
    nodes: int
    size_bytes: int
    seconds: float
    hidden: float | None = None


@dataclass(frozen=True)
class Found:
    """What was measured; nothing of messages and sums where there was nobody to measure with. `moved` is the share of
    a large message that moves while its sender computes."""

    name: str
    source: str
    workers_per_node: int
    memory_bytes: float
    layers: tuple[LayerReading, ...]
    updates: tuple[UpdateReading, ...] = ()
    near: tuple[MessageReading, ...] = ()
    far: tuple[MessageReading, ...] = ()
    moved_near: float | None = None
    moved_far: float | None = None
    sums: tuple[SumReading, ...] = ()
    slowdown: float = 1.0  # of layers in a pipeline, over those by themselves
    device: str = "cpu"


@dataclass(frozen=True)
class Calibrated:
    """The machine, the fits that made it by table of its file, and notes for these tables."""

    machine: Machine
    fits: Mapping[str, Fit]
    notes: Mapping[str, tuple[str, ...]]

    @property
    def text(self) -> str:
        """The machine's file, with the notes as comments."""
        return "\n".join(_annotated(machine_text(self.machine), self.notes)) + "\n"


def calibrated(found: Found, layers: Sequence[LayerWork]) -> Calibrated:
    """`layers` are those of the model, among them one of each kind that was measured."""
    work = {layer.kind: layer for layer in reversed(layers)}
    points = tuple(_point(reading, work[reading.kind]) for reading in found.layers)
    links, link_notes = _links(found)
    sums, sum_notes = _sums(found)
    optimizer, updates = _optimizer(found.updates)
    machine = Machine(
        name=found.name,
        source=found.source,
        memory_bytes=_rounded(found.memory_bytes),
        workers_per_node=found.workers_per_node,
        device=found.device,
        compute=Compute(points, _rounded(found.slowdown)),
        link=links.far,
        node_link=links.near,
        allreduce=AllReduce(switch=sums.apart, node=sums.together),
        overlap=_overlap(found),
        optimizer=optimizer,
    )
    fits = {**links.fits, **sums.fits, **updates}
    notes = {"[compute]": _noise(found.layers), **link_notes, **sum_notes, **_overlap_notes(found)}
    for table, of in fits.items():
        notes[table] = (*notes.get(table, ()), told(of))
    return Calibrated(machine, fits, notes)


def told(of: Fit) -> str:
    """How good a fit is."""
    count = f"{len(of.errors)} point{'s' * (len(of.errors) != 1)}"
    return f"fitted to {count}: {100 * of.typical_error:.0f} % off typically, {100 * of.largest_error:.0f} % at most"


def fit_link(points: Sequence[MessageReading]) -> tuple[Link, Fit]:
    """Latency and seconds a byte of messages."""
    found = fit([(1.0, point.size_bytes) for point in points], [point.seconds for point in points])
    return Link(*map(_rounded, found.coefficients)), found


def fit_sums(points: Sequence[SumReading]) -> tuple[Level, Fit]:
    """What an all-reduce makes of latency and seconds a byte: 2 log2(r) of the one and 2 (r - 1) / r of the other over
    r replicas (Chimera, Section 3.4)."""
    rows = [(2 * log2(p.replicas), 2 * (p.replicas - 1) / p.replicas * p.size_bytes) for p in points]
    found = fit(rows, [point.seconds for point in points])
    return Level(*map(_rounded, found.coefficients)), found


def counted(readings: Sequence[MessageReading]) -> list[MessageReading]:
    """Those of the messages that a step is made of: from device buffers where there are any, to one who waits."""
    buffers = DEVICE if any(reading.buffers == DEVICE for reading in readings) else HOST
    return [reading for reading in readings if (reading.way, reading.buffers) == (DROWSY, buffers)]


def _point(reading: LayerReading, work: LayerWork) -> Point:
    return Point(
        kind=reading.kind,
        samples=reading.samples,
        forward_s=_rounded(reading.forward_s),
        backward_s=_rounded(reading.backward_s),
        input_s=_rounded(reading.input_s),
        weight_s=_rounded(reading.weight_s),
        forward_flops=work.forward_flops,
        backward_flops=work.backward_flops,
        output_bytes=work.output_bytes,
        activation_bytes=work.activation_bytes,
    )


class _Links(NamedTuple):
    far: Link
    near: Link | None
    fits: dict[str, Fit]


def _links(found: Found) -> tuple[_Links, dict[str, tuple[str, ...]]]:
    fits: dict[str, Fit] = {}
    near, far = None, None
    if found.near:
        near, fits["[node_link]"] = fit_link(counted(found.near))
    if found.far:
        far, fits["[link]"] = fit_link(counted(found.far))
    return _Links(far or _assumed(near), near, fits), {} if far else {"[link]": (ASSUMED,)}


def _assumed(near: Link | None) -> Link:
    """Between nodes, where only within one was measured: no faster than that."""
    if near is None:
        return ASSUMED_LINK
    return Link(max(near.latency_s, ASSUMED_LINK.latency_s), max(near.s_per_byte, ASSUMED_LINK.s_per_byte))


class _Sums(NamedTuple):
    apart: Level
    together: Level | None
    fits: dict[str, Fit]


def _sums(found: Found) -> tuple[_Sums, dict[str, tuple[str, ...]]]:
    fits: dict[str, Fit] = {}
    inside = [reading for reading in found.sums if reading.nodes == 1]
    across = [reading for reading in found.sums if reading.nodes == reading.replicas > 1]
    together, apart = None, None
    if inside:
        together, fits["[allreduce.node]"] = fit_sums(inside)
    if across:
        apart, fits["[allreduce.switch]"] = fit_sums(across)
    assumed = Level(ASSUMED_LINK.latency_s, ASSUMED_LINK.s_per_byte)
    return _Sums(apart or assumed, together, fits), {} if apart else {"[allreduce.switch]": (ASSUMED,)}


def _optimizer(updates: Sequence[UpdateReading]) -> tuple[Optimizer, dict[str, Fit]]:
    if not updates:
        return Optimizer(), {}
    found = fit([(1.0, update.parameters) for update in updates], [update.seconds for update in updates])
    return Optimizer(*map(_rounded, found.coefficients)), {"[optimizer]": found}


def _hidden(found: Found) -> float | None:
    """The share of a sum that goes on under compute: over as many nodes and ranks as there were."""
    shares = [(sum_.nodes, sum_.replicas, sum_.hidden) for sum_ in found.sums if sum_.hidden is not None]
    return max(shares)[2] if shares else None


def _overlap(found: Found) -> Overlap:
    hidden = _hidden(found)
    return Overlap(allreduce_busy=0.0 if hidden is None else _rounded(1 - hidden))


def _overlap_notes(found: Found) -> dict[str, tuple[str, ...]]:
    hidden = _hidden(found)
    notes = ["ASSUMED: all-reduces cost the worker nothing"] if hidden is None else []
    for moved, where in (found.moved_near, "within a node"), (found.moved_far, "between nodes"):
        if moved is not None:
            notes.append(f"{100 * moved:.0f} % of a large message {where} moved while its sender computed")
    return {"[overlap]": tuple(notes)}


def typical_noise(layers: Sequence[LayerReading]) -> float:
    return median(layer.noise for layer in layers)


def _noise(layers: Sequence[LayerReading]) -> tuple[str, ...]:
    return (
        f"points are medians of repeats whose quarters lie {100 * typical_noise(layers):.0f} % apart typically",
        "of one layer in a row of its kind, while all ranks of the node compute",
    )


def _rounded(number: float) -> float:
    """To four digits: more would not be true, and hard to read."""
    return float(f"{number:.4g}")


def _annotated(text: str, notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for line in text.splitlines():
        yield line
        yield from (f"# {note}" for note in notes.get(line, ()))
