"""Runs that do the same, and what tells these configurations apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, nan
from typing import Any

from .one import Report, Times, interval_figures
from .part import INCIDENTAL, LEARNING, SHAPE, canonical, differing, without
from .stats import Interval, over_runs
from .steps import mean


@dataclass(frozen=True, eq=False)
class Configuration:
    """Runs that do the same; they may differ in seed and files. `label` and `learning` tell it from the others beside
    its shape; what is learnt does not change how long it takes."""

    number: int
    label: str
    learning: str
    reports: tuple[Report, ...]

    @property
    def first(self) -> Report:
        return self.reports[0]

    @property
    def ranks(self) -> int:
        return self.first.start.ranks

    @property
    def depth(self) -> int:
        return self.first.start.config.depth

    @property
    def micro_batches(self) -> int:
        return self.first.start.config.micro_batches

    @property
    def mini_batch(self) -> int:
        return self.first.mini_batch

    @cached_property
    def throughput(self) -> Interval:
        """Samples per second: the mean of the runs' medians, or the median of the steps of the only run."""
        return self._over(lambda report: report.throughput)

    @cached_property
    def step_s(self) -> Interval:
        return self._over(lambda report: report.step_s)

    def _over(self, of: Callable[[Report], Interval]) -> Interval:
        intervals = [of(report) for report in self.reports]
        return over_runs([each.value for each in intervals]) if len(intervals) > 1 else intervals[0]

    @cached_property
    def bubble_planned(self) -> float:
        return self._bubble("planned")

    @cached_property
    def bubble_measured(self) -> float:
        return self._bubble("measured")

    def _bubble(self, which: str) -> float:
        return _mean([mean(getattr(report.bubble, which)) for report in self.reports if report.bubble])

    @property
    def loss(self) -> float:
        return _mean([report.loss for report in self.reports])

    @property
    def validation(self) -> float:
        return _mean([report.validation for report in self.reports])

    @cached_property
    def times(self) -> Times:
        """Of the average worker."""
        everyone = [times for report in self.reports for times in report.times]
        return Times(*(_mean(column) for column in zip(*everyone, strict=True)))

    @property
    def name(self) -> str:
        return f"{self.label} {self.learning}".strip()

    @property
    def shape(self) -> dict[str, str]:
        """By the letters of the tables; P are the ranks."""
        size = f"{self.first.micro_batch_size:g}"
        return {"P": str(self.ranks), "D": str(self.depth), "N": str(self.micro_batches), "B": size}

    def figures(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "label": self.label,
            "learning": self.learning,
            "scheme": self.first.start.config.scheme,
            "depth": self.depth,
            "width": self.first.start.width,
            "micro_batches": self.micro_batches,
            "micro_batch_size": self.first.micro_batch_size,
            "mini_batch_size": self.mini_batch,
            "ranks": self.ranks,
            "paths": [str(report.run.path) for report in self.reports],
            "samples_per_s": interval_figures(self.throughput),
            "step_s": interval_figures(self.step_s),
            "bubble_planned": self.bubble_planned,
            "bubble_measured": self.bubble_measured,
            "loss": self.loss,
            "validation_loss": self.validation,
            "average_worker": self.times._asdict(),
        }


def configurations_of(reports: Sequence[Report]) -> tuple[Configuration, ...]:
    """In the order of ranks, mini-batch and throughput."""
    groups: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        groups[_same(report)].append(report)
    firsts = [made[0] for made in groups.values()]
    labels = _labels([report.start.config.scheme for report in firsts], [_told_keys(report) for report in firsts])
    words = zip(labels, _learning(labels, firsts), groups.values(), strict=True)
    found = [Configuration(0, label, learning, tuple(made)) for label, learning, made in words]
    found.sort(key=lambda made: (made.ranks, made.mini_batch, -made.throughput.value))
    return tuple(replace(made, number=number) for number, made in enumerate(found, 1))


def _same(report: Report) -> str:
    """Equal for repeats of one configuration. Its batch may have been given by either of two sizes."""
    start = report.start
    parts = {
        "ranks": start.ranks,
        "hosts": len(start.hosts),
        "mini_batch": report.mini_batch,
        "parameters": start.attributes.get("parameters"),
    }
    return canonical({**without(start.keys, INCIDENTAL, frozenset({"micro_batch_size", "mini_batch_size"})), **parts})


def _labels(names: Sequence[str], told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each name with the keys that the others have otherwise."""
    keys = [key for key in differing(told) if key != "scheme"]
    return [" ".join([name, *_values(each, keys)]).strip() for name, each in zip(names, told, strict=True)]


def _told_keys(report: Report) -> dict[str, Any]:
    return without(report.start.keys, INCIDENTAL, SHAPE, LEARNING)


def _learning(labels: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """What those learn otherwise that have the same label and shape."""
    alike: dict[str, list[int]] = defaultdict(list)
    for at, (label, report) in enumerate(zip(labels, reports, strict=True)):
        alike[canonical({"label": label, "ranks": report.start.ranks, **_shape(report)})].append(at)
    found = [""] * len(labels)
    for places in alike.values():
        told = [{key: reports[at].start.keys.get(key) for key in sorted(LEARNING)} for at in places]
        for at, words in zip(places, _labels([""] * len(places), told), strict=True):
            found[at] = words
    return found


def _shape(report: Report) -> dict[str, Any]:
    config = report.start.config
    return {"depth": config.depth, "micro_batches": config.micro_batches, "mini_batch": report.mini_batch}


def _values(keys: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    yield from (f"{name}={keys[name]}" for name in names if keys.get(name) is not None)


def _mean(numbers: Sequence[float]) -> float:
    there = [number for number in numbers if isfinite(number)]
    return sum(there) / len(there) if there else nan


def timed(made: Iterable[Configuration]) -> list[Configuration]:
    """Those of which it is known how long a step takes."""
    return [each for each in made if 0 < each.throughput.value < inf]
