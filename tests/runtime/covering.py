"""Rows that have every pair of values of two factors, in far fewer than all combinations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]  # of each factor, its value
Pair = tuple[tuple[str, Any], tuple[str, Any]]  # two factors in their order, with a value each
Rule = Callable[..., bool]  # whether the values of the factors that its parameters name go together


@cache
def names_of(rule: Rule) -> tuple[str, ...]:
    """The factors that it is about."""
    return tuple(inspect.signature(rule).parameters)


def obeys(rule: Rule, row: Row) -> bool:
    """Whether `row` breaks no rule, as far as it goes."""
    names = names_of(rule)
    return not all(name in row for name in names) or rule(**{name: row[name] for name in names})


@dataclass(frozen=True)
class Grid:
    """`factors` has the values of each. Those that the rules are about should come first: it saves search."""

    factors: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule] = ()

    def completed(self, row: Row) -> Row | None:
        """The first whole row with the values of this one; None if every one breaks a rule."""
        if not all(obeys(rule, row) for rule in self.rules):
            return None
        open_factor = next((factor for factor in self.factors if factor not in row), None)
        if open_factor is None:
            return row
        whole = (self.completed({**row, open_factor: value}) for value in self.factors[open_factor])
        return next((found for found in whole if found is not None), None)

    def pairs_of(self, row: Row) -> Iterator[Pair]:
        yield from combinations([(factor, row[factor]) for factor in self.factors if factor in row], 2)

    @cached_property
    def pairs(self) -> list[Pair]:
        """All that a row can have."""
        of_factors = combinations(([(factor, value) for value in self.factors[factor]] for factor in self.factors), 2)
        return [pair for of_two in of_factors for pair in product(*of_two) if self.completed(dict(pair))]

    @cached_property
    def rows(self) -> list[Row]:
        """Each begins with a pair not yet had, and takes the values that bring the most others, one by one."""
        missing = dict.fromkeys(self.pairs)
        rows = []
        while missing:
            row: Row = dict(next(iter(missing)))
            for factor in self.factors:
                if factor not in row:
                    row[factor] = max(self._open(row, factor), key=lambda more: sum(p in missing for p in more[1]))[0]
            for pair in self.pairs_of(row):
                missing.pop(pair, None)
            rows.append({factor: row[factor] for factor in self.factors})
        return rows

    def _open(self, row: Row, factor: str) -> Iterator[tuple[Any, list[Pair]]]:
        """The values that `factor` can have in `row`, and the pairs that the row then has."""
        for value in self.factors[factor]:
            if self.completed({**row, factor: value}):
                yield value, list(self.pairs_of({**row, factor: value}))
