"""Checkpoints on disk: a folder a step, a file a layer, and a manifest that says what they must be.

    FOLDER/step-00000120/                120 steps are done
        manifest.json                    what was trained how; the size and the checksum of each other file
        layer-00000.safetensors          weights/NAME, and optimizer/NAME/KEY of what is trained
        tokenizer.json                   attached: how text became tokens, unless bytes did
    FOLDER/step-00000160.part/           being written, or left by a run that was killed meanwhile
    FOLDER/step-00000160.superseded/     set aside: the run went on from an earlier one

A checkpoint gets its name once all of it is on disk, so a name is never that of half a one. It knows nothing of ranks:
a layer's file has the whole layer, whichever ranks wrote it, and any layout reads what it needs. Nothing in it is
code: safetensors and JSON only. The first line of the manifest is the checksum of all that follows.

One that is `weights_only` is no run's: it has a model and no optimizer, 0 steps are done, and any run of that model may
begin with it, on any data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load

from .errors import InputError, refusing
from .host import sync
from .lock import Lock, owner

FORMAT, SCHEMA = "chimera_mpi checkpoint", 1
MANIFEST, PART, SUPERSEDED = "manifest.json", ".part", ".superseded"
NAME = re.compile(r"step-(\d{8,})")
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"  # what the names of a layer's tensors begin with
BLOCK_BYTES = 8 << 20
_Checksum = partial(hashlib.blake2b, digest_size=32)

Tensors = Mapping[str, torch.Tensor]


class LayerFile(NamedTuple):
    """What the manifest says of a file, a layer's or another."""

    name: str
    nbytes: int
    blake2b: str


@dataclass(frozen=True)
class Checkpoint:
    """One that is there under its name. `facts` is what its writer had to say; see `train.facts_of`."""

    path: Path
    step: int  # so many are done
    files: tuple[LayerFile, ...]  # by layer
    facts: dict[str, Any]
    attached: tuple[LayerFile, ...] = ()

    @property
    def weights_only(self) -> bool:
        return bool(self.facts.get("weights_only"))

    def verify(self, layers: Iterable[int]) -> None:
        """Read the files of these layers. Raises InputError if one is not what was written."""
        for index in layers:
            with _open(self.path / self.files[index].name) as file:
                self._check(self.files[index], iter(partial(file.read, BLOCK_BYTES), b""))

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Of the named tensors of a layer. Raises InputError."""
        path = self.path / self.files[index].name
        with refusing(f"{path} is not what it is called"), safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The named tensors of a layer, on the CPU. Raises InputError."""
        path = self.path / self.files[index].name
        content = _read(path)
        self._check(self.files[index], [content])
        with refusing(f"{path} is not what it is called"):
            return load(content)

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """Of a layer, as its `load_state_dict` wants them. Raises InputError."""
        return {name.removeprefix(WEIGHTS): t for name, t in self.layer(index).items() if name.startswith(WEIGHTS)}

    def attachment(self, name: str) -> bytes | None:
        """What is in a file that is not a layer's, if there is one of that name. Raises InputError."""
        for file in self.attached:
            if file.name == name:
                content = _read(self.path / name)
                self._check(file, [content])
                return content
        return None

    def _check(self, file: LayerFile, blocks: Iterable[bytes]) -> None:
        nbytes, checksum = 0, _Checksum()
        for block in blocks:
            checksum.update(block)
            nbytes += len(block)
        if (nbytes, checksum.hexdigest()) != (file.nbytes, file.blake2b):
            what = "bytes are not those" if nbytes == file.nbytes else f"bytes are not the {file.nbytes}"
            raise InputError(f"{self.path / file.name} is damaged: its {nbytes} {what} that were written")


def read_checkpoint(path: str | Path) -> tuple[Checkpoint, list[dict[str, torch.Tensor]]]:
    """A checkpoint, and the named tensors of each of its layers. Raises InputError."""
    checkpoint = open_checkpoint(Path(path))
    return checkpoint, [checkpoint.layer(index) for index in range(len(checkpoint.files))]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest, and look whether all files are there. Raises InputError."""
    with refusing(f"{path} cannot be read"):
        return _opened(path)


def _opened(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise InputError(f"there is no checkpoint {path}")
    if path.name.endswith(PART) or not (path / MANIFEST).exists():
        raise InputError(f"{path} is not a whole checkpoint: it has no {MANIFEST}, which is written last")
    first, _, rest = _read(path / MANIFEST).partition(b"\n")
    if first != _first_line(rest):
        raise InputError(f"{path / MANIFEST} is damaged or of another program: its checksum does not fit")
    with refusing(f"{path / MANIFEST} is not understood"):
        body = json.loads(b"{" + rest)
        if body["format"] != FORMAT:
            raise InputError(f"{path} is a {body['format']}, not a {FORMAT}")
        if body["schema"] > SCHEMA:
            raise InputError(
                f"{path} has schema {body['schema']} and this version knows up to {SCHEMA}: update chimera-mpi"
            )
        layers, attached = (tuple(LayerFile(*file) for file in body.get(key, ())) for key in ("layers", "attached"))
        checkpoint = Checkpoint(path, body["step"], layers, body["facts"], attached)
    for file in (*checkpoint.files, *checkpoint.attached):
        there = (path / file.name).stat().st_size if (path / file.name).is_file() else None
        if there is None:
            raise InputError(f"{path / file.name} is missing")
        if there != file.nbytes:
            raise InputError(f"{path / file.name} is damaged: it has {there} bytes, not {file.nbytes}")
    return checkpoint


def found_in(folder: Path) -> list[Path]:
    """What has a checkpoint's name, the last step first."""
    if not os.path.isdir(folder):
        return []
    steps = {path: int(name[1]) for path in folder.iterdir() if (name := NAME.fullmatch(path.name)) and path.is_dir()}
    return sorted(steps, key=steps.__getitem__, reverse=True)


class Choice(NamedTuple):
    """The checkpoint to go on from, if there is one, why later ones were passed over, and among which it was chosen."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()
    among: tuple[Path, ...] = ()


def choose_newest(paths: Sequence[Path], whole: Callable[[Path], Checkpoint]) -> Choice:
    """The first of `paths` that is `whole`, which raises InputError of others. Raises InputError if none of them is."""
    passed_over: list[str] = []
    for path in paths:
        try:
            return Choice(whole(path), tuple(passed_over))
        except InputError as error:
            passed_over.append(str(error))
    if passed_over:
        raise InputError(f"{passed_over[0]}, and no other checkpoint is whole: take another folder")
    return Choice(None)


def choose_named(
    path: Path, paths: Sequence[Path], whole: Callable[[Path], Checkpoint], taking: Callable[[Path], str]
) -> Choice:
    """The one at `path`. Raises InputError if it is not whole, which offers the last of `paths` that is, by the words
    of `taking` for how one takes it."""
    try:
        return Choice(whole(path))
    except InputError as error:
        refused = error
    try:
        other = choose_newest([other for other in paths if other != path], whole).checkpoint
    except InputError:
        other = None
    none = f"{path.absolute().parent} has no whole one beside it: name one of another folder"
    remedy = f"the last whole one is {other.path}: try {taking(other.path)}" if other else none
    raise InputError(f"{refused}; {remedy}") from refused


# ---------------------------------------------------------------------------------------------- writing


@contextmanager
def taken(folder: Path, lock_at: Callable[[Path], Lock] = Lock) -> Iterator[None]:
    """Have a folder to write checkpoints in, which is made, to oneself, and rid of what was never finished. Raises
    InputError."""
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_at(folder / "lock")
    except BlockingIOError as error:
        holder = owner(folder / "lock")
        raise InputError(
            f"{folder} is being written by {holder}: wait for its end, or save in another folder"
        ) from error
    except OSError as error:
        raise InputError(
            f"checkpoint={folder} cannot be written ({error.strerror}): is {folder.absolute().parent} a folder that "
            "you may write in, on a file system that locks files (or set HDF5_USE_FILE_LOCKING=FALSE)?"
        ) from error
    try:
        clear(folder)
        yield
    finally:
        lock.release()
        with suppress(OSError):  # others may be in it
            folder.rmdir()


def clear(folder: Path) -> None:
    """Remove from a folder, which one has to oneself, what was never finished."""
    for left in folder.glob(f"step-*{PART}"):
        shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class Draft:
    """A checkpoint being written, by several processes, each with layers of its own. What the disk refuses is an
    OSError."""

    folder: Path
    step: int

    @property
    def path(self) -> Path:
        """What it will be."""
        return self.folder / f"step-{self.step:08d}"

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + PART)

    def write(self, index: int, tensors: Tensors) -> LayerFile:
        """Put a layer on disk."""
        return self._put(f"layer-{index:05d}.safetensors", safetensors_blocks(tensors))

    def _put(self, name: str, blocks: Iterable[memoryview]) -> LayerFile:
        self.part.mkdir(parents=True, exist_ok=True)
        checksum, nbytes = _Checksum(), 0
        with open(self.part / name, "wb", buffering=0) as file:
            for block in blocks:
                checksum.update(block)
                nbytes += len(block)
                _write(file.fileno(), block)
            os.fsync(file.fileno())
        return LayerFile(name, nbytes, checksum.hexdigest())

    def commit(
        self,
        files: Mapping[int, LayerFile],
        facts: Mapping[str, Any],
        keep: int,
        since: int,
        attached: Mapping[str, bytes] = {},
    ) -> Path:
        """All `files`, by layer, are on disk: give it its name. The last `keep` of the checkpoints stay. `attached` are
        other files that belong to it, by name.

        The run's last one before is that of step `since`: those that follow it are damaged, or of another course of the
        run, and are set aside.
        """
        body = {
            "format": FORMAT,
            "schema": SCHEMA,
            "step": self.step,
            "layers": [files[i] for i in range(len(files))],
            "attached": [self._put(name, [memoryview(content)]) for name, content in attached.items()],
        }
        rest = json.dumps({**body, "facts": facts}, indent=1).removeprefix("{\n").encode()
        with open(self.part / MANIFEST, "wb") as file:
            file.write(_first_line(rest) + b"\n" + rest)
            file.flush()
            os.fsync(file.fileno())
        sync(self.part)
        for other in found_in(self.folder):
            if int(other.name.removeprefix("step-")) > since:
                _set_aside(other)
        os.rename(self.part, self.path)
        sync(self.folder)
        with suppress(OSError):  # one that cannot be removed is in nobody's way
            for old in found_in(self.folder)[keep:]:
                leaving = old.with_name(old.name + PART)
                os.rename(old, leaving)
                shutil.rmtree(leaving, ignore_errors=True)
        return self.path

    def abandon(self) -> None:
        """Give back the space that it takes."""
        shutil.rmtree(self.part, ignore_errors=True)


def safetensors_blocks(tensors: Tensors) -> Iterator[memoryview]:
    """The bytes of a safetensors file with these tensors, which are on the CPU, straight from their memory.

    The library's own writer neither hashes what it writes nor takes tensors that share memory. The format: the length
    of a JSON header as 8 bytes, the header, padded to a multiple of 8, and the tensors in a row.
    """
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that all are aligned
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        memory = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(memory), BLOCK_BYTES):
            yield memory[start : start + BLOCK_BYTES]


DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def _set_aside(path: Path) -> None:
    names = (path.with_name(f"{path.name}{SUPERSEDED}{number or ''}") for number in range(10**6))
    os.rename(path, next(name for name in names if not name.exists()))


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _first_line(rest: bytes) -> bytes:
    checksum = _Checksum()
    checksum.update(rest)
    return b'{ "blake2b": "%s",' % checksum.hexdigest().encode()
