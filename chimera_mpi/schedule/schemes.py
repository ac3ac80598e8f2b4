"""The schemes. Each says when a micro-batch enters its pipeline and when it turns round; one loop weaves.

A micro-batch that enters at slot `enter` is at stage `s` in slot `enter + s`. Its backward is at the
last stage in slot `turn` and at stage `s` in slot `turn + stages - 1 - s`. Slots put the ops of a worker
in order; they are not times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import NamedTuple

from .ops import Kind, Op, Schedule, ScheduleError
from .sync import with_updates


class Trip(NamedTuple):
    """A micro-batch's way down its pipeline and back, in slots."""

    pipe: int
    enter: float
    turn: float


def weave(scheme: str, pipes: list[list[int]], trips: Iterable[Trip]) -> Schedule:
    """Lay the trips of micro-batches 0, 1, ... over the workers and read off each one's ops in slot order."""
    stages, depth = len(pipes[0]), 1 + max(pipes[0])
    slots: list[dict[float, Op]] = [{} for _ in range(depth)]
    for index, (pipe, enter, turn) in enumerate(trips):
        for stage, worker in enumerate(pipes[pipe]):
            for kind, slot in (Kind.FORWARD, enter + stage), (Kind.BACKWARD, turn + stages - 1 - stage):
                op = Op(kind, pipe, stage, index)
                if (other := slots[worker].setdefault(slot, op)) is not op:
                    raise ScheduleError(f"{scheme}: {other} and {op} both want slot {slot} of worker {worker}")
    return Schedule(scheme, tuple(map(tuple, pipes)), tuple(tuple(row[s] for s in sorted(row)) for row in slots))


def down(depth: int, first: int = 0) -> list[int]:
    """Stage after stage on worker after worker, from `first` on, round the ring."""
    return [(first + stage) % depth for stage in range(depth)]


def naive(depth: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: model parallelism without a pipeline."""
    return weave("naive", [down(depth)], (Trip(0, 2 * depth * n, 2 * depth * n + depth) for n in range(micro_batches)))


def gpipe(depth: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019)."""
    flip = depth + micro_batches - 1
    return weave("gpipe", [down(depth)], (Trip(0, n, flip + n) for n in range(micro_batches)))


def one_f_one_b(depth: int, micro_batches: int) -> Schedule:
    """Enter every other slot, so that forwards and backwards take turns (DAPPLE, Fan et al. 2021)."""
    return weave("1f1b", [down(depth)], (Trip(0, 2 * n, 2 * n + depth) for n in range(micro_batches)))


def chimera(depth: int, micro_batches: int, pairs: int = 1) -> Schedule:
    """1F1B in both directions at once (Li and Hoefler 2021, Sections 3.1 and 3.5).

    The down pipelines keep to slots of one parity and the up pipelines to the other, so the two never
    meet. A unit is `depth` micro-batches, shared evenly by the pipelines; units follow without a gap.

        slot  0  1  2  3  4  5  6  7  8  9
        P0   F0 F1  . F2 B2 F3 B3 B0  . B1
        P1    . F0 F2 F1 F3 B2 B0 B3 B1  .
        P2    . F2 F0 F3 F1 B0 B2 B1 B3  .
        P3   F2 F3  . F0 B0 F1 B1 B2  . B3
    """
    if depth % 2:
        raise ScheduleError(f"chimera needs an even depth, not {depth}: try {_neighbours(depth)}")
    if pairs < 1 or depth % (2 * pairs):
        fitting = ", ".join(str(f) for f in range(1, depth // 2 + 1) if depth % (2 * f) == 0)
        raise ScheduleError(f"chimera with depth {depth} cannot have {pairs} pairs of pipelines: try pairs = {fitting}")
    firsts = (pair * depth // pairs for pair in range(pairs))
    pipes = [pipe[::way] for pipe in (down(depth, first) for first in firsts) for way in (1, -1)]

    def trips() -> Iterator[Trip]:
        for start in range(0, micro_batches, depth):
            for pipe, share in enumerate(even_shares(min(depth, micro_batches - start), len(pipes))):
                for j in range(share):
                    enter = 2 * start + 2 * j
                    yield Trip(pipe, enter, enter + depth)

    return weave("chimera", pipes, trips())


def even_shares(whole: int, parts: int) -> list[int]:
    """`whole` in `parts` shares that differ by one at most, the larger first."""
    return [whole // parts + (i < whole % parts) for i in range(parts)]


SCHEMES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "chimera": chimera,
}
ALIASES = {"dapple": "1f1b"}


def build(scheme: str, depth: int, micro_batches: int, *, sync: str = "eager_opt", **options: object) -> Schedule:
    """The schedule of one step of `scheme`: `depth` workers, `micro_batches` micro-batches.

    `sync` says when each stage's all-reduce starts (see `with_updates`); `options` are the scheme's own.
    Raises `ScheduleError`, a ValueError, with a remedy in it.
    """
    name = ALIASES.get(scheme, scheme)
    if name not in SCHEMES:
        raise ScheduleError(f"unknown scheme '{scheme}': {nearest(scheme, [*SCHEMES, *ALIASES])}")
    for what, value in ("depth", depth), ("micro_batches", micro_batches):
        if value < 1:
            raise ScheduleError(f"{what} must be at least 1, not {value}: try {what}=4")
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ScheduleError(f"{name} has no option '{option}': its options are {', '.join(['sync', *known])}")
    return with_updates(SCHEMES[name](depth, micro_batches, **options), sync)


def options_of(scheme: str) -> list[str]:
    """The options of a scheme of the registry, besides `sync`."""
    return list(inspect.signature(SCHEMES[scheme]).parameters)[2:]


def nearest(word: str, words: Iterable[str]) -> str:
    """A remedy for a misspelt word: the nearest one, or all of them."""
    words = list(words)
    close = get_close_matches(word, words, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(words)}"


def _neighbours(depth: int) -> str:
    return f"depth={depth + 1}" if depth < 2 else f"depth={depth - 1} or depth={depth + 1}"
