"""What calibration tells: tables, a few lines, charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..draw.chart import Chart, Series
from ..draw.look import duration, size
from ..predict import Link
from ..predict.calibrated import Calibrated, Found, MessageReading, counted, told, typical_noise

if TYPE_CHECKING:
    from rich.table import Table


MOST_NOISE = 0.25  # of a machine that is to be predicted by


def tables(found: Found, made: Calibrated) -> Iterator[Table]:
    """What was measured, and what the machine makes of it."""
    layers = _table("one layer", "layer", "samples", "forward", "backward", "input", "weight", "GFLOP/s", "noise")
    for point, layer in zip(made.machine.compute.points, found.layers, strict=True):
        flops = point.samples * (point.forward_flops + point.backward_flops)
        rate = f"{flops / (point.forward_s + point.backward_s) / 1e9:.1f}" if flops else ""
        times = (layer.forward_s, layer.backward_s, layer.input_s, layer.weight_s)
        layers.add_row(layer.kind, str(layer.samples), *map(_time, times), rate, f"{100 * layer.noise:.0f} %")
    yield layers
    for where, readings, link in _message_sets(found, made):
        messages = _table(f"messages {where}", "way", "buffers", "size", "one way", "fit")
        fitting = counted(readings)
        for message in readings:
            fit = _time(link.seconds(message.size_bytes)) if message in fitting else ""
            messages.add_row(message.way, message.buffers, size(message.size_bytes), _time(message.seconds), fit)
        yield messages
    if found.sums:
        sums = _table("sums of gradients", "replicas", "nodes", "size", "time", "fit", "hidden")
        for of in found.sums:
            fit = _time(made.machine.allreduce.seconds(of.size_bytes, of.replicas, of.replicas // of.nodes))
            hidden = "" if of.hidden is None else f"{100 * of.hidden:.0f} %"
            sums.add_row(str(of.replicas), str(of.nodes), size(of.size_bytes), _time(of.seconds), fit, hidden)
        yield sums


def _table(title: str, *heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in ("layer", "way") else "right", no_wrap=True)
    return table


def summary(found: Found, made: Calibrated) -> Iterator[str]:
    """The machine in a few lines."""
    machine = made.machine
    yield f"slowdown    a pipeline takes {machine.compute.slowdown:.3f} of what its layers take by themselves"
    yield f"memory      {size(machine.memory_bytes)} a rank, {machine.workers_per_node} rank(s) a node"
    for name, link, table in (("node link", machine.node_link, "[node_link]"), ("link", machine.link, "[link]")):
        if link:
            rate = f"{size(1 / link.s_per_byte)}/s" if link.s_per_byte else "no limit to the rate"
            yield f"{name:12}{_time(link.latency_s)} and {rate}; {_how(made, table)}"
    busy = machine.overlap.allreduce_busy
    yield f"all-reduce  {_how(made, '[allreduce.node]' if machine.allreduce.node else '[allreduce.switch]')}"
    yield f"overlap     an all-reduce takes {100 * busy:.0f} % of its time from its worker"
    update = machine.optimizer
    yield (
        f"update      {_time(update.latency_s)} and {1e9 * update.s_per_parameter:.2f} ns a parameter; "
        f"{_how(made, '[optimizer]')}"
    )


def doubts(found: Found) -> Iterator[str]:
    """Why not to predict by it."""
    noise = typical_noise(found.layers)
    if noise > MOST_NOISE:
        yield f"noise       repeats lie {100 * noise:.0f} % apart typically: something else ran, so calibrate again"


def charts(found: Found, made: Calibrated) -> list[Chart]:
    """Points as measured, and guides as fitted. Layers lie on their points."""
    points = made.machine.compute.points
    drawn = []
    for name, what in ("forward_s", "forward"), ("backward_s", "backward"):
        series = [
            Series(kind, [(point.samples, getattr(point, name)) for point in points if point.kind == kind])
            for kind in dict.fromkeys(point.kind for point in points)
        ]
        drawn.append(Chart(f"{what} of a layer", "samples of the micro-batch", "seconds", series, log_y=True))
    for where, readings, link in _message_sets(found, made):
        sizes = sorted({message.size_bytes for message in readings})
        series = [Series("fit", [(size, link.seconds(size)) for size in sizes], guide=True)]
        for way, buffers in dict.fromkeys((message.way, message.buffers) for message in readings):
            same = [message for message in readings if (message.way, message.buffers) == (way, buffers)]
            series.append(Series(f"{way}, {buffers}", [(message.size_bytes, message.seconds) for message in same]))
        drawn.append(Chart(f"messages {where}, one way", "bytes", "seconds", series, log_y=True))
    for replicas, nodes in dict.fromkeys((of.replicas, of.nodes) for of in found.sums):
        same_sums = [(of.size_bytes, of.seconds) for of in found.sums if (of.replicas, of.nodes) == (replicas, nodes)]
        fit = [(size, made.machine.allreduce.seconds(size, replicas, replicas // nodes)) for size, _ in same_sums]
        series = [Series("fit", fit, guide=True), Series("measured", same_sums)]
        title = f"sums of gradients over {replicas} ranks on {nodes} node{'s' * (nodes > 1)}"
        drawn.append(Chart(title, "bytes", "seconds", series, log_y=True))
    return drawn


def _message_sets(found: Found, made: Calibrated) -> Iterator[tuple[str, Sequence[MessageReading], Link]]:
    if found.near and made.machine.node_link:
        yield "within a node", found.near, made.machine.node_link
    if found.far:
        yield "between nodes", found.far, made.machine.link


def _how(made: Calibrated, table: str) -> str:
    return told(made.fits[table]) if table in made.fits else made.notes.get(table, ("not measured",))[0]


def _time(seconds: float) -> str:
    """To three digits."""
    return duration(seconds, 3)
