"""From the numbers of a chart to shares of its width and of its height."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from .chart import Chart
from .facts import ticks


class Axis:
    """From numbers to shares of a length."""

    def __init__(self, low: float, high: float, is_log: bool):
        self._is_log = is_log
        self._ends = self._scaled(low), self._scaled(high)

    def __call__(self, value: float) -> float:
        low, high = self._ends
        if self._is_log and value <= 0:  # the end of a long error bar
            return 0.0
        return (self._scaled(value) - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return log(value) if self._is_log else value


class Scale(Axis):
    """One with room at its ends, and round numbers to mark."""

    def __init__(self, values: Sequence[float], is_log: bool, from_zero: bool, most: int = 6):
        low, high = min(values), max(values)
        if is_log:
            self.ticks = _powers(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        elif from_zero:
            low, high = min(low, 0.0), max(high * 1.05, 0.0) or 1.0
            self.ticks = between(low, high, most)
        else:
            room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
            low, high = low - room, high + room
            self.ticks = between(low, high, most)
        super().__init__(low, high, is_log)


class Frame:
    """The axes of a chart, and what to mark on them."""

    def __init__(self, chart: Chart):
        points = [point for series in chart.series for point in series.points]
        xs = [x for x, _ in points]
        ys = [y for _, y in points] + [end for series in chart.series for ends in series.spread for end in ends]
        if chart.log_y:
            ys = [y for y in ys if y > 0]
        self.y = Scale(ys, chart.log_y, chart.from_zero)
        self.x = Axis(min(xs), max(xs), chart.log_x)
        self.x_ticks = sorted(set(xs)) if chart.log_x else between(min(xs), max(xs), 6)


def between(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them."""
    found = ticks(high - low, most)
    step = found[1] if len(found) > 1 else high - low
    if step <= 0:
        return [low]
    first = -int(-low // step) if low > 0 else int(low / step)
    return [step * at for at in range(first, int(high / step + 1e-9) + 1)] or [low]


def _powers(low: float, high: float) -> list[float]:
    """Round numbers around and between: powers of ten, with their halves and fifths where these are few."""
    exponents = range(-12, 16)
    for mantissas in ((1, 2, 5), (1,)):
        numbers = [m * 10.0**e for e in exponents for m in mantissas]
        below = max((n for n in numbers if n <= low), default=numbers[0])
        above = min((n for n in numbers if n >= high), default=numbers[-1])
        found = [n for n in numbers if below <= n <= above]
        if len(found) <= 8:
            break
    return found
