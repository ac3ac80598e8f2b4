"""Where text comes from: files, folders, globs, JSON lines, gzip, and what every Python carries. Read in blocks."""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from ..errors import InputError

SUFFIXES = (".py", ".txt", ".rst", ".md", ".jsonl")
LINES = (".jsonl", ".ndjson")
ERRORS = ("replace", "skip", "strict")
BLOCK_BYTES = 1 << 20
ESCAPED = re.compile(rb"\xed[\xb2\xb3][\x80-\xbf]")
LONGEST_LINE_BYTES = 1 << 30
GLOB = frozenset("*?[")

# Of Python's own library: what pip added, tests, tables and what differs between two installations of one version.
NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
NOT_TEXT_PREFIXES = ("_sysconfigdata", "config-")

Tell = Callable[[int], None]
"""Is told, now and then, how many bytes of a source have been read."""


def shifted(tell: Tell, by_bytes: int) -> Tell:
    """Of a source that comes after so many bytes of others."""
    return lambda read_bytes: tell(by_bytes + read_bytes)


class Document(NamedTuple):
    """A text of a source, in blocks of bytes, which are to be read before the next document is asked for."""

    name: str
    blocks: Iterable[bytes]


class Source(Protocol):
    """What has documents; `state` changes when they do."""

    @property
    def name(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def state(self) -> Any: ...

    def documents(self, tell: Tell) -> Iterator[Document]:
        """Raises InputError where they cannot be read."""


def sources_of(asked: Sequence[Path], suffixes: Sequence[str], field: str) -> list[Source]:
    """Every file that is asked for, in order; without any, what every Python carries. Raises InputError."""
    return [source for place in asked for source in _files_at(place, suffixes, field)] if asked else _pythons_own()


def _files_at(place: Path, suffixes: Sequence[str], field: str) -> Iterator[Source]:
    endings = tuple(ending for suffix in suffixes for ending in (suffix, f"{suffix}.gz"))
    if os.path.isdir(place):
        for path in _files_under(place, endings):
            yield File(f"{place.resolve().name}/{path.relative_to(place).as_posix()}", path, field)
    elif os.path.isfile(place):
        yield File(place.name, place, field)
    elif GLOB & set(str(place)) and (found := sorted(glob.glob(str(place), recursive=True))):
        root = Path(*takewhile(lambda part: not GLOB & set(part), place.parts))
        for path in map(Path, found):
            if path.is_file():
                yield File(f"{root.resolve().name}/{path.relative_to(root).as_posix()}", path, field)
    else:
        raise InputError(f"{place} is neither a file nor a folder: give text that is there")


def _files_under(root: Path, endings: tuple[str, ...], leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in leave_out)
        for name in sorted(names):
            if name.endswith(endings) and (Path(folder) / name).is_file():
                yield Path(folder) / name


def _pythons_own() -> list[Source]:
    library = Path(sysconfig.get_path("stdlib"))
    topics = library / "pydoc_data" / "topics.py"
    files = _files_under(library, (".py", ".txt", ".rst"), leave_out=NOT_TEXT)
    texts = [path for path in files if path != topics and not path.name.startswith(NOT_TEXT_PREFIXES)]
    own: list[Source] = [File(path.relative_to(library).as_posix(), path, "") for path in texts]
    return [*own, Topics()] if topics.is_file() else own


# ---- kinds of sources --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A text; or, by its ending, JSON lines, of which each has a text as its `field`. Either may be gzipped."""

    name: str
    path: Path
    field: str

    @property
    def size_bytes(self) -> int:
        return self._stat().st_size

    @property
    def state(self) -> tuple[int, int]:
        stat = self._stat()
        return stat.st_size, stat.st_mtime_ns

    def documents(self, tell: Tell) -> Iterator[Document]:
        with self._reading(), open(self.path, "rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if self.path.suffix == ".gz" else raw
            if self.path.name.removesuffix(".gz").endswith(LINES):
                yield from self._of_lines(file, raw, tell)
            else:
                yield Document(self.name, self._blocks(file, raw, tell))

    def _blocks(self, file: Any, raw: IO[bytes], tell: Tell) -> Iterator[bytes]:
        with self._reading():
            for block in iter(partial(file.read, BLOCK_BYTES), b""):
                yield block
                tell(raw.tell())

    def _of_lines(self, file: Any, raw: IO[bytes], tell: Tell) -> Iterator[Document]:
        number = 0
        while coded := file.readline(LONGEST_LINE_BYTES):
            number += 1
            if len(coded) == LONGEST_LINE_BYTES:
                raise InputError(f"{self.path}:{number} is longer than {LONGEST_LINE_BYTES} bytes: is it JSON lines?")
            line = coded.decode("utf-8", "surrogateescape")
            del coded  # a line may be most of what is in memory
            if not line.isspace():
                text = self._text_of(line, number)
                del line
                yield Document(f"{self.name}:{number}", _parts(text))
            tell(raw.tell())

    def _text_of(self, line: str, number: int) -> str:
        """What is not UTF-8 stands in it as surrogates."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.path}:{number} is not JSON ({error}): give one object a line") from error
        text = found.get(self.field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            has = f"has {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, dict) else "is no object"
            raise InputError(f"{self.path}:{number} has no text '{self.field}', it {has}: name it by --field")
        return text

    def _stat(self) -> os.stat_result:
        with self._reading():
            return self.path.stat()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"cannot read {self.path} ({error}): make it readable, or leave it out") from error


@dataclass(frozen=True)
class Topics:
    """The language reference that comes with Python: prose, once out of its quotes."""

    name: str = "pydoc_data/topics"

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._texts().values()))

    @property
    def state(self) -> str:
        return platform.python_version()

    def documents(self, tell: Tell) -> Iterator[Document]:
        for name, text in sorted(self._texts().items()):
            yield Document(f"{self.name}/{name}", [text.encode()])

    @staticmethod
    def _texts() -> dict[str, str]:
        from pydoc_data.topics import topics

        return topics


def _parts(text: str, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Bytes that JSON's escapes cannot stand for, and halves of pairs of surrogates, are not UTF-8 here either."""
    for start in range(0, len(text), size):
        yield ESCAPED.sub(_escaped, text[start : start + size].encode("utf-8", "surrogatepass"))


def _escaped(found: re.Match[bytes]) -> bytes:
    """The byte that "surrogateescape" wrote as U+DC80 to U+DCFF."""
    _, second, third = found[0]
    return bytes([third + 0x40 * (second == 0xB3)])


# ---- bytes as text -----------------------------------------------------------------------------------------------


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Broken(Exception):
    """A document that is not UTF-8, where those are left out."""


class Utf8:
    """Text from blocks of bytes, wherever they are cut; `broken` counts what is not UTF-8 and was replaced."""

    def __init__(self, errors: str) -> None:
        self.errors, self.broken = errors, 0

    def texts(self, name: str, blocks: Iterable[bytes]) -> Iterator[str]:
        """By `errors`, what is not UTF-8 becomes U+FFFD, raises Broken or raises InputError."""
        left, at = b"", 0
        for block in blocks:
            text, used = self._decoded(name, left + block, at, final=False)
            left, at = (left + block)[used:], at + used
            yield text
        text, _ = self._decoded(name, left, at, final=True)
        yield text

    def _decoded(self, name: str, content: bytes, at: int, final: bool) -> tuple[str, int]:
        try:
            return codecs.utf_8_decode(content, "strict", final)
        except UnicodeDecodeError as error:
            if self.errors == "skip":
                raise Broken from error
            if self.errors == "strict":
                raise InputError(
                    f"{name} is not UTF-8 at byte {at + error.start}: try --errors replace or skip"
                ) from error
        text, used = codecs.utf_8_decode(content, "replace", final)
        self.broken += text.count(REPLACEMENT) - content[:used].count(REPLACEMENT.encode())
        return text, used
