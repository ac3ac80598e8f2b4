"""How long a step takes at least: known from the placement of the stages, before there is an order of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ..schedule import Kind, Op, Place, Schedule
from .costs import Costs


@dataclass(frozen=True)
class Post:
    """What one worker has to do for one micro-batch of each pipeline, and what frames its step; in seconds.

    Before its first op come `head_s`, after its last gradient `tail_s`. `busy_s` are its own ops, `forward_s` those
    that all its all-reduces come after. For `held_s`, summed over its stages, it keeps an activation. After its last
    gradient there is at least one all-reduce and one update, `close_s`; after its last forward all of its all-reduces
    and an update, `sum_s`. All-reduces take `reduce_s` of its time, updates `update_s`.
    """

    head_s: float
    tail_s: float
    busy_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    held_s: tuple[float, ...]
    close_s: float
    sum_s: float
    reduce_s: float
    update_s: float

    def least_s(self, shares: Sequence[int], live: int) -> float:
        """Of a step with `shares` micro-batches of the pipelines, at most `live` of whose activations the worker keeps.

        It has its ops to do; and, as no more than `live` activations fit, all those that it keeps one after the other
        last at least their sum over `live` (Little's law). This is where messages on the way slow a pipeline down.
        """
        busy_s, forward_s, held_s = (_shared(shares, s) for s in (self.busy_s, self.forward_s, self.held_s))
        after_s = max(self.tail_s, self.close_s)
        return self.head_s + max(
            busy_s + max(after_s, self.reduce_s + self.update_s),
            held_s / live + max(after_s, self.update_s),
            forward_s + self.sum_s,
        )

    def steady_s(self, shares: Sequence[int], live: int, updates: int) -> float:
        """Of a step of a stream, whose ramps belong to the steps before and after, with so many updates."""
        busy_s, held_s = (_shared(shares, s) for s in (self.busy_s, self.held_s))
        return max(busy_s + updates * (self.reduce_s + self.update_s), held_s / live)


def posts(schedule: Schedule, costs: Costs) -> tuple[Post, ...]:
    """Of each worker, in any schedule with the pipelines of this one."""
    costs = costs.on(schedule)
    ways = [_Way(schedule, costs, pipe) for pipe in range(len(schedule.pipes))]
    places: list[list[Place]] = [[] for _ in range(schedule.depth)]
    for pipe, row in enumerate(schedule.pipes):
        for stage, worker in enumerate(row):
            places[worker].append((pipe, stage))
    return tuple(_post(costs, ways, held) for held in places)


def least_step_s(of: Sequence[Post], micro_batches: int, live: int) -> float:
    """Seconds below which no flush of `micro_batches` is, whatever the order of its ops."""
    shares = _shares(of, micro_batches)
    return max(post.least_s(shares, live) for post in of)


def least_steady_step_s(of: Sequence[Post], micro_batches: int, live: int, updates: int) -> float:
    """The same of a step of a stream."""
    shares = _shares(of, micro_batches)
    return max(post.steady_s(shares, live, updates) for post in of)


def _shared(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return sum(map(mul, shares, seconds))


def _shares(of: Sequence[Post], micro_batches: int) -> list[int]:
    """What every pipeline has at least."""
    pipes = len(of[0].busy_s)
    return [micro_batches // pipes] * pipes


class _Way:
    """The way of a micro-batch down a pipeline and back, in seconds by stage, were all workers free.

    `before` a forward can begin, `after` the gradient for the stage before is made, and how long an activation is
    `kept`: from the start of its forward to the end of its backward.
    """

    def __init__(self, schedule: Schedule, costs: Costs, pipe: int):
        row, stages = schedule.pipes[pipe], range(schedule.stages)
        split = bool(schedule.split)
        gradient = Kind.INPUT if split else Kind.BACKWARD
        forth = [costs.seconds(Op(Kind.FORWARD, pipe, s, 0)) for s in stages]
        back = [costs.seconds(Op(gradient, pipe, s, 0)) for s in stages]
        weights = [costs.seconds(Op(Kind.WEIGHT, pipe, s, 0)) if split else 0 for s in stages]
        down = [_message(costs, Op(Kind.FORWARD, pipe, s, 0), row[s], row[s + 1]) for s in stages[:-1]]
        up = [_message(costs, Op(gradient, pipe, s, 0), row[s], row[s - 1]) for s in stages[1:]]
        self.split, self.forth, self.busy = split, forth, [sum(ops) for ops in zip(forth, back, weights, strict=True)]
        self.before = [0, *accumulate(f + d for f, d in zip(forth, down, strict=False))]
        self.after = [0, *accumulate(b + u for b, u in zip(back, up, strict=False))]
        beyond = [f + b + d + u for f, b, d, u in zip(forth[1:], back[1:], down, up, strict=True)]
        rest = [*reversed(list(accumulate(reversed(beyond)))), 0]
        self.kept = [f + r + b + w for f, r, b, w in zip(forth, rest, back, weights, strict=True)]


def _message(costs: Costs, op: Op, source: int, target: int) -> float:
    return costs.transfer(op, source, target) if source != target else 0


def _post(costs: Costs, ways: list[_Way], places: list[Place]) -> Post:
    starts = [Op(Kind.REDUCE, pipe, stage, 0) for pipe, stage in places]
    updates = [costs.seconds(op._replace(kind=Kind.UPDATE)) for op in starts]
    reduces = [costs.allreduce(op) for op in starts]
    busy_s, forward_s, held_s = ([0.0] * len(ways) for _ in range(3))
    for pipe, stage in places:
        busy_s[pipe] += ways[pipe].busy[stage]
        forward_s[pipe] += ways[pipe].forth[stage]
        held_s[pipe] += ways[pipe].kept[stage]
    return Post(
        head_s=min(ways[pipe].before[stage] for pipe, stage in places),
        # A weight gradient may come last of all, after which nothing has to.
        tail_s=min(0 if ways[pipe].split else ways[pipe].after[stage] for pipe, stage in places),
        busy_s=tuple(busy_s),
        forward_s=tuple(forward_s),
        held_s=tuple(held_s),
        close_s=min(reduces) + min(updates),
        sum_s=(sum if costs.allreduces_queue else max)(reduces) + min(updates),
        reduce_s=sum(map(costs.seconds, starts)),
        update_s=sum(updates),
    )
