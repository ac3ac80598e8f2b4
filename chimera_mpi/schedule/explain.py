"""Show where in a schedule a fault is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_AROUND = 3  # ops shown to either side of a fault


def rows_around(orders: Sequence[Sequence[object]], faults: Mapping[int, int]) -> str:
    """The rows of the workers at fault, each at a place in its order, and of those next to them.

    An arrow points to each fault.
    """
    shown = {near for worker in faults for near in (worker - 1, worker, worker + 1) if 0 <= near < len(orders)}
    return "\n".join(_row(worker, orders[worker], faults.get(worker), min(faults.values())) for worker in sorted(shown))


def _row(worker: int, order: Sequence[object], fault: int | None, middle: int) -> str:
    first = max((middle if fault is None else fault) - _AROUND, 0)
    last = first + 2 * _AROUND + 1
    head = [f"  worker {worker}:", *["..."] * (first > 0)]
    row = " ".join([*head, *map(str, order[first:last]), *["..."] * (last < len(order))])
    if fault is None:
        return row
    return " " * len(" ".join([*head, *map(str, order[first:fault]), ""])) + "v\n" + row
