"""A run that goes on in another layout, from what its ranks hold, equals one that nothing has interrupted.

Nobody dies here: some ranks leave, and the others do as if those had died.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from mpi4py import MPI

from chimera_mpi.checkpoint import found_in
from chimera_mpi.config import Config
from chimera_mpi.runtime.handover import Handover
from chimera_mpi.runtime.waiting import Patience
from chimera_mpi.stopping import AGAIN
from chimera_mpi.survival import Survival
from chimera_mpi.train import Run, plan_job

from .test_resume import CORPUS, SMALL, STEPS, STOP, scratch

PATIENCE = Patience(50e-6)
ASKED = {**SMALL, "checkpoint_every": None, "dropout": 0.1, "message_limit_bytes": 100, "watchdog_s": None}


class Crew:
    """Those who are left, of whom nobody leaves any more."""

    patience = PATIENCE

    def __init__(self, comm):
        self.comm, self.ranks = comm, range(comm.size)

    def limited(self, what):
        return nullcontext()

    def seated(self, seats):
        is_in = self.comm.rank in seats
        part = self.comm.Split(int(not is_in), seats.index(self.comm.rank) if is_in else 0)
        return part if is_in else None


def launch(losses, comm, job, begun, recovery):
    tell = lambda progress: losses.update({progress.step: progress.loss})  # noqa: E731
    return Run(comm, job, CORPUS, CORPUS, tell=tell, resumed=begun)


def begun_on(comm, job, losses, steps):
    """A run of which some steps are done, on the ranks that have a seat in it."""
    seats = job.width * job.plan.schedule.depth
    part = comm.Split(int(comm.rank >= seats), comm.rank)
    if comm.rank >= seats:
        return None
    run = launch(losses, part, job, None, None)
    for step in range(steps):
        run._advance(range(step, step + 1))
    return run


def take_a_step(run, is_behind):
    """After which one that `is_behind` has been interrupted while it waited for the norm, for which all have come."""
    worker = run.pipeline.worker
    judge, heed = worker.norm.judge, worker.norm.heed

    def interrupted(*mine):
        worker.norm.heed = lambda *total: 1.0
        judge(*mine)
        worker.norm.heed = heed
        raise MPI.Exception(MPI.ERR_PENDING)

    worker.norm.judge = interrupted if is_behind else judge
    try:
        run.pipeline.run(run.part.feed(run.read, STOP), STOP, run.learning_rate)
    except RuntimeError:
        assert is_behind
        worker.mailbox.abandon()


def finished(run, losses):
    """Losses by step, on the first rank, and there what it has of all layers in the end."""
    run.run()
    run.pipeline.check_replicas()
    return losses, run.pipeline.layers()


CHIMERA = {"scheme": "chimera", "depth": 2}
CASES = {  # the ranks that stay, and how many stood by
    "fewer groups": (CHIMERA, (0, 2, 3), 0),
    "the first leaves": (CHIMERA, (1, 2, 3), 0),
    "two leave": ({"scheme": "1f1b", "depth": 1}, (1, 3), 0),
    "shallower": ({"scheme": "chimera", "depth": 4}, (0, 1, 3), 0),
    "spare ranks": (CHIMERA, (0, 2, 3), 2),
    "some are behind": (CHIMERA, (0, 2, 3), 0),
}


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", CASES)
def test_those_who_stay_go_on_as_if_nothing_had_been(comm, name):
    asked, stays, spares = CASES[name]
    job = plan_job(Config(**{**ASKED, **asked}), comm.size - spares)
    losses, expected = {}, {}
    undisturbed = begun_on(comm, job, expected, steps=0)
    whole = comm.bcast(finished(undisturbed, expected) if undisturbed else None)
    run = begun_on(comm, job, losses, steps=STOP)
    if name == "some are behind":
        take_a_step(run, is_behind=comm.rank in (0, 3))
    left = comm.Split(int(comm.rank not in stays), comm.rank)
    if comm.rank in stays:
        begin = partial(launch, losses)
        survival = Survival(Crew(left), job, begin, note=print, resumed=None, room_bytes=lambda: 1e9, run=run)
        gone = tuple(set(range(comm.size)) - set(stays))
        assert survival._go_on(gone, time.monotonic()) is None
        if survival._built is not None:
            compare(finished(survival._built, losses), whole, to_the_bit=spares > 0)


@pytest.mark.mpi(4)
def test_a_checkpoint_that_is_there_is_not_written_again(comm):
    job = plan_job(Config(**{**ASKED, **CHIMERA}), 2)
    with scratch(comm) as folder:
        job = replace(job, config=job.config.model_copy(update={"checkpoint": folder}))
        run = begun_on(comm, job, {}, steps=1)
        if run:
            run.save(1, wait=True)
            run.saver.close()
        if comm.rank == 0:  # of two, and chimera needs two
            note, room_bytes = (lambda job, recovery: None), (lambda: 1e9)
            survival = Survival(Crew(MPI.COMM_SELF), job, launch, note, resumed=None, room_bytes=room_bytes, run=run)
            end = survival._go_on((1,), time.monotonic())
            assert (end.code, "stopped after 1 steps, saved in" in end.reason) == (AGAIN, True)
            assert [path.name for path in found_in(folder)] == ["step-00000001"]


def compare(found, whole, to_the_bit):
    (losses, layers), (expected, wanted) = found, whole
    if layers is None:
        return
    rtol = 0 if to_the_bit else 1e-10
    assert STEPS - 1 in losses
    assert np.allclose([losses[step] for step in losses], [expected[step] for step in losses], rtol=rtol, atol=0)
    for layer, other in zip(layers, wanted, strict=True):
        assert all(torch.allclose(layer[name], other[name], rtol=rtol, atol=rtol * 1e-3) for name in other)


@pytest.mark.mpi(2)
def test_a_layer_arrives_as_it_was_given(comm):
    handover = Handover(comm, PATIENCE, limit_bytes=16)
    state = {"weights/a": torch.arange(12.0).view(3, 4).T, "step": torch.tensor(3.0), "half": torch.ones(5).bfloat16()}
    if comm.rank == 0:
        handover.give(7, state, 1)
        handover.give(2, {"empty": torch.empty(0)}, 1)
    else:
        assert handover.take(2, 0)["empty"].shape == (0,)
        taken = handover.take(7, 0)
        assert [t.dtype for t in taken.values()] == [t.dtype for t in state.values()]
        assert all(torch.equal(taken[name], tensor) for name, tensor in state.items())
    handover.finish()
