"""Messages arrive whole, in their place, with the values they had when they were sent."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from case import cancel, grid_of

from chimera_mpi.runtime.mailbox import Delivery, Mailbox, Spec, Tags, pieces
from chimera_mpi.schedule import Kind, Op, build, messages

FOUR_MIB = Spec((1 << 19,), torch.float64)
TAG_UB = 32767  # all that the standard promises


def mailboxes(comm, delivery):
    """A pipeline of two workers in which two micro-batches go forth; returns this rank's mailbox and its ops."""
    grid = grid_of(comm, 2)
    mailbox = Mailbox(grid.pipeline, build("gpipe", 2, 2), lambda op: (FOUR_MIB,), grid.node.patience, delivery)
    mailbox.open()
    return mailbox, [Op(Kind.FORWARD, 0, 1, n) for n in range(2)]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("limit_bytes", [1 << 30, 1 << 20, 50_000])
def test_a_tensor_may_be_let_go_at_once(comm, limit_bytes):
    mailbox, consumers = mailboxes(comm, Delivery(synchronous=True, limit_bytes=limit_bytes))
    if comm.rank == 0:
        for index in range(2):
            mailbox.send(
                Op(Kind.FORWARD, 0, 0, index), (torch.full(FOUR_MIB.shape, float(index), dtype=torch.float64),)
            )
            gc.collect()
            torch.full(FOUR_MIB.shape, 77.0, dtype=torch.float64)
        # the backward's messages are not sent here
        mailbox.patience.wait(*(departure.request for departure in mailbox._leaving))
    else:
        for index, op in enumerate(consumers):
            (tensor,) = mailbox.receive(op)
            assert (tensor == index).all()
    cancel(mailbox)


@pytest.mark.mpi(2)
def test_a_tensor_overwritten_in_flight_is_found_out(comm):
    mailbox, consumers = mailboxes(comm, Delivery(synchronous=True))
    if comm.rank == 0:
        tensor = torch.zeros(FOUR_MIB.shape, dtype=torch.float64)
        mailbox.send(Op(Kind.FORWARD, 0, 0, 0), (tensor,))
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="0F0 made was written to while it was being sent"):
            mailbox.send(Op(Kind.FORWARD, 0, 0, 1), (torch.ones_like(tensor),))
            mailbox.flush()
    else:
        for op in consumers:
            mailbox.receive(op)
    mailbox.patience.wait(comm.Ibarrier())  # what is still on its way must not be freed
    cancel(mailbox)


@pytest.mark.mpi(2)
def test_a_transposed_tensor_arrives_in_its_own_order(comm):
    grid = grid_of(comm, 2)
    spec = Spec((3, 5), torch.float64)
    mailbox = Mailbox(grid.pipeline, build("gpipe", 2, 1), lambda op: (spec,), grid.node.patience)
    mailbox.open()
    numbers = torch.arange(15, dtype=torch.float64).view(5, 3).t()
    if comm.rank == 0:
        mailbox.send(Op(Kind.FORWARD, 0, 0, 0), (numbers,))
        mailbox.patience.wait(*(departure.request for departure in mailbox._leaving))
    else:
        assert torch.equal(mailbox.receive(Op(Kind.FORWARD, 0, 1, 0))[0], numbers)
    cancel(mailbox)


@pytest.mark.mpi(2)
def test_what_nobody_took_is_named_at_the_flush(comm):
    mailbox, _ = mailboxes(comm, Delivery())
    with pytest.raises(RuntimeError, match=r"messages left in the mailbox of worker \d at the flush"):
        mailbox.flush()
    cancel(mailbox)


@pytest.mark.parametrize(("scheme", "depth"), [("1f1b", 8), ("chimera", 8), ("chimera", 32)])
def test_tags_stay_below_the_bound_and_are_distinct_in_a_window(scheme, depth):
    schedule = build(scheme, depth, 4 * depth)
    tags = Tags(schedule, TAG_UB)
    kinds, parts = (Kind.FORWARD, Kind.BACKWARD), range(Tags.parts)
    seen = [
        tags(Op(kind, pipe, stage, index), part)
        for kind, pipe, stage, part in product(kinds, range(len(schedule.pipes)), range(depth), parts)
        for index in range(4096 - tags.window, 4096)
    ]
    assert min(seen) >= 0 and max(seen) <= TAG_UB
    assert len(set(seen)) == len(seen)


def test_too_few_tags_are_refused():
    with pytest.raises(ValueError, match="need more tags"):
        Tags(build("chimera", 32, 32), 100)


@pytest.mark.parametrize(("scheme", "micro_batches"), list(product(("gpipe", "1f1b", "chimera"), (3, 8, 20))))
def test_equal_tags_are_sent_and_taken_in_one_order(scheme, micro_batches):
    schedule = build(scheme, 4, micro_batches)
    made = {op: (worker, at) for worker, order in enumerate(schedule.orders) for at, op in enumerate(order)}
    taken = [message.op for message in messages(schedule)]
    sent = sorted(taken, key=made.__getitem__)
    for key in {op._replace(index=0) for op in taken}:
        assert [o for o in taken if o._replace(index=0) == key] == [o for o in sent if o._replace(index=0) == key]


def test_pieces_cover_a_tensor():
    tensor = torch.arange(1000, dtype=torch.float64)
    sizes = [piece.nbytes for piece in pieces(tensor, 3000)]
    assert sizes == [3000, 3000, 2000]
    assert pieces(torch.empty(0), 10) == []
