"""From text to a token file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from ..errors import InputError, refuse_taken
from ..host import sync
from .corpus import PARTS, SCHEMA
from .parts import Part, Split, split
from .sources import ERRORS, SUFFIXES, Source, Utf8, shifted, sources_of
from .spool import BLOCK, SAVE_EVERY_S, Spool, spool_folder, token_type, write_whole
from .tokenizer import BYTES, LEARN_FROM_BYTES, PIECE, TOKENIZER, Tokenizer, Tokens, bpe_size, from_json, learn, pieces

WHOLE = "whole.h5"  # of the spool's folder

Tell = Callable[[str, int, int], None]
"""Is told what is being made, how many bytes of the sources are through, and of how many."""


class Prepared(NamedTuple):
    """What `prepare` made. `left_out` counts documents by reason; `broken` are the places that were not UTF-8 and were
    replaced."""

    path: Path
    documents: int
    train_tokens: int
    validation_tokens: int
    vocabulary: int
    unigram_entropy_nats: float
    sha256: str
    left_out: dict[str, int]
    broken: int


def tell_nobody(what: str, done_bytes: int, of_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class Rules:
    """What of the texts is taken, and how. Raises `InputError`.

    Of a folder all files ending in `suffixes` are taken, of JSON lines the text under `field`. What is not UTF-8 is
    replaced by U+FFFD, keeps its document out or is refused, as `errors` says: "replace", "skip" or "strict".
    `tokenizer` is "byte", "bpe:SIZE" for one that is learnt from the texts, or a tokenizer.json, in which `end_name`
    closes a document. Documents go to the validation part in the order of a hash of (seed, content) while they fit into
    `validation_fraction` of the bytes.
    """

    seed: int = 0
    validation_fraction: float = 0.1
    suffixes: Sequence[str] = SUFFIXES
    tokenizer: str = "byte"
    end_name: str | None = None
    field: str = "text"
    errors: str = "replace"

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed} is not in [0, 2^63): try seed=0")
        if not 0 <= self.validation_fraction < 1:
            raise InputError(
                f"validation_fraction={self.validation_fraction} is not in [0, 1): try validation_fraction=0.1"
            )
        if self.errors not in ERRORS:
            raise InputError(f"errors={self.errors} is no rule for broken UTF-8: try {', '.join(ERRORS)}")


def prepare(output: Path, sources: Sequence[Path] = (), rules: Rules = Rules(), tell: Tell = tell_nobody) -> Prepared:
    """Write the texts of `sources` to the token file `output`, which must not exist.

    A source is a file, gzipped or not, a glob, or a folder; without any, it is the library and the documentation that
    every Python carries. A file is a document; of a file of JSON lines (.jsonl, .ndjson) each line is one. Each content
    is taken once. A text that comes alone is cut in two. The same input gives the same file, byte for byte, also where
    a preparation was killed and this one goes on with it. Raises `InputError`.
    """
    output = Path(output)
    _refuse_output(output)
    size = bpe_size(rules.tokenizer) if rules.tokenizer.startswith("bpe:") else None
    known = None if size else _known(rules.tokenizer, rules.end_name)
    found = sources_of([Path(source) for source in sources], rules.suffixes, rules.field)
    key = _key(found, known.facts if known else size, rules.field, rules.errors)
    with spool_folder(output) as folder:
        chosen = known or _learnt(folder, key, size or 0, found, tell)
        with closing(Spool(folder, key, chosen)) as spool:
            spool.take(found, rules.errors, _telling(tell, "tokens", found))
            made = _made(folder / WHOLE, spool, chosen, sources, rules)
        _refuse_output(output)
        sync(made.path)
        made.path.rename(output)
        sync(output.parent)
        for state in folder.glob("*.json"):  # nothing is left to go on from
            state.unlink()
    return made._replace(path=output)


def _made(path: Path, spool: Spool, tokenizer: Tokenizer, sources: Sequence[Path], rules: Rules) -> Prepared:
    """Make a token file of all that was taken. Raises InputError if that is nothing."""
    whole = split(spool, rules.seed, rules.validation_fraction)
    if not whole.contents:
        raise InputError(_no_text(sources, rules.suffixes))
    met = _met(spool, whole)
    about = json.dumps({**_origin(sources, rules.suffixes), "errors": rules.errors, **met})
    attributes = {"seed": rules.seed, "validation_fraction": rules.validation_fraction, "provenance": about}
    counts, sha256 = _write(path, whole.parts, tokenizer, attributes)
    return Prepared(
        path=path,
        documents=met["documents"],
        train_tokens=int(counts["train"].sum()),
        validation_tokens=int(counts["validation"].sum()),
        vocabulary=tokenizer.vocabulary,
        unigram_entropy_nats=unigram_entropy(counts["train"] + counts["validation"]),
        sha256=sha256,
        left_out=met["left_out"],
        broken=met["broken"],
    )


def unigram_entropy(counts: Tokens) -> float:
    """Nats per token, -sum p ln p, of tokens that occur `counts` times: the loss of the best model without context."""
    seen = np.asarray(counts, dtype=np.float64)
    p = seen[seen > 0] / seen.sum()
    return float(-(p * np.log(p)).sum()) + 0.0


def _refuse_output(output: Path) -> None:
    refuse_taken(output)
    if not output.parent.is_dir():
        raise InputError(f"{output.parent} is not a folder: make it first, or give another path")


def _no_text(sources: Sequence[Path], suffixes: Sequence[str]) -> str:
    where = " ".join(str(source) for source in sources)
    return f"no text in {where}: give files, or folders with {' '.join(suffixes)} files that have any"


def _key(sources: Sequence[Source], *options: Any) -> str:
    """Of all that the tokens follow from."""
    states = [(source.name, source.state) for source in sources]
    return hashlib.sha256(json.dumps([states, options]).encode()).hexdigest()


def _telling(tell: Tell, what: str, sources: Sequence[Source]) -> Callable[[int], None]:
    of_bytes = sum(source.size_bytes for source in sources)
    return lambda done_bytes: tell(what, done_bytes, of_bytes)


def _met(spool: Spool, whole: Split) -> dict[str, Any]:
    """What the sources had, and what of it is not in the file."""
    counted = spool.counted
    return {
        "documents": sum(len(part.sizes) for part in whole.parts.values()),
        "bytes": whole.nbytes,
        "left_out": {
            "empty": counted["empty"],
            "duplicate": len(spool) - whole.contents,
            "not UTF-8": counted["skipped"],
        },
        "broken": counted["broken"],
    }


def _origin(sources: Sequence[Path], suffixes: Sequence[str]) -> dict[str, Any]:
    """The names of the documents are datasets beside the tokens, for an attribute holds no more than 64 KB."""
    if not sources:
        return {"sources": [f"Python {platform.python_version()}"], "suffixes": [".py", ".txt", ".rst"]}
    return {"sources": [Path(source).resolve().name for source in sources], "suffixes": list(suffixes)}


# ---- the tokenizer -----------------------------------------------------------------------------------------------


def _known(name: str, end_name: str | None) -> Tokenizer:
    """That of bytes, a tokenizer.json, or that of a folder."""
    if name == "byte":
        return BYTES
    path = Path(name)
    file = path / TOKENIZER if os.path.isdir(path) else path
    try:
        return from_json(file.read_text(encoding="utf-8"), str(file), end_name)
    except FileNotFoundError as error:
        raise InputError(f"there is no tokenizer {file}: give byte, bpe:SIZE or a tokenizer.json") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): give a tokenizer.json") from error


def _learnt(folder: Path, key: str, size: int, sources: Sequence[Source], tell: Tell) -> Tokenizer:
    """From a sample of the texts; or what an earlier preparation learnt from the same."""
    kept = folder / "learnt.json"
    if kept.exists() and (known := json.loads(kept.read_bytes()))["key"] == key:
        return from_json(known["json"], str(kept))
    started_s = time.monotonic()
    learnt = learn(size, _sample(sources, _telling(tell, "vocabulary", sources)))
    if time.monotonic() - started_s > SAVE_EVERY_S:
        write_whole(kept, json.dumps({"key": key, "json": learnt.json}))
    return learnt


def _sample(sources: Sequence[Source], tell: Callable[[int], None]) -> Iterator[str]:
    """Pieces of the texts: all, or every so many that there are `LEARN_FROM_BYTES` of them."""
    every = 1 + sum(source.size_bytes for source in sources) // LEARN_FROM_BYTES
    return islice(_all_pieces(sources, tell), 0, None, every)


def _all_pieces(sources: Sequence[Source], tell: Callable[[int], None]) -> Iterator[str]:
    done = 0
    for source in sources:
        for document in source.documents(shifted(tell, done)):
            yield from pieces(Utf8("replace").texts(document.name, document.blocks), PIECE)
        done += source.size_bytes


# ---- the file ----------------------------------------------------------------------------------------------------


class _Disk(io.FileIO):
    """A file for h5py. HDF5 cannot close what it could not write, and crashes on its way out; so what the disk refuses
    is kept for `check`, and what would be written after it is dropped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._refused: OSError | None = None

    def check(self) -> None:
        """Raises OSError if not all is written."""
        if self._refused:
            raise self._refused

    def write(self, data: Any) -> int:
        self._unless_refused(lambda: self._write_whole(memoryview(data).cast("B")))
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self._unless_refused(lambda: super(_Disk, self).truncate(size))
        return self.tell() if size is None else size

    def _write_whole(self, data: memoryview) -> None:
        while data:
            data = data[super().write(data) :]

    def _unless_refused(self, act: Callable[[], Any]) -> None:
        if self._refused is None:
            try:
                act()
            except OSError as error:
                self._refused = error


@contextmanager
def _new_file(path: Path) -> Iterator[tuple[h5py.File, _Disk]]:
    """Raises OSError if it is not whole."""
    with _Disk(path) as disk:
        with h5py.File(disk, "w") as file:
            yield file, disk
        disk.check()


def _write(
    path: Path, parts: Mapping[str, Part], tokenizer: Tokenizer, attributes: Mapping[str, Any]
) -> tuple[dict[str, Tokens], str]:
    """Returns how often each token occurs in each part, and the sha256 of all tokens."""
    everything = hashlib.sha256()
    with _new_file(path) as (file, disk):
        counts = {
            part: _write_part(file.create_group(part), parts[part], tokenizer.vocabulary, everything, disk)
            for part in PARTS
        }
        if tokenizer.json is not None:
            file[TOKENIZER] = np.frombuffer(tokenizer.json.encode(), dtype=np.uint8)
        root = {
            "schema": SCHEMA,
            "vocabulary": tokenizer.vocabulary,
            "end_of_document": tokenizer.end_of_document,
            "tokenizer": json.dumps(tokenizer.facts),
            "unigram_entropy_nats": unigram_entropy(counts["train"] + counts["validation"]),
            "sha256": everything.hexdigest(),
            **attributes,
        }
        file.attrs.update({name: _fixed(value) if isinstance(value, str) else value for name, value in root.items()})
    return counts, everything.hexdigest()


def _write_part(group: h5py.Group, part: Part, vocabulary: int, everything: Any, disk: _Disk) -> Tokens:
    """Returns how often each token occurs."""
    ends = np.cumsum(part.sizes, dtype=np.int64)
    total = int(part.sizes.sum())
    tokens = group.create_dataset("tokens", shape=(total,), dtype=token_type(vocabulary))
    counts, digest, at = np.zeros(vocabulary, dtype=np.int64), hashlib.sha256(), 0
    for block in _blocks(part.runs):
        tokens[at : at + len(block)] = block
        disk.check()
        at += len(block)
        counts += np.bincount(block, minlength=vocabulary)
        digest.update(block.data)
        everything.update(block.data)
    group["documents"] = ends - part.sizes
    _write_names(group, part)
    group["counts"] = counts
    entropy = unigram_entropy(counts) if total else float("nan")
    group.attrs.update(tokens=total, sha256=_fixed(digest.hexdigest()), unigram_entropy_nats=entropy)
    return counts


def _write_names(group: h5py.Group, part: Part) -> None:
    longest = int(part.name_bytes.max(initial=1))
    names = group.create_dataset("names", shape=(len(part.sizes),), dtype=h5py.string_dtype("utf-8", longest))
    rest = iter(part.names)
    for start in range(0, len(part.sizes), BLOCK):
        block = np.array(list(islice(rest, BLOCK)), dtype=f"S{longest}")
        names[start : start + len(block)] = block.astype(names.dtype)


def _blocks(runs: Iterable[Tokens]) -> Iterator[Tokens]:
    """The same tokens in arrays of at least `BLOCK`, but for the last."""
    waiting: list[Tokens] = []
    length = 0
    for run in runs:
        waiting.append(run)
        length += len(run)
        if length >= BLOCK:
            yield np.concatenate(waiting)
            waiting, length = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _fixed(text: str) -> Tokens:
    """A string of fixed length. h5py's usual ones go to a heap, over which HDF5 2.0 loops for ever if it is damaged."""
    coded = np.array(text.encode("utf-8", "surrogateescape"))
    return coded.astype(h5py.string_dtype("utf-8", max(1, coded.dtype.itemsize)))
