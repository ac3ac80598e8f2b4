"""Which documents of a spool are trained on and which are to validate with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .corpus import PARTS
from .spool import Spool
from .tokenizer import Tokens


@dataclass(frozen=True)
class Part:
    """Documents: what each is called, its number of tokens, and the tokens of all, one run after the other."""

    names: Iterable[bytes]
    name_bytes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    runs: Iterable[Tokens]


NOTHING = Part((), np.empty(0, np.int64), np.empty(0, np.int64), ())


class Split(NamedTuple):
    """By the names of `PARTS`. A content is taken once, the first time that it comes, so that no text is in both; of
    documents of other contents there are so many, with so many bytes in all."""

    parts: dict[str, Part]
    contents: int
    nbytes: int


def split(spool: Spool, seed: int, validation_fraction: float) -> Split:
    records = spool.records()
    digests = np.ascontiguousarray(records["digest"]).view("S32").ravel()
    first = np.sort(np.unique(digests, return_index=True)[1])
    if len(first) == 1 and validation_fraction > 0:
        parts = _cut(spool, records, int(first[0]), validation_fraction)
    else:
        validates = _chosen(records[first], seed, validation_fraction)
        parts = {part: _part(spool, records, first[validates == (part == "validation")]) for part in PARTS}
    return Split(parts, len(first), int(records["bytes"][first].sum()))


def _chosen(records: NDArray[Any], seed: int, validation_fraction: float) -> NDArray[np.bool_]:
    """By document, whether it is to validate with."""
    sizes = records["bytes"].tolist()
    keys = [hashlib.sha256(b"%d " % seed + digest.tobytes()).digest() for digest in records["digest"]]
    by_hash = sorted(range(len(sizes)), key=keys.__getitem__)
    chosen = np.zeros(len(sizes), dtype=bool)
    room = validation_fraction * sum(sizes)
    for index in by_hash:
        if sizes[index] <= room:
            room -= sizes[index]
            chosen[index] = True
    if sizes and not chosen.any() and validation_fraction > 0:  # a few large ones: too much validation rather than none
        chosen[min(by_hash, key=sizes.__getitem__)] = True
    return chosen


def _part(spool: Spool, records: NDArray[Any], indices: NDArray[np.int64]) -> Part:
    if not len(indices):
        return NOTHING
    is_wanted = np.zeros(len(records), dtype=bool)
    is_wanted[indices] = True
    neighbours = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return Part(
        names=compress(spool.names(records["name_bytes"].tolist()), is_wanted),
        name_bytes=records["name_bytes"][indices],
        sizes=records["tokens"][indices],
        runs=_runs(spool, np.cumsum(records["tokens"]), neighbours),
    )


def _runs(spool: Spool, ends: NDArray[np.int64], neighbours: Iterable[NDArray[np.int64]]) -> Iterator[Tokens]:
    for run in neighbours:
        yield from spool.tokens(ends[run[0] - 1] if run[0] else 0, ends[run[-1]])


def _cut(spool: Spool, records: NDArray[Any], only: int, validation_fraction: float) -> dict[str, Part]:
    """A text that comes alone, in two."""
    size, start = int(records["tokens"][only]), int(records["tokens"][:only].sum())
    name = next(islice(spool.names(records["name_bytes"].tolist()), only, None))
    cut = max(0, size - 1 - max(1, round((size - 1) * validation_fraction)))

    def piece(suffix: str, *ranges: tuple[int, int]) -> Part:
        whole = name + suffix.encode()
        runs = chain.from_iterable(spool.tokens(start + first, start + last) for first, last in ranges)
        return Part([whole], np.array([len(whole)]), np.array([sum(last - first for first, last in ranges)]), runs)

    return {
        "train": piece(f"[:{cut}]", (0, cut), (size - 1, size)) if cut else NOTHING,
        "validation": piece(f"[{cut}:]", (cut, size)),
    }
