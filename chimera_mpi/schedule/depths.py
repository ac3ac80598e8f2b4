"""Which depths a number of ranks and a scheme can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import log
from typing import TypeVar

from ..errors import InputError
from .ops import ScheduleError

T = TypeVar("T")

TRIED = 6  # depths, those next to the one that was asked for: what is made of each may take a second


class UnfitDepth(ScheduleError):
    """A depth that a scheme, a model or a number of ranks cannot have. `remedy` knows of that one alone."""

    def __init__(self, fault: str, remedy: str = ""):
        super().__init__(f"{fault}: {remedy}" if remedy else fault)
        self.fault = fault


def width_of(ranks: int, depth: int) -> int:
    """How many pipeline groups of `depth` workers `ranks` ranks make. Raises UnfitDepth."""
    if ranks % depth:
        fitting = ", ".join(map(str, _divisors(ranks)))
        raise UnfitDepth(f"depth {depth} does not divide the {ranks} MPI ranks", f"try depth = {fitting}")
    return ranks // depth


def fit_depth(depth: int, ranks: int, spares: int, make: Callable[[int, int], T]) -> T:
    """What `make(depth, workers)` makes of the ranks that are not spare; it raises InputError where it cannot.

    Raises InputError, of a depth that does not fit with those, or those numbers of ranks, that `make` would take.
    """
    if spares >= ranks:
        raise InputError(f"spares={spares} leaves none of {ranks} ranks to work: start more, or spare fewer")
    try:
        return make(depth, ranks - spares)
    except UnfitDepth as refused:
        raise InputError(f"{refused.fault}: {_remedy(depth, ranks - spares, spares, make)}") from None


def _remedy(depth: int, ranks: int, spares: int, make: Callable[[int, int], object]) -> str:
    near = sorted(_divisors(ranks), key=lambda other: abs(log(other / max(depth, 1))))[:TRIED]
    if fitting := [str(other) for other in sorted(near) if _makes(make, other, ranks)]:
        return f"try depth = {', '.join(fitting)}"
    beside = f" beside spares={spares}" if spares else ""
    no_depth = f"with all else as asked no depth fits {ranks} rank{'s' * (ranks > 1)}{beside}"
    for other in (depth, depth - 1, depth + 1, 2):  # of two neighbours one is even; few layers can have two stages
        if enough := [str(number + spares) for number in _multiples(other, ranks) if _makes(make, other, number)]:
            with_it = "" if other == depth else f" with depth={other}"
            return f"{no_depth}, start {' or '.join(enough)} ranks{with_it}"
    return f"{no_depth}, take another scheme"


def _makes(make: Callable[[int, int], object], depth: int, ranks: int) -> bool:
    with suppress(InputError):
        make(depth, ranks)
        return True
    return False


def _divisors(ranks: int) -> Iterator[int]:
    return (depth for depth in range(1, ranks + 1) if ranks % depth == 0)


def _multiples(depth: int, ranks: int) -> list[int]:
    """Those next to `ranks`."""
    return [number for number in (ranks // depth * depth, (ranks // depth + 1) * depth) if number] if depth else []
