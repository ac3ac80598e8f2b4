"""Asynchronous schemes equal a one-process emulation of their delayed weights."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from case import Case, mini_batch, tiny
from torch.func import functional_call

from chimera_mpi.errors import InputError
from chimera_mpi.models import keyed_seed, make_layer
from chimera_mpi.predict import weight_versions
from chimera_mpi.predict.partition import cut_uniformly
from chimera_mpi.runtime.stage import Recompute
from chimera_mpi.schedule import Kind, Op, build, used_versions

RATE, MOMENTUM, SEED = 0.05, 0.9, 7


class Emulation:
    """Stage by stage the history of the weights; each micro-batch is computed with the versions the rule says."""

    def __init__(self, schedule, model):
        self.schedule, self.model = schedule, model
        self.owner = {copy: owner for owner, *copies in model.tied for copy in copies}
        self.versions = used_versions(schedule)
        self.ends = {max(indices) for indices in schedule.shares.values()}
        self.cuts = cut_uniformly(len(model.layers), schedule.stages)
        self.layers = [make_layer(model, i, SEED, dtype=torch.float64) for i in range(len(model.layers))]
        self.history = [[self._initial(cut)] for cut in self.cuts]
        self.momenta = [{name: torch.zeros_like(p) for name, p in history[0].items()} for history in self.history]

    def _initial(self, cut):
        named = {(i, name): p for i in cut for name, p in self.layers[i].named_parameters()}
        return {key: p.detach().clone() for key, p in named.items() if key not in self.owner}

    def run(self, batches):
        """`batches[n]` are the micro-batches n of all replicas; returns the losses and the final weights."""
        losses, sums, counts = [], None, 0
        for index, replicas in enumerate(batches):
            seen = [self._seen(stage, index) for stage in range(self.schedule.stages)]
            for number, (inputs, targets) in replicas:
                loss, count = self._loss(seen, number, inputs, targets)
                leaves = [p for stage in seen for p in stage.values()]
                gradients = torch.autograd.grad(loss, leaves)
                sums = list(gradients) if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
                counts = counts + count
                losses.append(loss.item())
            if index in self.ends:
                self._update([s / counts for s in sums])
                sums, counts = None, 0
        newest = {key: p for history in self.history for key, p in history[-1].items()}
        return losses, {**newest, **{copy: newest[owner] for copy, owner in self.owner.items()}}

    def _seen(self, stage, index):
        version = self.versions[Op(Kind.FORWARD, 0, stage, index)]
        return {name: p.clone().requires_grad_() for name, p in self.history[stage][version].items()}

    def _loss(self, seen, number, x, targets):
        for stage, cut in enumerate(self.cuts):
            for i in cut:
                torch.default_generator.manual_seed(keyed_seed(SEED, 0, number, i))
                names = (name for name, _ in self.layers[i].named_parameters())
                own = {name: seen[stage][self.owner.get((i, name), (i, name))] for name in names}
                x = functional_call(self.layers[i], own, (x,))
        return self.model.loss(x, targets)

    def _update(self, gradients):
        gradients = iter(gradients)
        for history, momenta in zip(self.history, self.momenta, strict=True):
            new = {}
            for name, p in history[-1].items():
                decayed = next(gradients) + (0.1 * p if p.dim() >= 2 else 0)
                momenta[name] = MOMENTUM * momenta[name] + decayed
                new[name] = p - RATE * momenta[name]
            history.append(new)


def streams():
    for scheme, depth, width in product(("pipedream", "pipedream_2bw"), (1, 2, 4), (1, 2)):
        for micro_batches in (depth, 2 * depth, 3 * depth + 1):
            name = f"{scheme}-D{depth}-N{micro_batches}-W{width}"
            yield pytest.param(build(scheme, depth, micro_batches), marks=pytest.mark.mpi(depth * width), id=name)


@pytest.mark.parametrize("schedule", list(streams()))
def test_equals_its_emulation(comm, schedule):
    check_stream(comm, schedule)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("scheme", ["pipedream", "pipedream_2bw"])
def test_recomputation_sees_the_version_of_its_forward(comm, scheme):
    check_stream(comm, build(scheme, 4, 9), recompute=Recompute("layer"))


@pytest.mark.mpi(1)
@pytest.mark.parametrize("scheme", ["pipedream", "pipedream_2bw"])
def test_all_names_of_a_parameter_see_one_version(comm, scheme):
    check_stream(comm, build(scheme, 1, 4), tied=True)


def check_stream(comm, schedule, rounds=1, tied=False, **options):
    model = tiny(dropout=0.1, tied=tied)
    case = Case(comm, schedule, model, **options)
    n, width = schedule.micro_batches, case.grid.width
    batches = [mini_batch(case.sizes, seed) for seed in range(rounds)]
    loss = 0.0
    for batch in batches:
        _, (sums,) = case.pipeline.run(case.feed(batch, 0), 0, lambda step: RATE)
        loss += case.total(sums.loss)[0]
    by_index = [[[(r * n + i, batch[r * n + i]) for r in range(width)] for i in range(n)] for batch in batches]
    losses, weights = case.share(lambda: emulate(schedule, model, by_index))
    np.testing.assert_allclose(loss, sum(losses), rtol=1e-12)
    for stage in case.pipeline.stages.values():
        for index in stage.indices:
            for name, parameter in stage.layer(index).named_parameters():
                torch.testing.assert_close(parameter.detach(), weights[index, name], rtol=1e-12, atol=1e-14)
    held = max(getattr(weights, "most_held", 1) for weights in case.pipeline.worker.weights.values())
    assert held == weight_versions(schedule)[case.grid.worker]


def emulate(schedule, model, rounds):
    emulation = Emulation(schedule, model)
    losses = []
    for batches in rounds:
        emulation.history = [history[-1:] for history in emulation.history]
        of_round, weights = emulation.run(batches)
        losses += of_round
    return losses, weights


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["pipedream", "pipedream_2bw"])
def test_a_second_stream_goes_on_from_the_first(comm, scheme):
    check_stream(comm, build(scheme, 2, 6), rounds=2)


@pytest.mark.mpi(4)
def test_replicas_of_a_stream_stay_equal(comm):
    case = Case(comm, build("pipedream_2bw", 2, 8))
    for seed in range(3):
        case.pipeline.run(case.feed(mini_batch(case.sizes, seed), seed), seed, lambda step: RATE)
    named = (pair for stage in case.pipeline.stages.values() for pair in stage.named_parameters())
    mine = {name: p.detach().numpy().tobytes() for name, p in named}
    everyone = comm.allgather((case.grid.worker, mine))
    assert sum(worker == case.grid.worker for worker, _ in everyone) == 2
    assert all(theirs == mine for worker, theirs in everyone if worker == case.grid.worker)


@pytest.mark.mpi(2)
def test_tied_weights_are_refused(comm):
    with pytest.raises(InputError, match=r"pipedream holds its stages at several versions.*tied=false"):
        Case(comm, build("pipedream", 2, 4), tiny(tied=True))
