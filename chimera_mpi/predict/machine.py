"""What a machine can do: how fast a worker computes, what messages and all-reduces cost, how much memory there is.

A machine is a TOML file (see `machines`), written by hand or by `chimera-mpi calibrate`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cached_property
from importlib.resources import files
from math import ceil, isclose, log2
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ..errors import InputError, shown, unwritable
from ..schedule import nearest
from .costs import Link
from .work import LayerWork

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def value(unit: str, low: float, high: float, default: Any = MISSING) -> Any:
    """A number of a machine file: what it is, for the file's comment, and from where to where it makes sense."""
    return field(default=default, metadata={"unit": unit, "low": low, "high": high})


def text(unit: str, default: Any = MISSING) -> Any:
    """A value that is no number."""
    return field(default=default, metadata={"unit": unit})


def part(default: Any = MISSING) -> Any:
    """A table of its own."""
    return field(default=default, metadata={"unit": "write a table of this name", "part": True})


@dataclass(frozen=True)
class Point:
    """A layer as measured: seconds of all `samples` of a micro-batch, FLOPs and bytes of one sample."""

    kind: str = text("of the layer: embedding, block, head, or what else the model has")
    samples: int = value("of the micro-batch", 1, 1e9)
    forward_s: float = value("seconds", 0, 1e6)
    backward_s: float = value("seconds", 0, 1e6)
    input_s: float | None = value("seconds of the input gradient alone", 0, 1e6, None)
    weight_s: float | None = value("seconds of the weight gradient alone", 0, 1e6, None)
    forward_flops: float = value("of one sample, multiply-adds count 2", 0, 1e21, 0.0)
    backward_flops: float = value("of one sample, both halves together, as measured", 0, 1e21, 0.0)
    output_bytes: float = value("of one sample: the measure of layers without FLOPs", 0, 1e18, 0.0)
    activation_bytes: float = value("of one sample: what is kept for the backward", 0, 1e18, 0.0)


SIZES = ("forward_flops", "backward_flops", "output_bytes", "activation_bytes")
MOST_FLOPS_PER_S = 1e17
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Compute:
    """How long layers take. `slowdown` is what a training step adds to layers that were measured alone."""

    points: tuple[Point, ...]
    slowdown: float = value("factor on all points: what a training step adds to layers measured alone", 0.01, 100, 1.0)
    flops_per_byte: float = value("FLOPs that take as long as a byte kept for the backward", 0, 1e6, 0.0)

    def __post_init__(self) -> None:
        if not self.points:
            raise InputError("compute.points is empty: give at least one [[compute.points]] with kind, samples, times")
        for at, point in enumerate(self.points):
            for name in SIZES:
                if 0 < (size := getattr(point, name)) < 1:
                    raise InputError(
                        f"compute.points[{at}].{name}={size:g} is less than one of them: give 0, or 1 or more"
                    )
            for way in "forward", "backward":
                flops, seconds = point.samples * getattr(point, f"{way}_flops"), getattr(point, f"{way}_s")
                if flops > MOST_FLOPS_PER_S * seconds:
                    rate = f"{flops / seconds:g} FLOP/s" if seconds else "FLOPs in no time"
                    raise InputError(
                        f"compute.points[{at}].{way}_s={seconds:g} makes {rate}, no worker has "
                        f"{MOST_FLOPS_PER_S:g}: check {way}_s, samples and {way}_flops"
                    )

    def seconds(self, name: str, layer: LayerWork, samples: float) -> float:
        """The time `name` of a layer on so many samples: on the curve through the points if it is what was measured,
        on the law that fits them if not."""
        kind = layer.kind if (name, layer.kind) in self._points else self._usual
        points = self._points[name, kind]
        same = kind == layer.kind and any(_alike(point, layer) for point, *_ in points)
        of_size = (self._curves if same else self._laws)[name, kind]
        return self.slowdown * of_size(samples * self._size(layer, name))

    def has(self, name: str, kind: str) -> bool:
        """Whether points of this kind, or of the usual one where there are none, have the column."""
        return (name, kind if kind in self._kinds else self._usual) in self._points

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(point.kind for point in self.points)

    @cached_property
    def _usual(self) -> str:
        """The kind whose rates stand for kinds that were not measured: the one with the most FLOPs."""
        return max(self.points, key=lambda point: (point.forward_flops, point.samples)).kind

    @cached_property
    def _points(self) -> dict[tuple[str, str], list[tuple[Point, float, float]]]:
        """By column and kind the points that have it, with size and seconds of the call."""
        found: dict[tuple[str, str], list[tuple[Point, float, float]]] = {}
        for point in self.points:
            for name in TIMES:
                if (seconds := getattr(point, name)) is not None:
                    call = (point, point.samples * self._size(point, name), seconds)
                    found.setdefault((name, point.kind), []).append(call)
        return found

    @cached_property
    def _curves(self) -> dict[tuple[str, str], Curve]:
        return {key: Curve.through(call[1:] for call in calls) for key, calls in self._points.items()}

    @cached_property
    def _laws(self) -> dict[tuple[str, str], Law]:
        return {key: Law.through(call[1:] for call in calls) for key, calls in self._points.items()}

    def _size(self, layer: Point | LayerWork, name: str) -> float:
        """What the time `name` of a layer goes with: FLOPs, and bytes of what is kept as so many FLOPs each; the
        output's bytes if it has none."""
        flops = layer.forward_flops if name == "forward_s" else layer.backward_flops
        weighed = self.flops_per_byte * (1 if name == "forward_s" else 2) * layer.activation_bytes
        return flops + weighed if flops else layer.output_bytes or 1.0


TIMES = ("forward_s", "backward_s", "input_s", "weight_s")


def _alike(point: Point, layer: LayerWork) -> bool:
    """Whether the point is of a layer of this size, within a hundredth, as far as it says."""
    sizes = ((point.forward_flops, layer.forward_flops), (point.output_bytes, layer.output_bytes))
    return all(not mine or isclose(mine, its, rel_tol=0.01) for mine, its in sizes)


class Law(NamedTuple):
    """What a call costs by itself, and a rate: the line that is nearest to points, in shares of their seconds."""

    call_s: float
    s_per_size: float

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Law:
        relative = [(1 / seconds, size / seconds) for size, seconds in points if seconds > 0]
        if not relative:
            return cls(0.0, 0.0)
        aa, ab, bb = (sum(r[i] * r[j] for r in relative) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = (sum(r[i] for r in relative) for i in range(2))
        determinant = aa * bb - ab * ab
        call_s = (a * bb - b * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
        if not 0 <= call_s * a <= len(relative):
            call_s = 0.0
        return cls(call_s, max((b - call_s * ab) / bb, 0.0))

    def __call__(self, size: float) -> float:
        return self.call_s + size * self.s_per_size


@dataclass(frozen=True)
class Curve:
    """Seconds over the size of a call: straight between points, towards zero as the first two go, on at the last rate.

    What is left at size zero is what a call costs by itself.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        sizes, seconds = zip(*sorted(dict(points).items()), strict=True)
        return cls(sizes, seconds)

    def __call__(self, size: float) -> float:
        at = bisect_right(self.sizes, size)
        if at == len(self.sizes) or at + len(self.sizes) == 1:
            return self.seconds[-1] * size / self.sizes[-1]
        at = max(at, 1)
        (left, right), (low, high) = self.sizes[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return max(low + (high - low) * (size - left) / (right - left), 0.0)


@dataclass(frozen=True)
class Level:
    """An all-reduce at one level of the machine: of the link that one worker has there while all others use theirs."""

    latency_s: float = value("seconds of one hop", 0, 100)
    s_per_byte: float = value("seconds per byte of one worker, while all workers of its node send", 0, 1)


@dataclass(frozen=True)
class AllReduce:
    """2 log2(r) latencies and 2 (r - 1) / r of the bytes over r replicas (Chimera, Section 3.4), level by level.

    Within a node first, each replica with its share of the sum; then the nodes of a switch; then the switches.
    """

    switch: Level
    node: Level | None = None
    above: Level | None = None
    nodes_per_switch: int = value("nodes of a switch or group, beyond which [allreduce.above] counts", 1, 1e9, 10**9)

    def seconds(self, size_bytes: float, replicas: int, per_node: int = 1, nodes_apart: float = 1) -> float:
        """Of `size_bytes` on each of `replicas`, of which `per_node` share a node; nodes that hold replicas of a
        stage are `nodes_apart` nodes from each other."""
        total, left = 0.0, replicas
        per_switch = max(int(self.nodes_per_switch / max(nodes_apart, 1)), 1)
        for level, most in (self.node, per_node), (self.switch, per_switch), (self.above, replicas):
            members = min(left, most)
            if members > 1:
                at = level or self.switch
                total += 2 * log2(members) * at.latency_s + 2 * (members - 1) / members * size_bytes * at.s_per_byte
                size_bytes, left = size_bytes / members, ceil(left / members)
        return total


@dataclass(frozen=True)
class Overlap:
    """What communication in the background takes from its worker."""

    allreduce_busy: float = value("share of an all-reduce's time that it takes from its worker", 0, 1, 0.0)
    allreduces_queue: bool = text("whether a worker's all-reduces take turns, as on one network port", True)
    sends_block: bool = text("whether a worker is busy while it sends", False)


@dataclass(frozen=True)
class Optimizer:
    """What the update of a stage costs."""

    latency_s: float = value("seconds of an update of nothing", 0, 100, 0.0)
    s_per_parameter: float = value("seconds", 0, 1, 0.0)
    version_s_per_parameter: float = value("seconds, to put a micro-batch's version of the weights in place", 0, 1, 0.0)


@dataclass(frozen=True)
class Machine:
    """A worker is what runs one MPI rank: a GPU, or some cores. Read from a file by `read_machine`."""

    name: str = text("what the machine is called")
    source: str = text("where its figures are from")
    memory_bytes: float = value("usable bytes of one worker", 1, 1e18)
    workers_per_node: int = value("ranks of a node", 1, 100_000)
    compute: Compute = part()
    link: Link = part()
    allreduce: AllReduce = part()
    node_link: Link | None = part(None)
    device: str = text("cpu or cuda: what a worker computes on, by which a layer keeps more or less", "cpu")
    overlap: Overlap = part(Overlap())
    optimizer: Optimizer = part(Optimizer())

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise InputError(f"machine.device={self.device!r} must be one of {', '.join(DEVICES)}")

    def forward_s(self, layer: LayerWork, samples: float) -> float:
        """Seconds of the forward of a micro-batch of `samples`.

        Measured where the layer's kind was measured; a layer of other size, or of a kind that was not, takes what
        as many FLOPs of the measured ones take.
        """
        return self._seconds("forward_s", layer, samples)

    def backward_s(self, layer: LayerWork, samples: float) -> float:
        """Both halves of the backward in one."""
        return self._seconds("backward_s", layer, samples)

    def input_s(self, layer: LayerWork, samples: float) -> float:
        """The gradient of the inputs alone: half the backward where it was not measured."""
        if self.compute.has("input_s", layer.kind):
            return self._seconds("input_s", layer, samples)
        return self.backward_s(layer, samples) / 2

    def weight_s(self, layer: LayerWork, samples: float) -> float:
        """The gradient of the weights alone: what the input's half leaves of the backward where it was not measured."""
        if self.compute.has("weight_s", layer.kind):
            return self._seconds("weight_s", layer, samples)
        return max(self.backward_s(layer, samples) - self.input_s(layer, samples), 0.0)

    def update_s(self, parameters: float) -> float:
        """The optimizer on so many parameters."""
        return self.optimizer.latency_s + parameters * self.optimizer.s_per_parameter

    def version_s(self, parameters: float) -> float:
        """Putting the version of so many weights in place that a micro-batch of a stream is to use."""
        return parameters * self.optimizer.version_s_per_parameter

    def allreduce_s(self, size_bytes: float, replicas: int, depth: int = 1, pipes: int = 1) -> float:
        """Of a stage's gradients over its `replicas`: `pipes` in each group of `depth` workers, groups side by side.

        Its cost does not grow with the number of replicas.
        """
        nodes_apart = depth / self.workers_per_node
        per_node = max(int(pipes / nodes_apart), 1)
        return self.allreduce.seconds(size_bytes, replicas, per_node, nodes_apart / pipes)

    def _seconds(self, name: str, layer: LayerWork, samples: float) -> float:
        return self.compute.seconds(name, layer, samples)


# ---- machine files


def machines() -> list[str]:
    """The machines that come with the package."""
    return sorted(Path(entry.name).stem for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def read_machine(name_or_path: str | Path) -> Machine:
    """A machine that comes with the package, or of a file. Raises InputError: one line with the key and its bounds."""
    name = str(name_or_path)
    if name in machines():
        return parse_machine((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)
    path = Path(name_or_path)
    if not isfile(path):  # which any words may name, also too many for a path
        raise InputError(
            f"{name!r} is neither a machine nor a file: {nearest(name, machines())}, or chimera-mpi calibrate"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None
    return parse_machine(text, name)


def write_machine(machine: Machine, path: str | Path) -> None:
    """As a TOML file with units in comments: `read_machine` gives the same machine again. Raises InputError."""
    try:
        Path(path).write_text(machine_text(machine), encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from None


def parse_machine(text: str, name: str) -> Machine:
    """The machine of a TOML text; errors begin with `name`."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of TOML, or of thousands of digits, or of lists within lists
        raise InputError(f"{name} is not a TOML file: {error}") from None
    head = tables.pop("machine", {})
    try:
        if not isinstance(head, dict):
            raise InputError("machine must be a table: write [machine] above its keys")
        return _parsed(Machine, {**head, **tables}, "")
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def machine_text(machine: Machine) -> str:
    """The TOML text of a machine file."""
    return "\n".join(_lines(machine, "machine")) + "\n"


def _folder() -> Any:
    return files("chimera_mpi") / "machines"


Table = TypeVar("Table")
_PARTS = {of.name for of in fields(Machine) if "part" in of.metadata}
_LINK: dict[str, dict[str, Any]] = {
    "latency_s": {"unit": "seconds of a message of no bytes", "low": 0, "high": 100},
    "s_per_byte": {"unit": "seconds per byte", "low": 0, "high": 1e-3},
}


def _parsed(kind: type[Table], table: Any, path: str) -> Table:
    """A dataclass from the table of its name in the file. Raises InputError for unknown, missing and absurd values."""
    if not isinstance(table, dict):
        raise InputError(f"{path} must be one table, not a {type(table).__name__}: write [{path}] above its keys")
    known = {of.name: of for of in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise InputError(f"unknown key {_key(path, key)}: {nearest(key, known)}")
    hints = get_type_hints(kind)
    found = {}
    for name, of in known.items():
        if name in table:
            found[name] = _entry(hints[name], of, table[name], _key(path, name))
        elif of.default is MISSING or kind is Link:  # a link that does not say what a byte takes is not free
            raise InputError(f"{_key(path, name)} is missing: {_unit(of)}")
    return kind(**found)


def _entry(hint: Any, of: Field[Any], given: Any, key: str) -> Any:
    kind: type = next((option for option in get_args(hint) if option is not type(None)), hint)
    if get_origin(hint) is tuple:
        if not isinstance(given, list):
            raise InputError(f"{key} must be a list of tables: write [[{key}]] above each")
        return tuple(_parsed(kind, each, f"{key}[{at}]") for at, each in enumerate(given))
    if is_dataclass(kind):
        return _parsed(kind, given, key)
    if kind in (int, float):
        return _number(kind, of, given, key)
    if not isinstance(given, kind):
        raise InputError(f"{key}={shown(given)} must be a {kind.__name__}: {_unit(of)}")
    return given


def _number(kind: type, of: Field[Any], given: Any, key: str) -> float:
    limits = of.metadata or _LINK[of.name]
    sound = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not sound or not limits["low"] <= given <= limits["high"] or kind(given) != given:
        whole = "a whole number " if kind is int else ""
        raise InputError(
            f"{key}={shown(given)} must be {whole}from {limits['low']:g} to {limits['high']:g}: {limits['unit']}"
        )
    return kind(given)


def _key(path: str, name: str) -> str:
    """The plain values of a machine stand in a table [machine], its parts in tables of their own."""
    return f"{path or 'machine'}.{name}" if path or name not in _PARTS else name


def _unit(of: Field[Any]) -> str:
    return of.metadata.get("unit") or _LINK.get(of.name, {"unit": "write a table of this name"})["unit"]


def _lines(table: Any, path: str, head: str = "[{}]") -> Iterator[str]:
    """The table, its plain values first, then the tables within it."""
    values = [(of, getattr(table, of.name)) for of in fields(table) if getattr(table, of.name) is not None]
    yield head.format(path)
    for of, given in values:
        if not is_dataclass(given) and not isinstance(given, tuple):
            yield f"{of.name} = {_literal(given)}  # {_unit(of)}"
    yield ""
    inner = "" if isinstance(table, Machine) else path
    for of, given in values:
        if isinstance(given, tuple):
            for each in given:
                yield from _lines(each, _key(inner, of.name), "[[{}]]")
        elif is_dataclass(given):
            yield from _lines(given, _key(inner, of.name))


def _literal(given: Any) -> str:
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str):
        escaped = given.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(given)
