"""Show where in a schedule a fault is."""

from __future__ import annotations

from .ops import Schedule, ScheduleError

_AROUND = 3  # ops shown to either side of a fault, and workers


def fault(schedule: Schedule, worker: int, at: int, what: str) -> ScheduleError:
    """An error that says what is wrong with the op at place `at` of a worker's order, and shows it.

    The first line names worker, op and its neighbours; the lines after it are the rows round it, the fault
    under an arrow.
    """
    order = schedule.orders[worker]
    before = f"after {order[at - 1]}" if at else "first"
    after = f"before {order[at + 1]}" if at + 1 < len(order) else "last"
    op = order[at] if at < len(order) else "the end"
    line = f"{schedule.scheme}: worker {worker}, {op} ({before}, {after}): {what}"
    return ScheduleError(f"{line}\n{rows_around(schedule, {worker: at})}")


def rows_around(schedule: Schedule, faults: dict[int, int]) -> str:
    """The rows of the workers at fault and of those next to them, with an arrow above each fault."""
    shown = {near for worker in faults for near in (worker - 1, worker, worker + 1) if 0 <= near < schedule.depth}
    middle = min(faults.values())
    lines = []
    for worker in sorted(shown):
        at = faults.get(worker)
        first = max((middle if at is None else at) - _AROUND, 0)
        words = [str(op) for op in schedule.orders[worker][first : first + 2 * _AROUND + 1]]
        head = f"  worker {worker}: {'... ' if first else ''}"
        if at is not None:
            lines.append(" " * (len(head) + len(" ".join([*words[: at - first], ""]))) + "v")
        lines.append(head + " ".join(words) + (" ..." if first + len(words) < len(schedule.orders[worker]) else ""))
    return "\n".join(lines)
