"""The few numbers of a model of a machine, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum
from statistics import median


@dataclass(frozen=True)
class Fit:
    """Coefficients of the terms, none below zero, and how far each point is off: predicted / measured - 1."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def typical_error(self) -> float:
        return median(map(abs, self.errors)) if self.errors else 0.0

    @property
    def largest_error(self) -> float:
        return max(map(abs, self.errors), default=0.0)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """`seconds[i]` as a sum of the terms `rows[i]`, each times a coefficient of 0 or more.

    Least squares of the relative errors, so that a point of microseconds counts as much as one of seconds. Each set
    of terms is tried, the others at zero: there are few. Raises ValueError where nothing was measured, or takes no
    time.
    """
    if not rows or min(seconds) <= 0:
        raise ValueError(f"no fit to {len(rows)} points that take {min(seconds, default=0)} s at least")
    scaled = [[term / s for term in row] for row, s in zip(rows, seconds, strict=True)]
    terms = range(len(rows[0]))
    sets = [chosen for count in range(1, len(terms) + 1) for chosen in combinations(terms, count)]
    fits = [found for chosen in sets if (found := _fit_of(scaled, chosen)) is not None]
    return min(fits, key=lambda found: fsum(error**2 for error in found.errors))


def hidden_share(alone_s: float, compute_s: float, together_s: float) -> float:
    """Of communication that takes `alone_s` by itself, the share that went on during `compute_s` of compute, where
    both took `together_s`."""
    return min(max((alone_s + compute_s - together_s) / min(alone_s, compute_s), 0.0), 1.0)


def moved_share(alone_s: float, compute_s: float, arrived_s: float) -> float:
    """1 if a message that takes `alone_s` arrived in that time although its sender computed for `compute_s`; 0 if it
    waited until that had ended."""
    return min(max(1 - (arrived_s - alone_s) / compute_s, 0.0), 1.0)


def _fit_of(scaled: Sequence[Sequence[float]], chosen: Sequence[int]) -> Fit | None:
    """The fit of 1 by the chosen terms alone; None where they do not tell it, or one would be below zero."""
    square = [[fsum(row[i] * row[j] for row in scaled) for j in chosen] for i in chosen]
    found = _solved(square, [fsum(row[i] for row in scaled) for i in chosen])
    if found is None or min(found) < 0:
        return None
    by_term = dict(zip(chosen, found, strict=True))
    coefficients = tuple(by_term.get(term, 0.0) for term in range(len(scaled[0])))
    errors = tuple(fsum(c * term for c, term in zip(coefficients, row, strict=True)) - 1 for row in scaled)
    return Fit(coefficients, errors)


def _solved(square: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a small system of equations, by elimination; None if there is no single one."""
    rows = [[*row, value] for row, value in zip(square, right, strict=True)]
    scale = [max(map(abs, row[:-1])) for row in rows]
    for at in range(len(rows)):
        pivot = max(range(at, len(rows)), key=lambda row: abs(rows[row][at]) / scale[row] if scale[row] else 0.0)
        if not scale[pivot] or abs(rows[pivot][at]) <= 1e-12 * scale[pivot]:
            return None
        rows[at], rows[pivot], scale[at], scale[pivot] = rows[pivot], rows[at], scale[pivot], scale[at]
        for row in range(len(rows)):
            if row != at:
                factor = rows[row][at] / rows[at][at]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[at], strict=True)]
    return [row[-1] / row[at] for at, row in enumerate(rows)]
