"""What lies between a device and MPI: nothing is read before it is there, nothing is used again before it is free.

The device is one in host memory whose copies come late: `late.py`.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
from case import Case, tiny
from late import LateClock, LateStreams
from mpi4py import MPI
from test_laws import every_scheme

from chimera_mpi.runtime.clock import DeviceStopwatch, Stopwatch
from chimera_mpi.runtime.mailbox import Delivery, Mailbox
from chimera_mpi.runtime.reduction import StagedSum
from chimera_mpi.runtime.staging import DONE, DeviceAware, Direct, Pool, Spec, ThroughHost
from chimera_mpi.runtime.waiting import Patience
from chimera_mpi.schedule import Kind, Op, build

SPEC = Spec((3, 5), torch.float32)
VERY_LATE = 10**5
WAYS = [
    pytest.param(ThroughHost, id="through host"),
    pytest.param(DeviceAware, id="device-aware"),
    pytest.param(lambda streams: DeviceAware(streams, sums_on_device=False), id="sums through host"),
]


def late(comm, way):
    return way(LateStreams(comm.rank))


@pytest.mark.mpi(4)
@every_scheme(4, 5)
def test_every_scheme(comm, schedule):
    Case(comm, schedule, tiny(tied=True), clip=0.1, staging=late(comm, ThroughHost), bucket_bytes=500).run()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_v", "dualpipe"])
def test_two_replicas(comm, scheme, way):
    staging = late(comm, way)
    schedule = build(scheme, 2, 4)
    case = Case(comm, schedule, tiny(tied=True, dropout=0.5), staging=staging, bucket_bytes=500)
    sums = [b.sum for buckets in case.pipeline.worker.gradients._of_place.values() for b in buckets]
    assert {type(each) for each in sums} == {StagedSum}
    case.run(steps=3)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"shared_from_bytes": 1}], ids=str)
@pytest.mark.parametrize("scheme", ["1f1b", "zb_v"])
def test_shares(comm, scheme, options, way):
    staging = late(comm, way)
    case = Case(comm, build(scheme, 2, 3), tiny(tied=True), clip=0.1, staging=staging, sharded=True, **options)
    case.run(steps=3)
    case.pipeline.close()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("way", WAYS)
def test_shared_memory_and_hasty_messages(comm, way):
    """Replicas that sum in shared memory, and messages in pieces whose sends end with their receives."""
    for delivery in (Delivery(synchronous=True, limit_bytes=100), Delivery(verify=True), Delivery(ahead=1)):
        staging = late(comm, way)
        case = Case(comm, build("chimera", 2, 4), staging=staging, delivery=delivery, shared_from_bytes=1)
        case.run(steps=3)
        case.pipeline.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("way", WAYS)
def test_streams_of_versions(comm, way):
    from test_streams import check_stream

    check_stream(comm, build("pipedream", 2, 6), staging=late(comm, way))
    check_stream(comm, build("pipedream_2bw", 2, 8), staging=late(comm, way))


class Recorder:
    """A communicator that looks at memory when it is handed over, and completes nothing by itself."""

    rank = 0

    def __init__(self, allows=lambda address, nbytes: True):
        self.sent, self.received, self.allows = [], [], allows

    def Get_attr(self, key):
        return None

    def Isend(self, piece, target, tag):
        assert self.allows(piece.address, piece.nbytes), "MPI got memory that it cannot read"
        self.sent.append((tag, torch.frombuffer(bytearray(bytes(piece)), dtype=torch.float32)))
        return MPI.REQUEST_NULL

    def Irecv(self, piece, source, tag):
        assert self.allows(piece.address, piece.nbytes), "MPI got memory that it cannot write"
        self.received.append(torch.frombuffer(piece, dtype=torch.float32))
        return MPI.REQUEST_NULL


def first_worker(comm, staging):
    """The mailbox of the first of two workers, and the four forwards that it sends."""
    mailbox = Mailbox(comm, build("gpipe", 2, 4), lambda op: (SPEC,), Patience(0.0), Delivery(), staging)
    return mailbox, [Op(Kind.FORWARD, 0, 0, n) for n in range(4)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("way", WAYS)
def test_messages_leave_in_order_and_with_their_values(seed, way):
    streams = LateStreams(seed)
    comm = Recorder(streams.is_pinned if way is ThroughHost else lambda address, nbytes: True)
    mailbox, ops = first_worker(comm, way(streams))
    for number, op in enumerate(ops):
        mailbox.send(op, (torch.full(SPEC.shape, float(number)),))
    mailbox.push()
    assert [set(values.tolist()) for _, values in comm.sent] == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert [tag for tag, _ in comm.sent] == [mailbox._routes[op].tags[0] for op in ops]


def test_a_message_leaves_once_its_tensor_is_ready():
    comm = Recorder()
    mailbox, ops = first_worker(comm, DeviceAware(LateStreams(asks=VERY_LATE)))
    mailbox.send(ops[0], (torch.zeros(SPEC.shape),))
    mailbox.send(ops[1], (torch.ones(SPEC.shape),))
    later = mailbox._unsent[1].outgoing
    later.computed.synchronize()
    mailbox._unsent[0].outgoing.computed.done = False  # the one behind it is ready sooner
    mailbox.poke()
    assert comm.sent == []
    mailbox._unsent[0].outgoing.computed.done = True
    mailbox.poke()
    assert len(comm.sent) == 2


def test_a_tensor_overwritten_before_it_is_ready_is_found_out():
    mailbox, ops = first_worker(Recorder(), DeviceAware(LateStreams(asks=VERY_LATE)))
    tensor = torch.zeros(SPEC.shape)
    with pytest.raises(RuntimeError, match="0F0 made was written to"):
        mailbox.send(ops[0], (tensor,))
        tensor.add_(1)
        mailbox._unsent[0].outgoing.computed.synchronize()
        mailbox.poke()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_received_is_there_once_it_is_taken(way):
    streams = LateStreams(5)
    staging = way(streams)
    for number in range(20):
        incoming = staging.arriving(SPEC)
        incoming.tensor.fill_(number)
        if number % 3:
            incoming.hasten()
        taken = incoming.take()
        assert (taken == number).all()
        assert taken.data_ptr() != incoming.tensor.data_ptr()  # which the next message may fill


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_is_used_again_but_not_too_early(way):
    """As much memory as is in use at once, however many messages there are."""
    streams, made = LateStreams(1), count()
    staging = way(streams)
    allocate = staging.pool.allocate
    staging.pool.allocate = lambda nbytes: (next(made), allocate(nbytes))[1]
    held = []
    for number in range(200):
        incoming, is_hasty = staging.arriving(SPEC), number % 3 == 0
        filling = [other.tensor.data_ptr() for _, other, is_hasty in held if not is_hasty]
        assert incoming.tensor.data_ptr() not in filling
        incoming.tensor.fill_(number)
        if is_hasty:
            incoming.hasten()
        held.append((number, incoming, is_hasty))
        if len(held) == 4:
            expected, first, _ = held.pop(0)
            assert (first.take() == expected).all()
        if way is ThroughHost:
            outgoing = staging.leaving(torch.full(SPEC.shape, float(number)))
            while not outgoing.ready():
                pass
            assert (outgoing.tensor == number).all()
            outgoing.sent()
    assert next(made) < 50


def test_a_pool_keeps_no_more_idle_memory_than_it_may():
    """What was in use at once before, of whatever size, and no less than it is told to."""
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), idle_bytes=100)
    for size, most in ((33, 1), (33, 3), (20, 7), (200, 1)):
        buffers = [pool.take(size) for _ in range(most)]
        for buffer in buffers:
            pool.give_back(buffer, DONE)
    assert {size: len(idle) for size, idle in pool._given_back.items()} == {64: 0, 32: 0, 256: 1}
    assert pool.take(256) is buffers[-1]
    assert pool.take(0).numel() == 1


def test_a_step_finds_the_buffers_of_the_one_before():
    made = []
    pool = Pool(lambda nbytes: (made.append(nbytes), torch.empty(nbytes, dtype=torch.uint8))[1], idle_bytes=100)
    for _ in range(3):
        for buffer in [pool.take(size) for size in (64, 1, 64, 128)]:
            pool.give_back(buffer, DONE)
    assert sorted(made) == [1, 64, 64, 128]


@pytest.mark.parametrize("make", [Direct().host, Direct().summed, lambda *of: Direct().arriving(Spec(*of)).tensor])
def test_messages_are_in_host_memory_whatever_torchs_default_is(make):
    with torch.device("meta"):
        assert make((2,), torch.float64).device.type == "cpu"


def test_host_memory_for_sums_begins_from_zero():
    staging = ThroughHost(LateStreams())
    assert not staging.host(3, torch.float32).any()
    assert not staging.summed(3, torch.float32).any()


def test_a_buffer_with_a_copy_under_way_stays_where_it_is():
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), idle_bytes=0)
    streams = LateStreams(asks=VERY_LATE)
    buffer, event = pool.take(8), streams.computed()
    pool.give_back(buffer, event)
    assert pool.take(8) is not buffer
    event.synchronize()
    assert pool.take(8) is buffer


class Inner:
    """A sum that notes what it is given."""

    in_order, is_share, start_at = True, False, 0

    def __init__(self, memory):
        self.flat, self.mine, self.count = memory, memory[1:4], memory[4:]
        self.seen = []

    def start(self):
        self.seen.append(self.flat.tolist())

    def drive(self):
        self.flat.mul_(10)
        return True


@pytest.mark.parametrize("seed", range(10))
def test_a_sum_starts_once_its_values_are_there(seed):
    staging = ThroughHost(LateStreams(seed))
    inner = Inner(staging.summed(5, torch.float64))
    staged = StagedSum(inner, staging)
    for step in range(3):
        staged.flat.copy_(torch.arange(5.0) + step)
        staged.count.fill_(7)
        staged.start()
        assert inner.seen == [] or not staged.in_order
        while not staged.drive():
            assert not staged.in_order and inner.seen == []
        assert inner.seen == [[0 + step, 1 + step, 2 + step, 3 + step, 7]]
        assert staged.mine.tolist() == [10 * (1 + step), 10 * (2 + step), 10 * (3 + step)]
        assert staged.count.tolist() == [70]
        inner.seen.clear()


def test_spans_of_a_device_hold_its_work_and_cost_one_wait():
    clock = LateClock(5, 20, 1, 4, 0)  # an op of 20 ms, one of 4 ms, and the last event right behind it
    stopwatch = DeviceStopwatch(lambda: 100.0, clock.tick)
    laps = [(op, stopwatch.read(), stopwatch.read()) for op in (Op(Kind.FORWARD, 0, 0, 0), Op(Kind.FORWARD, 0, 0, 1))]
    spans = stopwatch.spans(3, laps)
    assert [(s.worker, s.op.index) for s in spans] == [(3, 0), (3, 1)]
    times = [time for s in spans for time in (s.start_s, s.end_s)]
    assert times == pytest.approx([99.975, 99.995, 99.996, 100.0], abs=1e-9)
    assert clock.waits == 1


def test_spans_of_a_host_are_the_clocks():
    times = iter([1.0, 2.0])
    stopwatch = Stopwatch(lambda: next(times))
    op = Op(Kind.FORWARD, 0, 0, 0)
    assert stopwatch.spans(0, [(op, stopwatch.read(), stopwatch.read())]) == [(0, op, 1.0, 2.0)]
    assert isinstance(Direct().stopwatch(lambda: 0.0), Stopwatch)
