"""How well a number is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import hypot, isfinite, nan, pi, sqrt, tan
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
MOST_BLOCKS, LEAST_BLOCK = 10, 3  # a median of three forgives one step that was disturbed


class Interval(NamedTuple):
    """A number and its 95 % confidence interval, `half` to either side; nan where that cannot be told. `over` says
    what was counted."""

    value: float
    half: float = nan
    over: str = ""

    @property
    def ends(self) -> tuple[float, float]:
        half = self.half if isfinite(self.half) else 0.0
        return self.value - half, self.value + half

    def scaled(self, by: float) -> Interval:
        return self._replace(value=self.value * by, half=self.half * by)

    def __str__(self) -> str:
        """Both to the same place: `123.4 ± 2.1`."""
        if not isfinite(self.half):
            return f"{self.value:.4g}"
        digits = max(_places(self.half, 2), _places(self.value, 3), 0)
        return f"{self.value:.{digits}f} ± {self.half:.{digits}f}"


def _places(number: float, digits: int) -> int:
    """Decimals that show so many digits of a number."""
    return digits - 1 - int(np.floor(np.log10(abs(number)))) if number and isfinite(number) else 0


def over_runs(values: Sequence[float]) -> Interval:
    """The mean of what independent runs came to, by Student's distribution."""
    return Interval(float(np.mean(values)), _half(values), f"{len(values)} runs")


def over_blocks(values: ArrayLike, together: int = 1) -> Interval:
    """The median of the steps of one run.

    Neighbouring steps are alike, so the interval is from the medians of blocks of neighbours, at most ten, about the
    median of all (sectioning; Nakayama, ACM TOMACS 24:4, 2014). Steps of a stream come `together`, as many as it does
    between flushes, and share their seconds.
    """
    steps = np.asarray(values, dtype=np.float64)
    steps = steps[np.isfinite(steps)]
    if not len(steps):
        return Interval(nan)
    blocks = min(MOST_BLOCKS, len(steps) // together // LEAST_BLOCK)
    value = float(np.median(steps))
    if blocks < 2:
        return Interval(value)
    length = len(steps) // together // blocks * together
    medians = np.median(steps[-blocks * length :].reshape(blocks, length), axis=1)
    return Interval(value, _half(medians.tolist()), f"{blocks} blocks of {length} steps")


def ratio(above: Interval, below: Interval) -> Interval:
    """Of two that are known independently: their relative errors add up in squares."""
    value = above.value / below.value
    return Interval(value, abs(value) * hypot(above.half / above.value, below.half / below.value))


def _half(values: Sequence[float]) -> float:
    return t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / sqrt(len(values)) if len(values) > 1 else nan


@cache
def t_quantile(freedom: int) -> float:
    """How many standard errors to either side hold 95 % of Student's distribution with so many degrees of freedom.

    With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1) by angle.
    """
    angles = np.linspace(0, pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(freedom) * tan(float(np.interp(CONFIDENCE * mass[-1], mass, angles)))
