"""Is a schedule sound? Each op once, every need met, no deadlock however the messages travel."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product

from .collectives import check_collectives
from .collector import paused_collector
from .list_scheduler import peaks
from .ops import COMPUTE, HOLDS, Kind, Op, Place, Schedule, ScheduleError, fault, walk
from .schemes import LIVE, SCHEMES, STREAMS, options_of, used_versions


@paused_collector()
def check(schedule: Schedule) -> Schedule:
    """Return `schedule` if it can be carried out, else raise `ScheduleError` with the worker and op at fault.

    An all-reduce may block: workers start those they share in one order, and in orders that fit with all
    else. A send never does: a worker goes on at once and waits for its sends at the flush, which the
    walk has shown every receiver to reach, so synchronous sends change nothing. In a flush no op comes
    before an update that it should follow. What a scheme of the registry says it keeps in memory, it keeps.
    """
    _check_placement(schedule)
    _check_each_op_once(schedule)
    walk(schedule)
    check_collectives(schedule)
    _check_versions(schedule)
    _check_memory(schedule)
    return schedule


def _check_placement(schedule: Schedule) -> None:
    if len({len(pipe) for pipe in schedule.pipes}) != 1:
        raise ScheduleError(f"{schedule.scheme}: pipelines of {[len(pipe) for pipe in schedule.pipes]} stages")
    holders = {(p, s): holder for p, pipe in enumerate(schedule.pipes) for s, holder in enumerate(pipe)}
    for place, worker in holders.items():
        if not 0 <= worker < schedule.depth:
            raise ScheduleError(f"{schedule.scheme}: worker {worker} holds {place}, of {schedule.depth} workers")
    for worker, order in enumerate(schedule.orders):
        if all(holders.get((pipe, stage)) == worker for _, pipe, stage, _ in order):
            continue
        for at, op in enumerate(order):
            holder = holders.get(op.place)
            if holder != worker:
                why = "there is no such stage" if holder is None else f"worker {holder} holds that stage"
                raise fault(schedule, worker, at, why)


_ANOTHER = "is it another scheme?"


def check_scheme(schedule: Schedule) -> None:
    """Raises ScheduleError if the stages do not lie where the scheme that it is named after has them."""
    scheme, depth = schedule.scheme, schedule.depth
    if scheme not in SCHEMES:
        return
    chunks = schedule.stages // depth
    shape = {"pairs": len(schedule.pipes) // 2, "chunks": chunks, "waves": chunks // 2}
    options = {option: max(1, shape[option]) for option in options_of(scheme) if option in shape}
    pipes = SCHEMES[scheme](depth, 1, **options).pipes
    if sorted(schedule.pipes) == sorted(pipes):
        return
    if (len(schedule.pipes), schedule.stages) != (len(pipes), len(pipes[0])):
        has, theirs = (f"{len(rows)} x {len(rows[0])}" for rows in (schedule.pipes, pipes))
        raise ScheduleError(f"{has} pipelines x stages on {depth} workers, where {scheme} has {theirs}: {_ANOTHER}")
    for (pipe, stage), worker in zip(product(range(len(pipes)), range(schedule.stages)), chain(*pipes), strict=True):
        if schedule.pipes[pipe][stage] != worker:
            where = f"worker {schedule.pipes[pipe][stage]} holds stage {stage} of pipeline {pipe}"
            raise ScheduleError(f"{where}, in {scheme} worker {worker}: {_ANOTHER}")


def _check_each_op_once(schedule: Schedule) -> None:
    done = {op for order in schedule.orders for op in order}
    if len(done) < sum(map(len, schedule.orders)):
        raise _doubled(schedule)
    expected = expected_ops(schedule)
    if done == expected and len(schedule.pipe_of) == 1 + max(schedule.pipe_of, default=-1):
        return
    if (missing := missing_op(schedule)) is not None:
        raise _missing(schedule, missing)
    if extra := done - expected:
        op = Op(*min(extra))
        worker = schedule.worker(op)
        raise fault(schedule, worker, schedule.orders[worker].index(op), _why_not(schedule, op))


def _why_not(schedule: Schedule, op: Op) -> str:
    """Why nothing asks for `op`."""
    pipe = schedule.pipe_of.get(op.index)
    if op.kind in COMPUTE and pipe is not None and pipe != op.pipe:
        return f"micro-batch {op.index} goes down pipeline {pipe} as well"
    if op.kind is Kind.BACKWARD and op[1:] in schedule.split:
        return "its backward is split too, into I and W"
    return "nothing asks for it"


def missing_op(schedule: Schedule) -> Op | None:
    """The first op that the others call for and no worker does."""
    for index in range(len(schedule.pipe_of)):
        if index not in schedule.pipe_of:
            return Op(Kind.FORWARD, 0, 0, index)
    missing = expected_ops(schedule).difference(*schedule.orders)
    return min(map(Op._make, missing), key=lambda op: (op.index, op.kind, op.place), default=None)


def _doubled(schedule: Schedule) -> ScheduleError:
    for worker, order in enumerate(schedule.orders):
        first: dict[Op, int] = {}
        for at, op in enumerate(order):
            if first.setdefault(op, at) != at:
                return fault(schedule, worker, at, f"it has done {op} before, {at - first[op]} ops earlier")
    raise AssertionError("no op is doubled")


def _missing(schedule: Schedule, op: Op) -> ScheduleError:
    """Show the gap behind the last earlier op of the same kind and place."""
    worker = schedule.worker(op)
    order = schedule.orders[worker]
    alike = (at + 1 for at, other in enumerate(order) if other[:3] == op[:3] and other.index < op.index)
    if not order:
        return ScheduleError(f"{schedule.scheme}: worker {worker} never does {op}: it does nothing at all")
    return fault(
        schedule,
        worker,
        min(max(alike, default=0), len(order) - 1),
        f"hereabouts {op} is missing, worker {worker} never does it",
    )


def expected_ops(schedule: Schedule) -> set[tuple[Kind, int, int, int]]:
    """All ops that the micro-batches and updates of `schedule` call for."""
    trips = {(pipe, stage, index) for index, pipe in schedule.pipe_of.items() for stage in range(schedule.stages)}
    updates = set(product(range(len(schedule.pipes)), range(schedule.stages), range(schedule.updates)))
    split = trips & schedule.split
    whole = trips - split
    kinds = {
        Kind.FORWARD: trips,
        Kind.BACKWARD: whole,
        Kind.INPUT: split,
        Kind.WEIGHT: split,
        Kind.REDUCE: updates,
        Kind.UPDATE: updates,
    }
    return {(kind, *place) for kind, places in kinds.items() for place in places}


def _check_versions(schedule: Schedule) -> None:
    """In a flush, each forward uses the weights that all updates before its own have made; in a stream, those of
    its rule, which must be there and no older than the scheme states."""
    if schedule.updates < 2 or schedule.scheme not in SCHEMES:
        return
    done = _updates_before(schedule)
    for forward, version in used_versions(schedule).items():
        first, last = _allowed_versions(schedule, forward, done[forward])
        if not first <= version <= last:
            worker = schedule.worker(forward)
            at = schedule.orders[worker].index(forward)
            wanted = f"{first}" if first == last else f"{first} or more"
            made = f"it comes after {done[forward]} updates of its stage"
            raise fault(schedule, worker, at, f"{made}, not after {wanted}")


def _allowed_versions(schedule: Schedule, forward: Op, done: int) -> tuple[int, int]:
    """The oldest and the newest weights that `forward` may use when its stage has had `done` updates."""
    due = schedule.update_of(forward.index)
    if schedule.scheme not in STREAMS:
        return due, due
    stale = 1 if schedule.scheme == "pipedream_2bw" else schedule.stages - 1 - forward.stage
    return max(due - stale, 0), done


def _updates_before(schedule: Schedule) -> dict[Op, int]:
    """For each forward, how many updates its worker has made to the stage by then."""
    before: dict[Op, int] = {}
    for order in schedule.orders:
        made: Counter[Place] = Counter()
        for op in order:
            made[op.place] += op.kind is Kind.UPDATE
            if op.kind is Kind.FORWARD:
                before[op] = made[op.place]
    return before


def _check_memory(schedule: Schedule) -> None:
    """Live activations within what the scheme states."""
    if schedule.scheme not in LIVE:
        return
    limit = LIVE[schedule.scheme](schedule)
    for worker, peak in enumerate(peaks(schedule)):
        if peak > limit:
            live, at = 0, -1
            while live <= limit:
                at += 1
                op = schedule.orders[worker][at]
                live += HOLDS[op.kind]
            raise fault(schedule, worker, at, f"it is the {live}. activation held at once, the scheme allows {limit}")
