"""Every synchronous scheme equals one process on the whole mini-batch, in float64, whatever else is asked of it."""

from __future__ import annotations

import gc
import math
import random
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from case import Case, cancel, mini_batch, tiny
from mpi4py import MPI
from serial import Serial

from chimera_mpi.errors import InputError
from chimera_mpi.models import Model
from chimera_mpi.runtime.mailbox import Delivery
from chimera_mpi.runtime.optimizer import Recipe
from chimera_mpi.runtime.stage import Recompute
from chimera_mpi.schedule import SCHEMES, STREAMS, Kind, ScheduleError, build, loads

ADAMW = Recipe("adamw")


def buildable(depth, micro_batches, model=None):
    """A schedule of every synchronous scheme that can have this shape, and no more stages than the model layers."""
    for scheme in SCHEMES:
        try:
            schedule = build(scheme, depth, micro_batches)
        except ScheduleError:
            continue
        if scheme not in STREAMS and schedule.stages <= len((model or tiny()).layers):
            yield schedule


PAPER = ("naive", "gpipe", "1f1b", "gems", "chimera")


def shapes():
    """With 1, 2 and 4 workers and 1 and 2 replicas: the paper's schemes with N up to 2D + 1 in one, else with a few."""
    for depth, width in product((1, 2, 4), (1, 2)):
        several = (1, depth, 2 * depth + 1)
        of_paper, of_others = (range(1, 2 * depth + 2), several) if width == 1 else (several, (depth + 1,))
        for micro_batches in range(1, 2 * depth + 2):
            for schedule in buildable(depth, micro_batches):
                if micro_batches in (of_paper if schedule.scheme in PAPER else of_others):
                    name = f"{schedule.scheme}-D{depth}-N{micro_batches}-W{width}"
                    yield pytest.param(schedule, marks=pytest.mark.mpi(depth * width), id=name)


@pytest.mark.parametrize("schedule", list(shapes()))
def test_equals_one_process(comm, schedule):
    Case(comm, schedule).run()


def every_scheme(depth, micro_batches):
    return pytest.mark.parametrize("schedule", list(buildable(depth, micro_batches)), ids=lambda s: s.scheme)


@pytest.mark.mpi(4)
@every_scheme(4, 4)
def test_tied_weights(comm, schedule):
    Case(comm, schedule, tiny(tied=True)).run(steps=3)


@pytest.mark.mpi(4)
@every_scheme(2, 3)
def test_tied_weights_of_two_replicas(comm, schedule):
    Case(comm, schedule, tiny(tied=True)).run(steps=3)


@pytest.mark.mpi(1)
@every_scheme(1, 2)
def test_tied_weights_of_one_stage(comm, schedule):
    Case(comm, schedule, tiny(tied=True)).run(steps=3)


@pytest.mark.mpi(4)
@every_scheme(4, 4)
def test_dropout_draws_by_rule(comm, schedule):
    Case(comm, schedule, tiny(dropout=0.5)).run()


@pytest.mark.mpi(4)
@every_scheme(4, 3)
def test_clipping_uses_the_norm_of_the_whole_model(comm, schedule):
    Case(comm, schedule, tiny(tied=True), clip=0.1).run(steps=3)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_number_of_micro_batches_changes_nothing(comm, micro_batches):
    for schedule in buildable(2, micro_batches):
        if schedule.scheme in PAPER or micro_batches in (3, 12):
            Case(comm, schedule, samples=24).run(steps=1)


@pytest.mark.mpi(4)
def test_pairs_of_pipelines(comm):
    for micro_batches in (1, 4, 6, 8):
        for scheme in ("chimera", "chimera_zb"):
            Case(comm, build(scheme, 4, micro_batches, pairs=2), tiny(tied=True)).run()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("recompute", [Recompute("stage"), Recompute("layer"), Recompute("layer", 3)], ids=str)
def test_recomputation_changes_nothing(comm, recompute):
    for schedule in buildable(4, 3):
        Case(comm, schedule, tiny(dropout=0.5), recompute=recompute).run(steps=1)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("options", [{"concat": "doubling"}, {"concat": "halving"}, {"pairs": 2}], ids=str)
def test_options_of_chimera(comm, options):
    for micro_batches in (2, 8, 12):
        Case(comm, build("chimera", 4, micro_batches, **options)).run(steps=1)


@pytest.mark.mpi(2)
def test_several_stages_a_worker(comm):
    for schedule in (build("interleaved", 2, 4, chunks=4), build("hanayo", 2, 5, waves=2)):
        Case(comm, schedule, tiny(tied=True)).run()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("sync", ["lazy", "eager", "eager_opt"])
def test_when_the_gradients_are_summed_changes_nothing(comm, sync):
    Case(comm, build("chimera", 4, 6, sync=sync)).run()


@pytest.mark.parametrize("depth", [pytest.param(depth, marks=pytest.mark.mpi(depth)) for depth in (2, 4, 8)])
def test_synchronous_sends_do_not_deadlock(comm, depth):
    for micro_batches in (1, depth - 1, depth, depth + 1, 2 * depth, 3 * depth):
        for schedule in buildable(depth, micro_batches):
            if schedule.scheme in PAPER or micro_batches == depth + 1:
                Case(comm, schedule, delivery=Delivery(synchronous=True)).run(steps=1)


@pytest.mark.mpi(4)
def test_messages_in_pieces_and_verified(comm):
    for schedule in buildable(4, 5):
        Case(comm, schedule, delivery=Delivery(ahead=1, limit_bytes=100, verify=True)).run(steps=1)


UPDATE_AMID = """\
0F0,1F1@1,2F0,3F1@1,3B1@1,3R0@1,3U0@1,2B0,2R0,1B1@1,1R0@1,0B0,0R0,2U0,1U0@1,0U0
0F1@1,1F0,2F1@1,3F0,3B0,2B1@1,3R0,2R0@1,1B0,1R0,0B1@1,0R0@1,3U0,2U0@1,1U0,0U0@1
"""


@pytest.mark.mpi(2)
@pytest.mark.parametrize("shared_from_bytes", [1, math.inf])
def test_sums_go_on_while_a_worker_waits_for_a_message(comm, shared_from_bytes):
    """Worker 1 waits for what worker 0 makes after an update, for which worker 1 has to add up its share."""
    case = Case(comm, loads(UPDATE_AMID), shared_from_bytes=shared_from_bytes)
    worker = case.pipeline.worker
    wait, act = worker._handlers[Kind.BACKWARD]
    worker._handlers[Kind.BACKWARD] = wait, lambda *op: time.sleep(0.2 * (comm.rank == 0)) or act(*op)
    case.run(steps=1)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("seed", range(20))
def test_random_pauses_change_nothing(comm, seed):
    schedules = list(buildable(4, 4))
    case = Case(comm, schedules[seed % len(schedules)])
    chance = random.Random(f"{seed} {comm.rank}")
    handlers = case.pipeline.worker._handlers
    for kind, (wait, act) in handlers.items():
        handlers[kind] = wait, partial(pause_before, chance, act)
    case.run(steps=1)


def pause_before(chance, act, op, received):
    if chance.random() < 0.3:
        time.sleep(chance.random() * 2e-3)
    act(op, received)


def frozen(model: Model, layers) -> Model:
    def freeze(factory):
        return factory().requires_grad_(False)

    factories = (partial(freeze, f) if i in layers else f for i, f in enumerate(model.layers))
    return replace(model, layers=tuple(factories))


@pytest.mark.mpi(2)
def test_a_micro_batch_is_read_once_and_let_go_of(comm):
    """Both ends of the pipeline are on the first worker."""
    case, read = Case(comm, build("zb_v", 2, 4)), []
    feed = case.feed(mini_batch(case.sizes), 0)

    def noting(index):
        batch = feed(index)
        return replace(batch, read=lambda: read.append(batch) or batch.read())

    for act in (partial(case.pipeline.run, noting, 0, lambda step: 0.1), partial(case.pipeline.evaluate, noting, 0)):
        act()
        assert len(read) == 4 * (comm.rank == 0)
        held = list(map(weakref.ref, read))
        read.clear()
        gc.collect()
        assert not any(ref() for ref in held)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("layers", [(0,), (3,), (0, 1, 2, 3), (7,), (0, 7)], ids=str)
def test_frozen_layers_and_stages(comm, layers):
    model = frozen(tiny(), layers)
    for schedule in buildable(4, 4):
        Case(comm, schedule, model).run()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("layers", [(0,), (7,)], ids=str)
def test_a_tied_weight_frozen_at_one_end_is_refused(comm, layers):
    with pytest.raises(InputError, match=r"tokens.weight of layer 0 is tied to output.weight of layer 7, but not all"):
        Case(comm, build("1f1b", 2, 2), frozen(tiny(tied=True), layers))


@pytest.mark.mpi(4)
def test_replicas_stay_equal_to_the_bit(comm):
    case = Case(comm, build("chimera", 2, 2), tiny(tied=True, dropout=0.1), recipe=ADAMW, clip=1.0)
    batch = mini_batch(case.sizes)
    for step in range(300):
        case.pipeline.run(case.feed(batch, step), step, lambda step: 0.01)
    mine = {name: p.detach().numpy().tobytes() for name, p in named_parameters(case.pipeline)}
    everyone = comm.allgather(mine)
    for other in everyone:
        assert all(mine[name] == value for name, value in other.items() if name in mine)
    assert mine["layer 0 tokens.weight"] == mine["layer 7 output.weight"]


@pytest.mark.mpi(4)
@every_scheme(2, 4)
def test_replicas_that_drift_apart_are_found(comm, schedule):
    case = Case(comm, schedule)
    case.pipeline.check_replicas()
    if comm.rank == 1:
        next(iter(case.pipeline.stages.values())).layers[0].register_parameter(
            "drift", torch.nn.Parameter(torch.ones(()))
        )
    drifted = next(iter(case.pipeline.stages))[1] if comm.rank == 1 else None
    stage = comm.bcast(drifted, root=1)
    if stage in {s for _, s in case.pipeline.stages}:
        with pytest.raises(RuntimeError, match=f"the replicas of stage {stage} differ"):
            case.pipeline.check_replicas()


def named_parameters(pipeline):
    for stage in pipeline.stages.values():
        for index in stage.indices:
            for name, parameter in stage.layer(index).named_parameters():
                yield f"layer {index} {name}", parameter


@pytest.mark.mpi(4)
def test_nothing_is_kept_between_steps(comm):
    case = Case(comm, build("chimera", 4, 8))
    batch = mini_batch(case.sizes)
    counts = []
    for step in range(6):
        case.pipeline.run(case.feed(batch, step), step, lambda step: 0.01)
        counts.append(sum(torch.is_tensor(thing) for thing in live_objects()))
    assert len(set(counts[2:])) == 1


def live_objects():
    import gc

    gc.collect()
    return gc.get_objects()


@pytest.mark.mpi(2)
def test_evaluation_equals_the_loss_of_one_process(comm):
    case = Case(comm, build("chimera", 2, 3), tiny(dropout=0.5))
    batch = mini_batch(case.sizes)
    sums = case.pipeline.evaluate(case.feed(batch, 0), 0)
    loss, targets = case.total(sums.loss, sums.targets)
    assert loss / targets == pytest.approx(Serial(tiny(dropout=0.5), 7).evaluate(batch), rel=1e-12)


@pytest.mark.mpi(4)
def test_all_reduces_start_in_one_order_on_every_communicator(comm):
    for schedule in buildable(4, 3):
        case = Case(comm, schedule, tiny(tied=True))
        started = []
        for buckets in case.pipeline.worker.gradients._of_place.values():
            for bucket in buckets:
                bucket.sum.comm = Recording(bucket.sum.comm, started)
        batch = mini_batch(case.sizes)
        case.pipeline.run(case.feed(batch, 0), 0, lambda step: 0.01)
        of_rank = comm.allgather(started)
        for one, other in product(of_rank, repeat=2):
            shared = set(one) & set(other)
            assert [c for c in one if c in shared] == [c for c in other if c in shared]


class Recording:
    """A communicator that remembers its all-reduces by its members' ranks."""

    def __init__(self, comm, started):
        self.comm, self.started = comm, started
        ranks = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group) if comm.size > 1 else [comm.rank]
        self.members = tuple(ranks)

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Iallreduce(self, *arguments):
        self.started.append(self.members)
        return self.comm.Iallreduce(*arguments)


@pytest.mark.mpi(2)
def test_a_failing_op_is_named(comm):
    case = Case(comm, build("1f1b", 2, 1))
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=r"step 3, worker 0, stage 0 of pipeline 0, op 0F0"):
            case.pipeline.run(case.feed([], 3), 3, lambda step: 0.1)
        cancel(case.pipeline.worker.mailbox)


@pytest.mark.mpi(2)
def test_a_tensor_of_another_shape_is_not_sent(comm):
    pipeline = Case(comm, build("1f1b", 2, 1)).pipeline
    mailbox = pipeline.worker.mailbox
    op = pipeline.schedule.orders[0][0]
    if comm.rank == 0:
        with pytest.raises(TypeError, match=r"0F0 made .*float32"):
            mailbox.send(op, (torch.zeros(1, 5, 8, dtype=torch.float32),))
