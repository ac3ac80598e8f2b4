"""A small GPT under a schedule, beside one process on the whole mini-batch, in float64."""

from __future__ import annotations

import io
import math
import pickle
from functools import cache, lru_cache

import numpy as np
import torch
from mpi4py import MPI
from serial import Serial, as_tuple

from chimera_mpi.data import even_sizes
from chimera_mpi.models import GPT, gpt
from chimera_mpi.predict import peak_activations
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.mailbox import Spec
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.pipeline import Pipeline, Settings
from chimera_mpi.runtime.worker import MicroBatch

TOKENS, VOCABULARY = 5, 11
RECIPE = Recipe("sgd", momentum=0.9)


@cache
def tiny(tied=False, dropout=0.0, layers=6):
    return gpt(GPT(layers, hidden=8, heads=2, vocabulary=VOCABULARY, positions=TOKENS, tied=tied, dropout=dropout))


@lru_cache(maxsize=64)
def mini_batch(sizes, seed=0):
    """Micro-batches (inputs, targets) of the given sizes; three targets in ten are masked."""
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        ids = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=rng)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=rng) < 0.3] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


_grids: dict[tuple, Grid] = {}


def grid_of(comm, depth, kind=Grid):
    """Communicators cost more than a step of so small a model: keep them."""
    if (comm.size, depth, kind) not in _grids:
        _grids[comm.size, depth, kind] = kind(comm, depth)
    return _grids[comm.size, depth, kind]


class Case:
    """A pipeline on `comm`, and the serial run that it must equal.

    The mini-batch has one sample less than would make its micro-batches equal. `data(sizes, step)` are its
    micro-batches (inputs, targets): inputs are a tensor or a tuple of them.
    """

    def __init__(
        self,
        comm,
        schedule,
        model=None,
        samples=None,
        dtype=torch.float64,
        data=mini_batch,
        grid=Grid,
        **settings,
    ):
        model = model or tiny()
        self.schedule, self.grid = schedule, grid_of(comm, schedule.depth, grid)
        all_micro_batches = schedule.micro_batches * self.grid.width
        self.sizes = even_sizes(samples or max(2 * all_micro_batches - 1, all_micro_batches), all_micro_batches)
        self.first = self.grid.replica * schedule.micro_batches
        self.data = data
        mine = data(self.sizes, 0)[self.first : self.first + schedule.micro_batches]
        inputs = [[Spec(tuple(t.shape), t.dtype) for t in as_tuple(entering)] for entering, _ in mine]
        settings = {"recipe": RECIPE, **settings}
        self.pipeline = Pipeline(self.grid, schedule, model, inputs, Settings(7, dtype, **settings))
        self.serial = model, self.sizes, settings["recipe"], settings.get("clip")

    def feed(self, batch, step):
        def micro_batch(index):
            number = self.first + index
            return MicroBatch(step, number, lambda: (as_tuple(batch[number][0]), batch[number][1]))

        return micro_batch

    def total(self, *numbers):
        """Their sums over all ranks."""
        totals = np.array(numbers)
        self.pipeline.patience.wait(self.grid.world.Iallreduce(MPI.IN_PLACE, totals))
        return totals

    def run(self, steps=2, rtol=1e-12):
        found = []
        for step in range(steps):
            batch = self.data(self.sizes, step)
            spans, (sums,) = self.pipeline.run(self.feed(batch, step), step, lambda step: 0.1)
            assert [span.op for span in spans] == list(self.schedule.orders[self.grid.worker])
            assert self.pipeline.worker.stash.peak == peak_activations(self.schedule)[self.grid.worker]
            loss, targets, square_norm = self.total(sums.loss, sums.targets, sums.square_norm)
            found += [loss / targets, math.sqrt(square_norm)]
        figures, weights = self.share(lambda: serial_run(*self.serial, steps, self.data))
        np.testing.assert_allclose(found, figures, rtol=rtol)
        for stage in self.pipeline.stages.values():
            for index in stage.indices:
                for name, parameter in stage.layer(index).named_parameters():
                    torch.testing.assert_close(
                        parameter.detach().cpu(), weights[index][name], rtol=rtol, atol=rtol * 1e-2
                    )

    def share(self, compute):
        """What `compute` returns on the first rank, on all."""
        world, patience = self.grid.world, self.pipeline.patience
        blob = np.frombuffer(pickled(compute()), dtype=np.uint8).copy() if world.rank == 0 else None
        size = np.array([len(blob) if blob is not None else 0])
        patience.wait(world.Ibcast(size))
        blob = np.empty(size[0], dtype=np.uint8) if blob is None else blob
        patience.wait(world.Ibcast(blob))
        return pickle.loads(blob.tobytes())


class Pickler(pickle.Pickler):
    """Tensors as arrays, in a tenth of the time that torch takes to make a file of each."""

    def reducer_override(self, value):
        return (torch.tensor, (value.numpy(),)) if type(value) is torch.Tensor else NotImplemented


def pickled(value):
    blob = io.BytesIO()
    Pickler(blob).dump(value)
    return blob.getvalue()


def cancel(mailbox):
    """End the receives of a step that a test leaves unfinished, so that they take nothing from the next one's."""
    for arrival in mailbox._arriving.values():
        for request in arrival.requests:
            request.Cancel()
            request.Wait()


@lru_cache(maxsize=64)
def serial_run(model, sizes, recipe, clip, steps, data=mini_batch):
    """The losses and gradient norms of one process, and its weights by layer and name afterwards."""
    serial = Serial(model, 7, torch.float64, recipe, clip)
    figures = [figure for step in range(steps) for figure in serial.step(data(sizes, step), 0.1, step)]
    named = ({n: p.detach() for n, p in layer.named_parameters(remove_duplicate=False)} for layer in serial.layers)
    return figures, list(named)
