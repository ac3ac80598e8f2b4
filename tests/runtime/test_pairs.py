"""Every two things that can be asked of a run, at once: still equal to one process.

To have another thing in it, add its values to `FACTORS`; one that is no field of `Settings` also needs a word in
`case_of`, and one that does not go with all others a rule, or a line of `refusal`.
"""

from __future__ import annotations

import inspect
from functools import cache, wraps
from itertools import combinations, product

import pytest
from case import Case, tiny
from covering import Grid
from test_laws import PAPER
from test_laws import frozen as freeze

from chimera_mpi.errors import InputError
from chimera_mpi.runtime.mailbox import Delivery
from chimera_mpi.runtime.stage import Recompute
from chimera_mpi.schedule import SCHEMES, STREAMS, SYNCS, accumulated, build

SYNCHRONOUS = [scheme for scheme in SCHEMES if scheme not in STREAMS]
OPTIONS = {"chimera:doubling": {"concat": "doubling"}, "chimera:two_pairs": {"pairs": 2}}
MICRO_BATCHES = {"1": lambda D: 1, "D-1": lambda D: D - 1, "D": lambda D: D, "2D+1": lambda D: 2 * D + 1}
RECOMPUTE = {"none": Recompute(), "stage": Recompute("stage"), "layer": Recompute("layer"), "3": Recompute("layer", 3)}
FROZEN = {"none": (), "middle": (2, 3), "ends": (0, 7)}
SHORT_OF_EVEN = {"even": 0, "uneven": 1}
DELIVERY = {
    "plain": Delivery(),
    "synchronous": Delivery(synchronous=True),
    "pieces": Delivery(ahead=1, limit_bytes=100, verify=True),
}

FACTORS = {
    "scheme": (*SYNCHRONOUS, *OPTIONS),
    "depth": (2, 4, 1),
    "sharded": (False, True),
    "width": (1, 2, 4),
    "micro_batches": tuple(MICRO_BATCHES),
    "recompute": tuple(RECOMPUTE),
    "sync": tuple(SYNCS),
    "delivery": tuple(DELIVERY),
    "frozen": tuple(FROZEN),
    "tied": (False, True),
    "dropout": (0.0, 0.5),
    "clip": (None, 0.1),
    "samples": tuple(SHORT_OF_EVEN),
    "accumulate": (1, 3),
    "bucket_bytes": (4 << 20, 500),
    "shared_from_bytes": (1 << 16, 1),
}


def fits(scheme, depth, width):
    """Eight ranks are slow on few cores: for the paper's schemes only."""
    return depth * width <= (8 if scheme in PAPER else 4)


def has_micro_batches(depth, micro_batches):
    return MICRO_BATCHES[micro_batches](depth) > 0


def refusal(scheme, depth, sharded):
    """What these are refused with, if they are."""
    if scheme == "chimera:two_pairs" and depth == 2:
        return "cannot have 2 pairs of pipelines"
    if scheme.partition(":")[0] in ("chimera", "chimera_zb", "dualpipe") and depth % 2:
        return "needs an even depth, not 1"
    if scheme == "gems" and depth == 1 and sharded:
        return "worker 0 of gems holds a stage twice"
    return None


@wraps(refusal)
def accepted(**chosen):
    return refusal(**chosen) is None


REFUSABLE = tuple(inspect.signature(refusal).parameters)


POSSIBLE = Grid(FACTORS, (fits, has_micro_batches))
ACCEPTED = Grid(FACTORS, (fits, has_micro_batches, accepted))


def refused():
    """A row for each choice that `refusal` is about and refuses."""
    for values in product(*(FACTORS[name] for name in REFUSABLE)):
        if refusal(*values):
            yield POSSIBLE.completed(dict(zip(REFUSABLE, values, strict=True)))


def parametrized(rows):
    def parameter(row):
        ranks = row["depth"] * row["width"]
        return pytest.param(row, id="-".join(map(str, row.values())), marks=pytest.mark.mpi(ranks))

    return pytest.mark.parametrize("row", [parameter(row) for row in rows])


def case_of(
    comm,
    *,
    scheme,
    depth,
    width,
    micro_batches,
    sync,
    tied,
    dropout,
    frozen,
    samples,
    accumulate,
    recompute,
    delivery,
    **settings,
):
    N = MICRO_BATCHES[micro_batches](depth)
    schedule = build(scheme.partition(":")[0], depth, N, sync=sync, **OPTIONS.get(scheme, {}))
    return Case(
        comm,
        accumulated(schedule, accumulate, sync),
        model_of(tied, dropout, FROZEN[frozen]),
        2 * N * accumulate * width - SHORT_OF_EVEN[samples],
        recompute=RECOMPUTE[recompute],
        delivery=DELIVERY[delivery],
        **settings,
    )


@cache
def model_of(tied, dropout, layers):
    """Few, so that each is traced once."""
    return freeze(tiny(tied=tied, dropout=dropout), layers)


@parametrized(ACCEPTED.rows)
def test_equals_one_process(comm, row):
    case = case_of(comm, **row)
    case.run()
    case.pipeline.close()


@parametrized(refused())
def test_what_does_not_go_together_is_refused(comm, row):
    with pytest.raises(InputError, match=refusal(*(row[name] for name in REFUSABLE))):
        case_of(comm, **row)


def test_every_pair_is_in_a_row_unless_no_row_can_have_it():
    there = {pair for row in ACCEPTED.rows for pair in combinations(row.items(), 2)}
    for one, other in combinations(FACTORS, 2):
        for values in product(FACTORS[one], FACTORS[other]):
            pair = tuple(zip((one, other), values, strict=True))
            assert pair in there or ACCEPTED.completed(dict(pair)) is None, pair
    assert len(ACCEPTED.rows) <= 100


@pytest.mark.parametrize("rules", [(), (lambda a, b: a != b,), (lambda a, c: c or a < 2, lambda b, d: b + d != 3)])
def test_covering_by_trying_all_rows(rules):
    factors = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (False, True), "d": (0, 1, 2, 3)}
    grid = Grid(factors, rules)
    whole = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    allowed = [
        row for row in whole if all(rule(*(row[name] for name in inspect.signature(rule).parameters)) for rule in rules)
    ]
    assert all(row in allowed for row in grid.rows)
    assert {p for row in grid.rows for p in grid.pairs_of(row)} == {p for row in allowed for p in grid.pairs_of(row)}
    assert len(grid.rows) <= 18 < len(allowed)
