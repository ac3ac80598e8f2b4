"""The token file: what is in it, and one part of it as samples.

Groups /train and /validation with `tokens` (of the smallest unsigned type that has room for the vocabulary; the token
`end_of_document` closes each document), `documents` (where each starts), `names` (what each was) and `counts` (how
often each token occurs). /tokenizer.json is there where tokens are not bytes. What is in it, where it came from and its
sha256 are attributes. Nothing in it depends on when it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .tokenizer import BYTES, TOKENIZER, Specials, Tokenizer, from_facts, special_tokens

SCHEMA = 1
PARTS = ("train", "validation")
CHECKED_WHEN_OPENED_BYTES = 64 * 2**20

Tokens = NDArray[Any]


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
    tokenizer: Tokenizer | None = None  # that they were made by; None where they are no text

    @property
    def specials(self) -> Specials:
        """What BERT adds to the tokens of text: those of the tokenizer, or the next ones after its vocabulary."""
        own = self.tokenizer.specials if self.tokenizer else None
        return own or special_tokens(self.vocabulary)

    @property
    def vocabulary_with_specials(self) -> int:
        """Token ids of a sample for BERT are below it."""
        return max(self.vocabulary, *(number + 1 for number in self.specials))

    @property
    def samples(self) -> int:
        """Each sample also needs the token after its last."""
        return max(len(self.tokens) - 1, 0) // self.sequence_length

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


def open_corpus(path: Path, part: str = "train", sequence_length: int = 128, least: int = 1) -> Corpus:
    """The samples of `part`, "train" or "validation". Raises `InputError` if `path` is not a whole token file, or if
    they are fewer than `least`.

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
            corpus = _read_part(path, file, part, sequence_length)
    except InputError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a whole token file (truncated, or of another kind): {_remedy()}") from error
    if corpus.samples < least:
        raise too_short(corpus, f"a sample of sequence_length={sequence_length} needs {sequence_length + 1}")
    if corpus.tokens.nbytes <= CHECKED_WHEN_OPENED_BYTES:
        corpus.verify()
    return corpus


def too_short(corpus: Corpus, needed: str) -> InputError:
    """That a part has too few tokens for what is `needed`."""
    remedies = ["shorten sequence_length"] if len(corpus.tokens) else []
    if corpus.part == "validation":
        remedies += ["set eval_every=none", "prepare it with a larger --validation-fraction"]
    else:
        remedies += ["prepare more text"]
    return InputError(
        f"{corpus.path} has {len(corpus.tokens)} {corpus.part} tokens, {needed}: {', or '.join(remedies)}"
    )


def _refuse_input(path: Path) -> None:
    if not os.path.exists(path):
        raise InputError(f"no data file {path}: make it with `chimera-mpi data prepare -o {path}`")
    if not os.path.isfile(path):
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


def _read_part(path: Path, file: h5py.File, part: str, sequence_length: int) -> Corpus:
    group, tokens = file[part], file[part]["tokens"]
    return Corpus(
        path=path,
        part=part,
        sequence_length=sequence_length,
        vocabulary=int(file.attrs["vocabulary"]),
        tokens=_mapped(path, tokens) if len(tokens) else np.empty(0, dtype=tokens.dtype),
        unigram_entropy_nats=float(group.attrs["unigram_entropy_nats"]),
        sha256=_text(group.attrs["sha256"]),
        tokenizer=_read_tokenizer(file),
    )


def _read_tokenizer(file: h5py.File) -> Tokenizer:
    """A file without any is from before there were others than bytes. Raises ValueError if it is damaged."""
    if "tokenizer" not in file.attrs:
        return BYTES
    text = file[TOKENIZER][()].tobytes().decode() if TOKENIZER in file else None
    return from_facts(json.loads(_text(file.attrs["tokenizer"])), text)


def _text(attribute: Any) -> str:
    return np.bytes_(attribute).decode()


def _mapped(path: Path, tokens: h5py.Dataset) -> Tokens:
    offset = tokens.id.get_offset()
    if offset is None:
        raise InputError(f"{path} is chunked or compressed and cannot be mapped: run `h5repack -l CONTI` on it")
    # A plain array over the map: np.memmap's own indexing makes a new memmap object each time.
    return np.asarray(np.memmap(path, dtype=tokens.dtype, mode="r", offset=offset, shape=tokens.shape))
