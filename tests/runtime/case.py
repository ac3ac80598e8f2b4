"""A small GPT under a schedule, beside one process on the whole mini-batch, in float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from mpi4py import MPI
from serial import Serial

from chimera_mpi.data import even_sizes
from chimera_mpi.models import GPT, gpt
from chimera_mpi.predict import peak_activations
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.mailbox import Delivery, Spec
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.pipeline import Pipeline, Settings
from chimera_mpi.runtime.worker import Feed, MicroBatch

TOKENS, VOCABULARY = 5, 11
RECIPE = Recipe("sgd", momentum=0.9)


def tiny(tied=False, dropout=0.0, layers=6):
    return gpt(GPT(layers, hidden=8, heads=2, vocabulary=VOCABULARY, positions=TOKENS, tied=tied, dropout=dropout))


def mini_batch(sizes, seed=0, mask=0.3):
    """Micro-batches of the given sizes; a share of the targets is masked."""
    rng = torch.Generator().manual_seed(seed)
    for size in sizes:
        ids = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=rng)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=rng) < mask] = -100
        yield ids[:, :-1].contiguous(), targets


_grids: dict[tuple[int, int], Grid] = {}


def grid_of(comm, depth):
    """Communicators cost more than a step of so small a model: keep them."""
    if (comm.size, depth) not in _grids:
        _grids[comm.size, depth] = Grid(comm, depth)
    return _grids[comm.size, depth]


class Case:
    """A pipeline on `comm`, and the serial run that it must equal.

    The mini-batch has one sample less than would make its micro-batches equal.
    """

    def __init__(self, comm, schedule, model=None, samples=None, delivery=Delivery(), clip=None, recipe=RECIPE):
        model = model or tiny()
        self.schedule, self.grid = schedule, grid_of(comm, schedule.depth)
        all_micro_batches = schedule.micro_batches * self.grid.width
        self.sizes = even_sizes(samples or max(2 * all_micro_batches - 1, all_micro_batches), all_micro_batches)
        self.first = self.grid.replica * schedule.micro_batches
        inputs = [[Spec((self.sizes[self.first + n], TOKENS), torch.int64)] for n in range(schedule.micro_batches)]
        settings = Settings(7, torch.float64, recipe, clip, delivery)
        self.pipeline = Pipeline(self.grid, schedule, model, inputs, settings)
        self.serial = Serial(model, 7, torch.float64, recipe, clip)

    def feed(self, batch, step):
        def micro_batch(index):
            inputs, targets = batch[self.first + index]
            return MicroBatch((inputs,), targets, self.first + index)

        return Feed(step, micro_batch)

    def total(self, *numbers):
        """Their sums over all ranks."""
        totals = np.array(numbers)
        self.pipeline.patience.wait(self.grid.world.Iallreduce(MPI.IN_PLACE, totals))
        return totals

    def run(self, steps=2):
        for step in range(steps):
            batch = list(mini_batch(self.sizes, seed=step))
            spans, sums = self.pipeline.step(self.feed(batch, step), 0.1)
            assert [span.op for span in spans] == list(self.schedule.orders[self.grid.worker])
            assert self.pipeline.worker.stash.peak == peak_activations(self.schedule)[self.grid.worker]
            loss, targets, square_norm = self.total(sums.loss, sums.targets, sums.square_norm)
            serial_loss, serial_norm = self.serial.step(batch, 0.1, step)
            assert math.isclose(loss / targets, serial_loss, rel_tol=1e-12)
            assert math.isclose(math.sqrt(square_norm), serial_norm, rel_tol=1e-12)
        self.assert_equal()

    def assert_equal(self):
        for stage in self.pipeline.stages.values():
            for index in stage.indices:
                mine = dict(stage.layer(index).named_parameters())
                for name, theirs in self.serial.layers[index].named_parameters(remove_duplicate=False):
                    torch.testing.assert_close(mine[name], theirs, rtol=1e-12, atol=1e-14)
