"""Stop and resume equals never having stopped (law 8): to the bit in the same layout, within rounding in another."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chimera_mpi import checkpoint
from chimera_mpi.checkpoint import found_in, open_checkpoint, read_checkpoint
from chimera_mpi.config import Config
from chimera_mpi.data import Corpus
from chimera_mpi.errors import InputError, RunFailed
from chimera_mpi.saving import find
from chimera_mpi.train import Run, check_resumed, plan_job

VOCABULARY, SEQUENCE, STEPS, STOP = 11, 4, 6, 3
SMALL = {
    "layers": 6, "hidden": 8, "heads": 2, "vocabulary": VOCABULARY, "positions": SEQUENCE, "sequence_length": SEQUENCE,
    "precision": "fp64", "steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01, "clip": 0.5, "eval_every": STOP,
    "mini_batch_size": 16, "micro_batches": 4, "eval_mini_batches": 1, "checkpoint_every": STOP, "checkpoint_keep": 9,
}  # fmt: skip
CHIMERA = {"scheme": "chimera", "depth": 2}  # on four ranks
DEEP = {"scheme": "chimera", "depth": 4}  # on eight
CORPUS = Corpus(Path("made"), "train", SEQUENCE, VOCABULARY, np.arange(200, dtype=np.uint16) % VOCABULARY, 0.0, "")


def meet(comm):
    """A barrier that leaves the cores to those that come late."""
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(1e-3)


@contextmanager
def scratch(comm):
    """A folder that all ranks share."""
    folder = comm.bcast(Path(tempfile.mkdtemp()) if comm.rank == 0 else None)
    yield folder
    meet(comm)
    if comm.rank == 0:
        shutil.rmtree(folder)


@contextmanager
def first_ranks(comm, ranks):
    """Their communicator; None on the others."""
    some = comm.Split(comm.rank >= ranks)
    yield some if comm.rank < ranks else None
    some.Free()
    meet(comm)


def train(comm, folder, ranks=None, resume=None, **asked):
    """The losses, on rank 0, by step, of a run on the first ranks that begins anew or goes on from a checkpoint."""
    ranks = ranks or comm.size
    config = Config(checkpoint=folder, **{**SMALL, **asked})
    losses = {}
    with first_ranks(comm, ranks) as some:
        if some is not None:
            resumed = find(some, resume, folder).checkpoint
            job = plan_job(config, some.size, resumed.step if resumed else 0)
            corpus = replace(CORPUS, sequence_length=config.sequence_length)
            if resumed:
                check_resumed(resumed, job, corpus)
            tell = lambda progress: losses.update({progress.step: progress.loss})  # noqa: E731
            run = Run(some, job, corpus, corpus, tell=tell, resumed=resumed)
            run.run()
            run.pipeline.check_replicas()
            run.close()
    return losses


def copied(comm, source, target):
    """A folder with the checkpoint at `STOP` only."""
    if comm.rank == 0:
        shutil.copytree(source / f"step-{STOP:08d}", target / f"step-{STOP:08d}")
    meet(comm)
    return target


def both_ways(comm, folder, **asked):
    """A run, and one that goes on from its middle: what each rank 0 saw, and the checkpoints at their ends."""
    straight = train(comm, folder / "straight", **asked)
    resumed = train(comm, copied(comm, folder / "straight", folder / "resumed"), resume="auto", **asked)
    assert comm.rank or (list(straight) == list(range(STEPS)) and list(resumed) == list(range(STOP, STEPS)))
    ends = [open_checkpoint(folder / name / f"step-{STEPS:08d}") for name in ("straight", "resumed")]
    return straight, resumed, ends


SAME = [
    {"tied": False, "dropout": 0.1},
    {"optimizer": "sgd"},
    {"optimizer": "lamb"},
    {"optimizer": "adafactor"},
    {"optimizer_sharding": "replicas"},
    {"optimizer_sharding": "replicas", "optimizer": "sgd", "momentum": 0.0, "shared_sums": False},
    {"precision": "bf16", "optimizer_sharding": "replicas"},
    {"precision": "fp16", "loss_scale": 2.0**20},
    {"scheme": "chimera_zb", "recompute": "layer", "precision": "fp32"},
    {"scheme": "interleaved", "chunks": 2},
    {"model": "bert", "vocabulary": VOCABULARY + 4, "sequence_length": 12, "positions": 12},
    {"scheme": "pipedream_2bw", "tied": False, "optimizer": "lamb"},
]


def named(asked):
    return "-".join(map(str, asked.values())) or "chimera"


@pytest.mark.mpi(4)
@pytest.mark.parametrize("asked", SAME, ids=named)
def test_the_same_layout_gives_the_same_bits(comm, asked):
    with scratch(comm) as folder:
        straight, resumed, ends = both_ways(comm, folder, **{**CHIMERA, **asked})
        assert {step: straight[step] for step in resumed} == resumed
        assert ends[0].files == ends[1].files  # weights and optimizer, by their checksums
        assert ends[0].facts["loss_scale"] == ends[1].facts["loss_scale"]


LAYOUTS = [
    {"ranks": 1, "depth": 1, "scheme": "gpipe"},
    {"ranks": 2, "depth": 2, "scheme": "chimera", "micro_batches": 2},
    {"ranks": 4, "depth": 2, "scheme": "1f1b", "optimizer_sharding": "replicas"},
    {"ranks": 8, "depth": 8, "scheme": "1f1b", "micro_batches": 8},
    {"ranks": 8, "depth": 4, "scheme": "chimera_zb", "optimizer_sharding": "replicas"},
    {"ranks": 6, "depth": 3, "scheme": "zb_h1", "partition": (1, 3)},
]


@pytest.mark.mpi(8)
@pytest.mark.parametrize("saved", [{}, {"optimizer_sharding": "replicas", "tied": False}], ids=named)
def test_other_layouts_go_on_within_rounding(comm, saved):
    with scratch(comm) as folder:
        straight = train(comm, folder / "straight", **DEEP, **saved)
        for layout in LAYOUTS:
            name = named(layout)
            elsewhere = copied(comm, folder / "straight", folder / name)
            resumed = train(comm, elsewhere, resume="auto", **{"tied": saved.get("tied", True), **layout})
            if comm.rank == 0:
                np.testing.assert_allclose([*resumed.values()], [*straight.values()][STOP:], rtol=1e-12, err_msg=name)
                assert_close(*(found_in(folder / one)[0] for one in ("straight", name)))


def assert_close(*paths):
    """All tensors of two checkpoints."""
    for one, other in zip(*(read_checkpoint(path)[1] for path in paths), strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-7, atol=1e-12, msg=name)


@pytest.mark.mpi(4)
def test_a_stream_is_taken_up_by_a_step_and_a_step_by_a_stream(comm):
    """No law says what the losses are; each step is there once."""
    with scratch(comm) as folder:
        train(comm, folder / "a", scheme="pipedream", depth=2, tied=False)
        to = copied(comm, folder / "a", folder / "b")
        losses = train(comm, to, resume="auto", **CHIMERA, tied=False, steps=4)
        assert comm.rank or list(losses) == [3]
        losses = train(comm, to, resume="auto", scheme="pipedream", depth=4, tied=False, steps=9)
        assert comm.rank or (list(losses) == [4, 5, 6, 7, 8] and all(map(math.isfinite, losses.values())))


@pytest.mark.mpi(4)
def test_precisions_may_change(comm):
    with scratch(comm) as folder:
        straight = train(comm, folder, **CHIMERA)
        for precision, rtol in (("fp32", 1e-5), ("bf16", 3e-2)):
            to = copied(comm, folder, folder / precision)
            losses = train(comm, to, resume="auto", **CHIMERA, precision=precision)
            if comm.rank == 0:
                np.testing.assert_allclose([*losses.values()], [*straight.values()][STOP:], rtol=rtol)


@pytest.mark.mpi(4)
def test_where_no_layer_is_copied_the_bits_are_the_same(comm, monkeypatch):
    """A machine without memory to spare writes from where the weights are."""
    with scratch(comm) as folder:
        train(comm, folder / "copied", **CHIMERA)
        monkeypatch.setattr("chimera_mpi.saving.free_memory", lambda: 0.0)
        train(comm, folder / "not", **CHIMERA)
        for step in (STOP, STEPS):
            copied, written = (open_checkpoint(folder / name / f"step-{step:08d}") for name in ("copied", "not"))
            assert copied.files == written.files


@pytest.mark.mpi(4)
@pytest.mark.parametrize(("rank", "copied"), [(0, False), (3, True)])
def test_a_full_disk_on_one_rank_ends_all_ranks_alike(comm, monkeypatch, rank, copied):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with scratch(comm) as folder:
        train(comm, folder, **CHIMERA, steps=2)
        if not copied:
            monkeypatch.setattr("chimera_mpi.saving.free_memory", lambda: 0.0)
        if comm.rank == rank:
            monkeypatch.setattr(checkpoint, "_write", full)
        with pytest.raises(
            RunFailed, match=f"by rank {rank} .No space left on device.*step-00000002 is the last"
        ) as told:
            train_to_the_end(comm, folder, **CHIMERA, resume="auto")
        assert told.value.on_all and "\n" not in str(told.value)
        meet(comm)
        monkeypatch.undo()
        losses = train(comm, folder, **CHIMERA, resume="auto")
        assert comm.rank or list(losses) == [2, 3, 4, 5]


@pytest.mark.mpi(2)
def test_who_writes_still_when_another_cannot_leaves_nothing(comm, monkeypatch):
    written = checkpoint._write

    def slow(*arguments):
        time.sleep(0.02)
        written(*arguments)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with scratch(comm) as folder:
        train(comm, folder, depth=2, steps=2)
        monkeypatch.setattr("chimera_mpi.saving.free_memory", lambda: 1.0)  # so that it writes in the background
        monkeypatch.setattr(checkpoint, "_write", slow if comm.rank else full)
        with pytest.raises(RunFailed, match=r"by rank 0 .No space left on device"):
            train_to_the_end(comm, folder, depth=2, resume="auto")
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint"):
                thread.join()
        meet(comm)
        assert [path.name for path in folder.iterdir()] == ["step-00000002"]
        meet(comm)


def train_to_the_end(comm, folder, resume=None, log=None, **asked):
    """As `train` on all ranks, when it may fail: how it ended."""
    resumed = find(comm, resume, folder).checkpoint
    job = plan_job(Config(checkpoint=folder, **{**SMALL, **asked}), comm.size, resumed.step if resumed else 0)
    run = Run(comm, job, CORPUS, CORPUS, log=log, resumed=resumed)
    try:
        return run.run()
    finally:
        run.close()


class FullLog:
    path = Path("full.h5")

    def __getattr__(self, name):
        def refuse(*arguments, **options):
            raise RunFailed("full.h5 cannot be written")

        return refuse


@pytest.mark.mpi(4)
def test_a_log_that_cannot_be_written_stops_all_ranks_with_a_checkpoint(comm):
    with scratch(comm) as folder:
        end = train_to_the_end(comm, folder, log=None if comm.rank else FullLog(), **CHIMERA, checkpoint_every=1)
        assert end.code == 1
        assert comm.rank or end.reason.startswith("full.h5 cannot be written: stopped after 2 of 6 steps, saved in ")
        assert [path.name for path in found_in(folder)] == ["step-00000002", "step-00000001"]
        meet(comm)


@pytest.mark.mpi(4)
def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(comm):
    with scratch(comm) as folder:
        train(comm, folder, **CHIMERA)
        if comm.rank == 0:  # a file that the last rank looks at
            file = folder / f"step-{STEPS:08d}" / "layer-00007.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        meet(comm)
        choice = find(comm, "auto", folder)
        assert choice.checkpoint.step == STOP and "layer-00007.safetensors is damaged" in choice.passed_over[0]
        for asked in (folder, folder / f"step-{STEPS:08d}"):
            with pytest.raises(InputError, match=r"layer-00007.* is damaged.*try resume=.*step-00000003"):
                find(comm, str(asked), folder)
        assert find(comm, str(folder / f"step-{STOP:08d}"), None).checkpoint.step == STOP
        with pytest.raises(InputError, match=r"no checkpoint nowhere; /.* has no whole one beside it"):
            find(comm, "nowhere", folder)


OTHERS = [
    ({"hidden": 16}, "with hidden=8, not 16"),
    ({"layers": 4}, "with layers=6, not 4"),
    ({"tied": False}, "with tied=True, not False"),
    ({"seed": 1}, "with seed=0, not 1"),
    ({"optimizer": "sgd"}, "with optimizer=adamw, not sgd"),
    ({"mini_batch_size": 18}, "with mini_batch_size=16, not 18"),
]


@pytest.mark.mpi(2)
def test_another_run_is_refused_with_both_values(comm):
    with scratch(comm) as folder:
        train(comm, folder, depth=2, steps=1)
        for asked, message in OTHERS:
            with pytest.raises(InputError, match=message):
                train(comm, folder, depth=2, resume="auto", **asked)
