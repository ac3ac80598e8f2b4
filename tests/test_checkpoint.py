"""Checkpoints on disk: what is written is read, and nothing that is not whole is taken for one that is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chimera_mpi import checkpoint, lock
from chimera_mpi.checkpoint import (
    DTYPES,
    Draft,
    choose_named,
    choose_newest,
    found_in,
    open_checkpoint,
    read_checkpoint,
    taken,
)
from chimera_mpi.errors import InputError
from chimera_mpi.host import free_memory

FACTS = {"config": {"depth": 4}, "loss_scale": [1024.0, 3]}


def layers(seed=0):
    """Three layers of tensors of all dtypes and awkward shapes, of which some share memory."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {str(dtype): (torch.rand(3, 5, generator=rng) * 2).to(dtype) for dtype in DTYPES}
    matrix = torch.rand(4, 6, dtype=torch.float64, generator=rng)
    odd = {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "transposed": matrix.T, "same": matrix}
    return [{"weights/a": matrix[1]}, drawn, {**odd, "optimizer/a.b/step": torch.tensor(2.0)}]


def write(folder, step, tensors=None, keep=9, since=None):
    folder.mkdir(exist_ok=True)
    draft = Draft(folder, step)
    files = {index: draft.write(index, layer) for index, layer in enumerate(tensors or layers(step))}
    return draft.commit(files, FACTS, keep, step - 1 if since is None else since)


def whole(path):
    found = open_checkpoint(path)
    found.verify(range(len(found.files)))
    return found


def assert_same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def path(folder):
    return write(folder, 12)


def test_what_goes_in_comes_out(path):
    found, tensors = read_checkpoint(path)
    assert (found.step, found.facts, path.name) == (12, FACTS, "step-00000012")
    assert_same(tensors, layers(12))
    assert [found.shapes(2)[name] for name in ("scalar", "empty", "transposed")] == [(), (0, 3), (6, 4)]
    assert not list(path.parent.glob("*.part"))


def test_other_programs_read_it(path):
    assert_same([load_file(path / "layer-00001.safetensors")], layers(12)[1:2])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "chimera_mpi checkpoint" and manifest["facts"] == FACTS


def test_all_tensors_are_aligned(path):
    for file in path.glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for entry in header.values():
            size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}.get(entry["dtype"], 1)
            assert (8 + length + entry["data_offsets"][0]) % size == 0


# ------------------------------------------------------------------------------------------- what is not whole


def large(folder, step):
    """About 20 KB."""
    return write(folder, step, [{"weights/w": torch.arange(2000.0)}, {"weights/v": torch.arange(1500.0)}])


def test_one_that_is_cut_anywhere_is_refused(folder):
    """At every 1,000th byte, and near the ends."""
    path = large(folder, 3)
    for name in sorted(os.listdir(path)):
        content = (path / name).read_bytes()
        for length in {*range(0, len(content), 1000), 1, len(content) - 1}:
            (path / name).write_bytes(content[:length])
            with pytest.raises(InputError, match=name) as refused:
                whole(path)
            assert "\n" not in str(refused.value)
        (path / name).write_bytes(content)
    whole(path)


def test_one_with_a_flipped_bit_is_refused(folder):
    path = large(folder, 3)
    for name in sorted(os.listdir(path)):
        content = bytearray((path / name).read_bytes())
        for at in {*range(0, len(content), 97), len(content) - 1}:
            content[at] ^= 1 << at % 8
            (path / name).write_bytes(content)
            with pytest.raises(InputError, match=name):
                whole(path)
            content[at] ^= 1 << at % 8
        (path / name).write_bytes(content)
    whole(path)


def test_a_layer_is_checked_when_it_is_read(folder):
    path = large(folder, 3)
    found = open_checkpoint(path)
    content = bytearray((path / found.files[1].name).read_bytes())
    content[-3] ^= 4
    (path / found.files[1].name).write_bytes(content)
    assert found.layer(0)
    with pytest.raises(InputError, match=r"layer-00001.* is damaged"):
        found.layer(1)


def without_manifest(path):
    (path / "manifest.json").unlink()


def without_layer(path):
    (path / "layer-00001.safetensors").unlink()


def swapped_layers(path):
    for old, new in (("0", "x"), ("2", "0"), ("x", "2")):
        (path / f"layer-0000{old}.safetensors").rename(path / f"layer-0000{new}.safetensors")


def foreign(path):
    (path / "manifest.json").write_text('{"format": "another one", "schema": 1}')


def rewritten(path, **changes):
    body = json.loads((path / "manifest.json").read_text())
    del body["blake2b"]
    rest = json.dumps({**body, **changes}).removeprefix("{").encode()
    (path / "manifest.json").write_bytes(checkpoint._first_line(rest) + b"\n" + rest)


def newer(path):
    rewritten(path, schema=checkpoint.SCHEMA + 1)


def of_another_kind(path):
    rewritten(path, format="another one")


def without_steps(path):
    rewritten(path, layers=3)


def a_file(path):
    shutil.rmtree(path)
    path.write_text("not a folder")


FAULTS = {
    without_manifest: "has no manifest.json",
    without_layer: "layer-00001.safetensors is missing",
    swapped_layers: "layer-00000.safetensors is damaged",
    foreign: "manifest.json is damaged or of another program",
    newer: "has schema 2 and this version knows up to 1: update chimera-mpi",
    of_another_kind: "is a another one, not a chimera_mpi checkpoint",
    without_steps: "manifest.json is not understood",
    a_file: "there is no checkpoint",
    shutil.rmtree: "there is no checkpoint",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_last_whole_one_is_offered_or_taken(folder, fault):
    early, last = write(folder, 5), write(folder, 10)
    fault(last)
    with pytest.raises(InputError) as refused:
        choose_named(last, found_in(folder), whole, "take {}".format)
    assert FAULTS[fault] in str(refused.value) and f"try take {early}" in str(refused.value)
    chosen = choose_newest(found_in(folder), whole)
    assert chosen.checkpoint.path == early
    if last in found_in(folder):
        assert FAULTS[fault] in chosen.passed_over[0]


def test_where_none_is_whole_none_is_taken(folder):
    assert choose_newest(found_in(folder), whole).checkpoint is None
    without_manifest(write(folder, 5))
    with pytest.raises(InputError, match=r"step-00000005.*no other checkpoint is whole"):
        choose_newest(found_in(folder), whole)


def test_pickles_are_never_read(path):
    torch.save({"weights/a": torch.zeros(3)}, path / "layer-00000.safetensors")
    with pytest.raises(InputError):
        whole(path)
    found = open_checkpoint_of(path)
    with pytest.raises(InputError, match="is not what it is called"):
        found.layer(0)


def open_checkpoint_of(path):
    """With the checksum of what is there."""
    content = (path / "layer-00000.safetensors").read_bytes()
    files = json.loads((path / "manifest.json").read_text())["layers"]
    files[0] = [files[0][0], len(content), checkpoint._Checksum(content).hexdigest()]
    rewritten(path, layers=files)
    return open_checkpoint(path)


# ------------------------------------------------------------------------------------------- writing


def test_the_last_ones_stay(folder):
    for step in range(1, 6):
        write(folder, step, keep=2)
        assert found_in(folder)[0].name == f"step-{step:08d}"
    assert sorted(os.listdir(folder)) == ["step-00000004", "step-00000005"]


def test_what_another_course_of_the_run_left_is_set_aside(folder):
    first, early, late, later = (write(folder, step) for step in (2, 5, 10, 15))
    wanted = (late / "manifest.json").read_bytes()
    write(folder, 10, layers(seed=99), since=2)
    assert found_in(folder) == [late, first]
    assert_same(read_checkpoint(late)[1], layers(99))
    aside = {path: path.with_name(path.name + ".superseded") for path in (early, late, later)}
    assert (aside[late] / "manifest.json").read_bytes() == wanted
    assert aside[early].is_dir() and aside[later].is_dir()
    write(folder, 10, since=2)
    assert (folder / "step-00000010.superseded1").is_dir()


class Killed(BaseException):
    """The process ends here."""


def test_a_save_that_ends_anywhere_leaves_the_last_one_whole(tmp_path, monkeypatch):
    """Whatever call of the system was its last."""
    at, ended = 0, False
    while not ended:
        folder = tmp_path / str(at)
        first = write(folder, 5)
        ended = ends_within(monkeypatch, at, lambda folder=folder: write(folder, 10, keep=1))
        newest = found_in(folder)[0]
        assert_same(read_checkpoint(newest)[1], layers(5 if newest == first else 10))
        assert all(whole(path) for path in found_in(folder))
        with taken(folder):
            assert not list(folder.glob("*.part"))
        write(folder, 10, keep=1)
        assert found_in(folder) == [folder / "step-00000010"]
        at += 1
    assert at > 3 * len(layers())


def ends_within(monkeypatch, calls, act):
    """Whether `act` ends before it has made so many calls of the system, by the last of which it is killed."""
    left = [calls]

    def dying(function):
        def call(*arguments, **named):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "rename"):
            patch.setattr(checkpoint.os, name, dying(getattr(os, name)))
        with suppress(Killed):
            act()
            return True
    return False


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EIO])
def test_a_file_system_may_have_no_way_to_sync_a_folder(folder, monkeypatch, code):
    """But where it has one, it must not fail."""
    sync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    with nullcontext() if code != errno.EIO else pytest.raises(OSError):
        assert whole(write(folder, 5))


def test_what_the_disk_refuses_is_an_error_of_the_system(folder, monkeypatch):
    first = write(folder, 5)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "write", full)
    draft = Draft(folder, 10)
    with pytest.raises(OSError, match="No space left"):
        draft.write(0, layers()[0])
    draft.abandon()
    assert os.listdir(folder) == [first.name]


def test_two_runs_cannot_have_one_folder(folder):
    with taken(folder):
        assert (folder / "lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
        with pytest.raises(InputError, match=r"is being written by process \d+"), taken(folder):
            pass
    with taken(folder):
        pass
    assert not (folder / "lock").exists()


def test_where_no_locks_are_granted_only_the_command_line_insists(folder, monkeypatch):
    def none(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with pytest.raises(InputError, match="HDF5_USE_FILE_LOCKING=FALSE"), taken(folder):
        pass
    with taken(folder, lock.lock_if_possible):
        assert not (folder / "lock").exists()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"), taken(Path(tmp_path / "file" / "within")):
        pass


def test_free_memory_is_a_fraction():
    assert 0 < free_memory() < 1
