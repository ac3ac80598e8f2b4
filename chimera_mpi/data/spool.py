"""Tokens of documents on their way into a token file: a folder beside it, from which a killed preparation goes on.

    tokens       of all documents, one after the other, each closed
    documents    a `RECORD` of each
    names        of each, one after the other
    state.json   how much of the three is whole, of which sources; it is written by renaming

Every source is read once and in blocks. What is held in memory is a record a document, and that only at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unwritable
from ..lock import Lock, lock_if_possible, owner
from .sources import Broken, Document, Source, Utf8, shifted
from .tokenizer import Tokenizer

FILES = ("tokens", "documents", "names")
RECORD = np.dtype([("digest", "u1", 32), ("bytes", "<i8"), ("tokens", "<i8"), ("name_bytes", "<i8")])
SAVE_EVERY_S = 1.0
BLOCK = 1 << 20  # tokens that are read, and written, at once


class BeingPrepared(InputError):
    """Another process, the `holder`, is at it."""

    def __init__(self, output: Path, holder: str) -> None:
        super().__init__(f"{output} is being prepared by {holder}: wait for its end, or give another -o FILE")
        self.holder = holder


def token_type(vocabulary: int) -> np.dtype:
    """The smallest that has room for every token."""
    return np.dtype("<u4" if vocabulary > 1 << 16 else "<u2" if vocabulary > 1 << 8 else "u1")


class Spool:
    """Takes the documents of sources, one source after the other. `counted` is what was met and not taken as it was."""

    def __init__(self, folder: Path, key: str, tokenizer: Tokenizer) -> None:
        """What is there of the same `key` is kept, anything else begins anew. What the disk refuses is an OSError."""
        self.folder, self.tokenizer, self._saved_s = folder, tokenizer, time.monotonic()
        self.dtype = token_type(tokenizer.vocabulary)
        state = self._state(key)
        if not state:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
        self.key, self.sources = key, int(state.get("sources", 0))
        self.counted: Counter[str] = Counter(state.get("counted", {}))
        self._files = {name: open(folder / name, "ab") for name in FILES}  # noqa: SIM115
        for name, file in self._files.items():
            file.truncate(state.get(name, 0))
            file.seek(0, os.SEEK_END)

    def take(self, sources: Sequence[Source], errors: str, tell: Callable[[int], None]) -> None:
        """The documents of `sources`, after those that are there. Raises InputError."""
        done = sum(source.size_bytes for source in sources[: self.sources])
        for source in sources[self.sources :]:
            before = source.state
            for document in source.documents(shifted(tell, done)):
                self._add(document, errors)
            if source.state != before:
                raise InputError(f"{source.name} changed while it was read: run it again")
            done += source.size_bytes
            tell(done)
            self.sources += 1
            if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                self.save()

    def save(self) -> None:
        """A preparation that is killed from now on goes on from here."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        state = {"key": self.key, "sources": self.sources, "counted": self.counted, **sizes}
        write_whole(self.folder / "state.json", json.dumps(state))
        self._saved_s = time.monotonic()

    def records(self) -> NDArray[Any]:
        """One a document, in order."""
        self._files["documents"].flush()
        return np.fromfile(self.folder / "documents", dtype=RECORD)

    def tokens(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Some of those of all documents, in arrays of at most `BLOCK`."""
        self._files["tokens"].flush()
        with open(self.folder / "tokens", "rb") as file:
            file.seek(start * self.dtype.itemsize)
            for at in range(start, stop, BLOCK):
                yield np.fromfile(file, self.dtype, min(BLOCK, stop - at))

    def names(self, lengths: Iterable[int]) -> Iterator[bytes]:
        self._files["names"].flush()
        with open(self.folder / "names", "rb") as file:
            yield from map(file.read, lengths)

    def __len__(self) -> int:
        return self._files["documents"].tell() // RECORD.itemsize

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _state(self, key: str) -> dict[str, Any]:
        """Of an earlier preparation of the same; nothing if what it speaks of is not there."""
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
            whole = all((self.folder / name).stat().st_size >= state[name] for name in FILES)
        except (OSError, ValueError, KeyError):
            return {}
        return state if whole and state["key"] == key else {}

    def _add(self, document: Document, errors: str) -> None:
        tokens, start = self._files["tokens"], self._files["tokens"].tell()
        digest, nbytes, utf8 = hashlib.sha256(), 0, Utf8(errors)

        def texts() -> Iterator[str]:
            nonlocal nbytes
            for text in utf8.texts(document.name, document.blocks):
                coded = text.encode()
                digest.update(coded)
                nbytes += len(coded)
                yield text

        try:
            for ids in self.tokenizer.encode(texts()):
                tokens.write(ids.astype(self.dtype).data)
        except Broken:
            self.counted["skipped"] += 1
            tokens.truncate(start)
            tokens.seek(start)
            return
        self.counted["broken"] += utf8.broken
        if not nbytes:
            self.counted["empty"] += 1
            return
        tokens.write(np.array(self.tokenizer.end_of_document, self.dtype).tobytes())
        name = document.name.encode("utf-8", "surrogateescape")
        count = (tokens.tell() - start) // self.dtype.itemsize
        record = np.array((list(digest.digest()), nbytes, count, len(name)), dtype=RECORD)
        self._files["documents"].write(record.tobytes())
        self._files["names"].write(name)


@contextmanager
def spool_folder(output: Path) -> Iterator[Path]:
    """Beside `output`, for this process alone. It stays where there is something in it to go on from. What the disk
    refuses becomes an InputError."""
    folder = output.with_name(f".{output.name}.part")
    try:
        folder.mkdir(exist_ok=True)
        lock = _locked(folder, output)
    except OSError as error:
        raise unwritable(output, error) from error
    try:
        yield folder
    except (InputError, OSError) as error:
        refused = error if isinstance(error, InputError) else unwritable(output, error)
        if _is_worth_keeping(folder):
            raise InputError(f"{refused} (what is done is in {folder}: the same command goes on from it)") from error
        raise refused from error
    finally:
        if not _is_worth_keeping(folder):
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _is_worth_keeping(folder: Path) -> bool:
    return any(folder.glob("*.json"))


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing."""
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _locked(folder: Path, output: Path) -> Lock:
    try:
        return lock_if_possible(folder / "lock")
    except BlockingIOError as error:
        raise BeingPrepared(output, owner(folder / "lock")) from error
