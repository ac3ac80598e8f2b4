"""Token corpora: text becomes one HDF5 file; samples and micro-batches are read from it by rule.

`Batches` has samples for a model that predicts the next token, `MaskedBatches` for BERT.

The file: groups /train and /validation with `tokens` (uint16; a byte is its own token, `END_OF_DOCUMENT` closes each
document), `documents` (where each starts), `names` (what each was) and `counts` (how often each token occurs).
What is in it, where it came from and its sha256 are attributes. Nothing in it depends on when it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from .errors import InputError

SCHEMA = 1
END_OF_DOCUMENT = 256
VOCABULARY = 257
PARTS = ("train", "validation")
SUFFIXES = (".py", ".txt", ".rst", ".md")

# Of Python's own library: what pip added, tests, tables and what differs between two installations of one version.
NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
NOT_TEXT_PREFIXES = ("_sysconfigdata", "config-")
CHECKED_WHEN_OPENED_BYTES = 64 * 2**20

Tokens = NDArray[Any]


# ---- from text to a file -----------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A text to be read when its turn comes; `digest` is the sha256 of its content."""

    name: str
    size_bytes: int
    digest: bytes
    read: Callable[[], bytes]


class Prepared(NamedTuple):
    """What `prepare` made."""

    path: Path
    documents: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy_nats: float
    sha256: str


def prepare(
    output: Path,
    sources: Sequence[Path] = (),
    seed: int = 0,
    validation_fraction: float = 0.1,
    suffixes: Sequence[str] = SUFFIXES,
) -> Prepared:
    """Write the texts of `sources` to the token file `output`, which must not exist.

    A source is a file, or a folder of which all files ending in `suffixes` are taken; without any, it is the library
    and the documentation that every Python carries. Documents go to the validation part in the order of a hash of
    (seed, content) while they fit into `validation_fraction` of the bytes; each content is taken once. A text that
    comes alone is cut in two. The same input gives the same file, byte for byte. Raises `InputError`.
    """
    output = Path(output)
    _refuse_output(output)
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction={validation_fraction} is not in [0, 1): try validation_fraction=0.1")
    documents = _distinct(_documents_in(sources, suffixes) if sources else _python_documents())
    if not documents:
        where = " ".join(str(source) for source in sources)
        raise InputError(f"no text in {where}: give files, or folders with {' '.join(suffixes)} files that have any")
    parts = _split(documents, seed, validation_fraction)
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with h5py.File(beside, "x") as file:
            prepared = _write(file, output, parts)
            file.attrs.update(seed=seed, validation_fraction=validation_fraction)
            file.attrs["provenance"] = _fixed(_provenance(sources, suffixes, documents))
        _refuse_output(output)
        beside.rename(output)
    except OSError as error:
        raise InputError(f"cannot write {output} ({error}): give a path with room for it") from error
    finally:
        beside.unlink(missing_ok=True)
    return prepared


def unigram_entropy(counts: Tokens) -> float:
    """Nats per token, -sum p ln p, of tokens that occur `counts` times: the loss of the best model without context."""
    seen = np.asarray(counts, dtype=np.float64)
    p = seen[seen > 0] / seen.sum()
    return float(-(p * np.log(p)).sum()) + 0.0


def _refuse_output(output: Path) -> None:
    if output.exists():
        raise InputError(f"{output} exists and stays as it is: give another path, or remove it first")
    if not output.parent.is_dir():
        raise InputError(f"{output.parent} is not a folder: make it first, or give another path")


def _documents_in(sources: Sequence[Path], suffixes: Sequence[str]) -> Iterator[Document]:
    for source in map(Path, sources):
        if source.is_dir():
            for path in _files_under(source, suffixes):
                yield _document(f"{source.resolve().name}/{path.relative_to(source).as_posix()}", path.read_bytes)
        elif source.is_file():
            yield _document(source.name, source.read_bytes)
        else:
            raise InputError(f"{source} is neither a file nor a folder: give text that is there")


def _python_documents() -> Iterator[Document]:
    library = Path(sysconfig.get_path("stdlib"))
    topics = library / "pydoc_data" / "topics.py"
    for path in _files_under(library, (".py", ".txt", ".rst"), leave_out=NOT_TEXT):
        if path != topics and not path.name.startswith(NOT_TEXT_PREFIXES):
            yield _document(path.relative_to(library).as_posix(), path.read_bytes)
    if topics.is_file():
        from pydoc_data.topics import topics as texts  # the language reference: prose, once out of its quotes

        for name, text in sorted(texts.items()):
            yield _document(f"pydoc_data/topics/{name}", partial(str.encode, text))


def _files_under(root: Path, suffixes: Sequence[str], leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in leave_out)
        for name in sorted(names):
            if name.endswith(tuple(suffixes)) and (Path(folder) / name).is_file():
                yield Path(folder) / name


def _document(name: str, read: Callable[[], bytes]) -> Document:
    try:
        text = read()
    except OSError as error:
        raise InputError(f"cannot read {name} ({error}): make it readable, or leave it out") from error
    return Document(name, len(text), hashlib.sha256(text).digest(), read)


def _distinct(documents: Iterator[Document]) -> list[Document]:
    """The first of each content, so that no text is in both parts; empty ones are none."""
    by_content: dict[bytes, Document] = {}
    for document in documents:
        if document.size_bytes:
            by_content.setdefault(document.digest, document)
    return list(by_content.values())


def _split(documents: list[Document], seed: int, validation_fraction: float) -> dict[str, list[Document]]:
    if len(documents) == 1 and validation_fraction > 0:
        return dict(zip(PARTS, _cut(documents[0], validation_fraction), strict=True))
    room = validation_fraction * sum(document.size_bytes for document in documents)
    by_hash = sorted(documents, key=lambda document: hashlib.sha256(b"%d " % seed + document.digest).digest())
    chosen = set()
    for document in by_hash:
        if document.size_bytes <= room:
            room -= document.size_bytes
            chosen.add(document.digest)
    if not chosen and validation_fraction > 0:  # a few large documents: too much validation rather than none
        chosen.add(min(by_hash, key=lambda document: document.size_bytes).digest)
    return {
        "train": [document for document in documents if document.digest not in chosen],
        "validation": [document for document in documents if document.digest in chosen],
    }


def _cut(document: Document, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    end = document.size_bytes - max(1, round(document.size_bytes * validation_fraction))
    head = _document(f"{document.name}[:{end}]", lambda: document.read()[:end])
    tail = _document(f"{document.name}[{end}:]", lambda: document.read()[end:])
    return [head] if end else [], [tail]


def _write(file: h5py.File, output: Path, parts: dict[str, list[Document]]) -> Prepared:
    everything = hashlib.sha256()
    counts = {part: _write_part(file.create_group(part), parts[part], everything) for part in PARTS}
    entropy = unigram_entropy(counts["train"] + counts["validation"])
    file.attrs.update(
        schema=SCHEMA,
        vocabulary=VOCABULARY,
        end_of_document=END_OF_DOCUMENT,
        unigram_entropy_nats=entropy,
        sha256=_fixed(everything.hexdigest()),
    )
    return Prepared(
        path=output,
        documents=sum(len(documents) for documents in parts.values()),
        train_tokens=int(counts["train"].sum()),
        validation_tokens=int(counts["validation"].sum()),
        unigram_entropy_nats=entropy,
        sha256=everything.hexdigest(),
    )


def _write_part(group: h5py.Group, documents: list[Document], everything: Any) -> Tokens:
    """Write the documents one after the other, each read when its turn comes; returns the counts of the tokens."""
    sizes = np.array([document.size_bytes + 1 for document in documents], dtype=np.int64)
    ends = np.cumsum(sizes)
    tokens = group.create_dataset("tokens", shape=(int(sizes.sum()),), dtype="<u2")
    counts = np.zeros(VOCABULARY, dtype=np.int64)
    digest = hashlib.sha256()
    for document, size, end in zip(documents, sizes, ends, strict=True):
        ids = _tokens_of(document)
        tokens[end - size : end] = ids
        counts += np.bincount(ids, minlength=VOCABULARY)
        digest.update(ids.tobytes())
        everything.update(ids.tobytes())
    group["documents"] = ends - sizes
    group["names"] = _fixed([document.name for document in documents])
    group["counts"] = counts
    group.attrs.update(
        tokens=int(sizes.sum()), sha256=_fixed(digest.hexdigest()), unigram_entropy_nats=_entropy_of(counts)
    )
    return counts


def _fixed(text: str | list[str]) -> Tokens:
    """Strings of fixed length. h5py's usual ones go to a heap, over which HDF5 2.0 loops for ever if it is damaged."""
    coded = np.array(np.char.encode(np.array(text, dtype=str), "utf-8", "surrogateescape"))
    return coded.astype(h5py.string_dtype("utf-8", max(1, coded.dtype.itemsize)))


def _entropy_of(counts: Tokens) -> float:
    return unigram_entropy(counts) if counts.any() else float("nan")


def _tokens_of(document: Document) -> Tokens:
    text = document.read()
    if hashlib.sha256(text).digest() != document.digest:
        raise InputError(f"{document.name} changed while it was read: run it again")
    return np.append(np.frombuffer(text, dtype=np.uint8).astype("<u2"), np.array(END_OF_DOCUMENT, dtype="<u2"))


def _provenance(sources: Sequence[Path], suffixes: Sequence[str], documents: list[Document]) -> str:
    """The names of the documents are datasets beside the tokens, for an attribute holds no more than 64 KB."""
    return json.dumps(
        {
            "sources": [Path(source).resolve().name for source in sources] or [f"Python {platform.python_version()}"],
            "suffixes": list(suffixes) if sources else [".py", ".txt", ".rst"],
            "documents": len(documents),
            "bytes": sum(document.size_bytes for document in documents),
        }
    )


# ---- from a file to samples --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Corpus:
    """One part of a token file, as samples of `sequence_length` tokens that follow each other without overlap.

    `tokens` is mapped from the file: what is not read takes no memory, and ranks of one node share what is.
    """

    path: Path
    part: str
    sequence_length: int
    vocabulary: int
    tokens: Tokens
    unigram_entropy_nats: float
    sha256: str

    @property
    def samples(self) -> int:
        """Each sample also needs the token after its last."""
        return (len(self.tokens) - 1) // self.sequence_length

    def sample(self, ids: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of samples `ids`, each int64 [len(ids), sequence_length]; a target is the next token."""
        starts = np.asarray(ids, dtype=np.int64)[:, None] * self.sequence_length
        windows = self.tokens[starts + np.arange(self.sequence_length + 1)].astype(np.int64)
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    def verify(self) -> None:
        """Read every token; raises `InputError` if they are not those that were written."""
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), 2**20):
            digest.update(self.tokens[start : start + 2**20].data)
        if digest.hexdigest() != self.sha256:
            found, wanted = digest.hexdigest()[:12], self.sha256[:12]
            raise InputError(
                f"{self.path} is damaged: the {self.part} tokens have sha256 {found}..., not {wanted}...: {_remedy()}"
            )


def open_corpus(path: Path, part: str = "train", sequence_length: int = 128) -> Corpus:
    """The samples of `part`, "train" or "validation". Raises `InputError` if `path` is not a whole token file.

    Parts up to 64 MiB are compared with their sha256; `Corpus.verify` does so for larger ones.
    """
    path = Path(path)
    if part not in PARTS:
        raise InputError(f"a token file has no part {part!r}: try {' or '.join(PARTS)}")
    if sequence_length < 1:
        raise InputError(f"sequence_length={sequence_length} is below 1: try sequence_length=128")
    _refuse_input(path)
    try:
        # It is renamed into place whole and never written again, so it needs no lock (NFS and Lustre may have none).
        with h5py.File(path, "r", locking=False) as file:
            _check_schema(path, file)
            corpus = _read_part(path, file[part], part, sequence_length, int(file.attrs["vocabulary"]))
    except InputError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a whole token file (truncated, or of another kind): {_remedy()}") from error
    if corpus.samples < 1:
        raise InputError(
            f"{path} has {len(corpus.tokens)} {part} tokens, a sample of sequence_length={sequence_length} needs "
            f"{sequence_length + 1}: shorten sequence_length, or prepare more text"
        )
    if corpus.tokens.nbytes <= CHECKED_WHEN_OPENED_BYTES:
        corpus.verify()
    return corpus


def _refuse_input(path: Path) -> None:
    if not path.exists():
        raise InputError(f"no data file {path}: make it with `chimera-mpi data prepare -o {path}`")
    if not path.is_file():
        raise InputError(f"{path} is not a file: {_remedy()}")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty (0 bytes): {_remedy()}")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} may not be read: change its permissions, or give another file")


def _remedy() -> str:
    return "make a new one with `chimera-mpi data prepare -o FILE`"


def _check_schema(path: Path, file: h5py.File) -> None:
    if "schema" not in file.attrs or not all(part in file and "tokens" in file[part] for part in PARTS):
        raise InputError(f"{path} is HDF5 but no token file: {_remedy()}")
    if file.attrs["schema"] != SCHEMA:
        raise InputError(f"{path} has schema {file.attrs['schema']}, this program reads {SCHEMA}: {_remedy()}")
    if not all("sha256" in file[part].attrs for part in PARTS):
        raise InputError(f"{path} has no sha256 to check it by: {_remedy()}")


def _read_part(path: Path, group: h5py.Group, part: str, sequence_length: int, vocabulary: int) -> Corpus:
    tokens = group["tokens"]
    return Corpus(
        path=path,
        part=part,
        sequence_length=sequence_length,
        vocabulary=vocabulary,
        tokens=_mapped(path, tokens) if len(tokens) else np.empty(0, dtype=tokens.dtype),
        unigram_entropy_nats=float(group.attrs["unigram_entropy_nats"]),
        sha256=np.bytes_(group.attrs["sha256"]).decode(),
    )


def _mapped(path: Path, tokens: h5py.Dataset) -> Tokens:
    offset = tokens.id.get_offset()
    if offset is None:
        raise InputError(f"{path} is chunked or compressed and cannot be mapped: run `h5repack -l CONTI` on it")
    # A plain array over the map: np.memmap's own indexing makes a new memmap object each time.
    return np.asarray(np.memmap(path, dtype=tokens.dtype, mode="r", offset=offset, shape=tokens.shape))


# ---- from samples to micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batches:
    """Which samples each micro-batch of each step has: a rule, so that any rank can tell without asking another.

    `sizes[i]` is the number of samples of micro-batch i, which counts over all pipelines and replicas of the step.
    Samples come in an order shuffled by (seed, epoch), every one once an epoch, and a micro-batch may span two
    epochs. With `seed=None`, for evaluation, every epoch and every run has the same order; it is not the order of the
    corpus, of which the first samples would be those of a few files.
    """

    corpus: Corpus
    sizes: tuple[int, ...]
    seed: int | None = 0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"micro-batches of {list(self.sizes)} samples: each needs at least 1")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"seed={self.seed} is below 0: try seed=0")

    @property
    def mini_batch(self) -> int:
        """Samples of a step."""
        return sum(self.sizes)

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.corpus.vocabulary

    def micro_batch(self, step: int, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, each int64 [sizes[index], sequence_length]."""
        return self.corpus.sample(self.sample_ids(step, index))

    def places(self, step: int, index: int) -> NDArray[np.int64]:
        """int64 [sizes[index]]: how many samples of the run come before each one of a micro-batch."""
        start = step * self.mini_batch + sum(self.sizes[:index])
        return np.arange(start, start + self.sizes[index])

    def sample_ids(self, step: int, index: int) -> NDArray[np.int64]:
        """int64 [sizes[index]]"""
        positions = self.places(step, index)
        epochs, places = np.divmod(positions, self.corpus.samples)
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = (0, 0) if self.seed is None else (self.seed, int(epoch))
            ids[here] = _shuffled(key, self.corpus.samples)[places[here]]
        return ids


# ---- masked sentence pairs ---------------------------------------------------------------------------------------

IGNORED = -100  # the target of a token that is not masked; `models` has the same
AROUND_PAIR = 3  # tokens of a sample that are not of the corpus: [CLS] first [SEP] second [SEP]
MASKED_FRACTION = 0.15


class Specials(NamedTuple):
    """The tokens that BERT adds to those of a corpus."""

    cls: int
    sep: int
    mask: int
    pad: int


def special_tokens(vocabulary: int = VOCABULARY) -> Specials:
    """They follow the tokens of the corpus: 257 to 260 where those are bytes."""
    return Specials(*range(vocabulary, vocabulary + len(Specials._fields)))


class Masked(NamedTuple):
    """What BERT takes: token ids and segments (0 or 1), int64 [batch, tokens]; and, where samples are padded, a mask,
    bool [batch, tokens], False where they are."""

    ids: NDArray[np.int64]
    segments: NDArray[np.int64]
    mask: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class MaskedBatches:
    """Samples for BERT (Devlin et al. 2019, Section 3.1): pairs of segments, some tokens masked, all by rule.

    A sample is [CLS] first [SEP] second [SEP], sequence_length tokens in all; the two are a window of the corpus cut
    in its middle half. In one sample of two, by the toss of a coin, the second is taken from another window.
    `masked` tokens of every sample are to be found, the same number in each, so that a loss that is a mean over them
    and one that is a mean over samples have one count (`models.pretraining_loss`). Of these, 80 % are shown as
    [MASK], 10 % as any token, 10 % as they are.
    The share `short` of the samples is shorter, by any length, and padded; there is a mask only if `short` is not 0.

    Windows, sizes and seed are those of `Batches`, except that a window has as many tokens as a pair has room for.
    Everything random follows from (seed, number of the sample in the run): it differs from epoch to epoch, and depends
    neither on the rank nor on how a step is cut into micro-batches. With `seed=None`, every evaluation is the same.
    """

    corpus: Corpus
    sizes: tuple[int, ...]
    seed: int | None = 0
    short: float = 0.0

    def __post_init__(self) -> None:
        length = self.corpus.sequence_length
        if length < AROUND_PAIR + 2:
            raise InputError(f"sequence_length={length} has no room for a pair: try sequence_length=64")
        if not 0 <= self.short <= 1:
            raise InputError(f"short={self.short} is not in [0, 1]: short=0 pads nothing")
        if self.windows.corpus.samples < 2:
            raise InputError(
                f"{self.corpus.path} has {len(self.corpus.tokens)} {self.corpus.part} tokens, pairs of "
                f"sequence_length={length} need {2 * self.room + 1}: shorten sequence_length, or prepare more text"
            )

    @property
    def room(self) -> int:
        """Tokens of the corpus in a sample."""
        return self.corpus.sequence_length - AROUND_PAIR

    @property
    def masked(self) -> int:
        """Tokens to be found in every sample."""
        return max(1, round(MASKED_FRACTION * self.corpus.sequence_length))

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.corpus.vocabulary + len(Specials._fields)

    @cached_property
    def windows(self) -> Batches:
        """Which windows of the corpus each micro-batch has."""
        return Batches(replace(self.corpus, sequence_length=self.room), self.sizes, self.seed)

    def micro_batch(
        self, step: int, index: int
    ) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Inputs: ids, segments and, if `short`, the mask: see `Masked`. Targets: int64 [batch, tokens], `IGNORED`
        where no token is to be found; and int64 [batch], 0 where the second segment follows the first, 1 where not."""
        draws = _draws(self.seed, self.windows.places(step, index), 4 + 3 * self.corpus.sequence_length)
        (of_pair, of_tokens) = draws[:, :4], draws[:, 4:].reshape(len(draws), 3, -1)
        whole, follows = self._pairs(self.windows.sample_ids(step, index), of_pair)
        ids, words = self._mask(whole.ids, of_tokens)
        shown = () if whole.mask is None else (whole.mask,)
        return (ids, whole.segments, *shown), (words, follows)

    def _pairs(self, windows: NDArray[np.int64], draws: NDArray[np.float64]) -> tuple[Masked, NDArray[np.int64]]:
        """The samples before any token is masked. `draws`: [batch, 4]"""
        strange = draws[:, 0] < 0.5
        samples = self.windows.corpus.samples
        others = (windows + 1 + _below(samples - 1, draws[:, 1])) % samples
        firsts, _ = self.windows.corpus.sample(windows)
        seconds, _ = self.windows.corpus.sample(np.where(strange, others, windows))
        lengths = self._lengths(draws[:, 2])
        cuts = lengths // 4 + _below(lengths - 2 * (lengths // 4) - 1, draws[:, 3]) + 1
        return self._joined(firsts, seconds, cuts[:, None], lengths[:, None]), strange.astype(np.int64)

    def _lengths(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Tokens of the corpus in each sample; half of a short one at least stays to find the others by."""
        shortest = max(2, 2 * self.masked)
        is_short = draws < self.short
        within = draws / self.short if self.short else draws  # what is left of a draw below `short` is as good as new
        return np.where(is_short, shortest + _below(max(1, self.room - shortest), within), self.room)

    def _joined(
        self,
        firsts: NDArray[np.int64],
        seconds: NDArray[np.int64],
        cuts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Masked:
        """[CLS] firsts[:cut] [SEP] seconds[cut:length] [SEP] [PAD] ... of each row."""
        special = special_tokens(self.corpus.vocabulary)
        place = np.arange(self.corpus.sequence_length)
        in_second = (place > cuts + 1) & (place < lengths + AROUND_PAIR)
        ids = np.where(in_second, np.pad(seconds, ((0, 0), (2, 1))), np.pad(firsts, ((0, 0), (1, 2))))
        ids[:, 0] = special.cls
        ids[(place == cuts + 1) | (place == lengths + 2)] = special.sep
        ids[place > lengths + 2] = special.pad
        return Masked(ids, in_second.astype(np.int64), place <= lengths + 2 if self.short else None)

    def _mask(self, ids: NDArray[np.int64], draws: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What is shown, and what is to be found. `draws`: [batch, 3, tokens]"""
        words = self.corpus.vocabulary
        order = np.where(ids < words, draws[:, 0], 2.0)  # special tokens come last, and there are others enough
        chosen = np.zeros(ids.shape, dtype=bool)
        np.put_along_axis(chosen, np.argsort(order, axis=1, kind="stable")[:, : self.masked], True, axis=1)
        fate = draws[:, 1]
        shown = np.where(chosen & (fate < 0.8), special_tokens(words).mask, ids)
        shown = np.where(chosen & (fate >= 0.8) & (fate < 0.9), _below(words, draws[:, 2]), shown)
        return shown, np.where(chosen, ids, IGNORED)


def _draws(seed: int | None, places: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """[len(places), count] numbers in [0, 1), a row for each sample that follows from (seed, place) alone."""
    key = (0, 0) if seed is None else (1, seed)
    return np.stack([np.random.default_rng((*key, int(place))).random(count) for place in places])


def _below(limit: Any, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers from 0 to below `limit`, all as likely."""
    return (draws * limit).astype(np.int64)


# ---- sizes -------------------------------------------------------------------------------------------------------


def even_sizes(mini_batch: int, parts: int) -> tuple[int, ...]:
    """`mini_batch` samples in `parts` micro-batches that differ by one at most, the larger first."""
    if parts < 1:
        raise InputError(f"micro_batches={parts} is below 1: try micro_batches=1")
    if mini_batch < parts:
        raise InputError(
            f"a mini-batch of {mini_batch} samples does not fill {parts} micro-batches: "
            f"give at least {parts} samples, or at most {mini_batch} micro-batches"
        )
    each, over = divmod(mini_batch, parts)
    return (each + 1,) * over + (each,) * (parts - over)


@lru_cache(maxsize=3)  # the two epochs of training that a step may span, and the evaluation
def _shuffled(key: tuple[int, int], samples: int) -> NDArray[np.int64]:
    order = np.random.default_rng(key).permutation(samples)
    order.flags.writeable = False
    return order
