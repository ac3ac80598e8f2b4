"""Waiting: polls, naps and rings. No time is asserted, only who woke whom."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from case import Case, grid_of
from mpi4py import MPI

from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.waiting import Doorbell, Patience
from chimera_mpi.schedule import build

LONG_S = 60.0  # longer than a test may last: what ends before was woken


class Bell:
    """Rings each time it is waited for, and notes how long it was asked to wait."""

    def __init__(self):
        self.naps = []

    def wait(self, seconds):
        self.naps.append(seconds)
        return True


def after(polls):
    """Done at the so manieth look."""
    looks = iter(range(polls))
    return lambda: next(looks, None) is None


def test_what_is_done_needs_no_nap():
    bell = Bell()
    Patience(0.0).until(lambda: True, bell)
    assert not bell.naps


def test_naps_end_with_what_is_awaited():
    bell = Bell()
    Patience(0.0, nap_s=0.1, longest_nap_s=0.2).until(after(6), bell)
    assert bell.naps == [0.1, pytest.approx(0.15), 0.2, 0.2, 0.2][: len(bell.naps)] and 1 <= len(bell.naps) <= 5


@pytest.mark.mpi(2)
def test_a_ring_ends_a_nap(comm):
    bell = grid_of(comm, 2).bell
    if bell is None:
        pytest.skip("this system has no datagram sockets without a name in a file system")
    if comm.rank == 0:
        bell.ring(1)
        while not bell.wait(LONG_S):
            pass
    else:
        while not bell.wait(LONG_S):
            pass
        bell.ring(0)


@pytest.mark.mpi(2)
def test_nobody_waits_for_who_does_not_listen(comm):
    """A full queue takes no more rings, and one look empties it."""
    bell = grid_of(comm, 2).bell
    if bell is None:
        pytest.skip("no doorbell here")
    for _ in range(1000):
        bell.ring(1 - comm.rank)
    comm.Barrier()
    assert bell.wait(LONG_S)
    assert not bell.wait(0)
    comm.Barrier()


@pytest.mark.mpi(4)
def test_rings_go_by_the_ranks_of_a_part(comm):
    grid = grid_of(comm, 2)
    bell = grid.bell_of(grid.pipeline)
    if bell is None:
        pytest.skip("no doorbell here")
    other = 1 - grid.pipeline.rank
    assert bell.addresses == {other: grid.bell.addresses[2 * grid.replica + other]}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera"])
def test_lost_rings_are_no_loss(comm, monkeypatch, scheme):
    monkeypatch.setattr(Doorbell, "ring", lambda self, rank: None)
    Case(comm, build(scheme, 2, 4)).run()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("fails", ["recv", "sendto"])
def test_a_doorbell_that_is_not_heard_is_none(comm, monkeypatch, fails):
    """As in containers that share memory, each with a network of its own."""
    if comm.rank == 0:
        monkeypatch.setattr("chimera_mpi.runtime.waiting.socket", Broken(socket, fails))
    grid = Grid(comm, 2)
    monkeypatch.undo()
    assert grid.bell is None
    grid.close()


class Broken:
    """The module socket, with sockets that hear nothing or reach nobody."""

    def __init__(self, module, fails):
        self.module, self.fails = module, fails

    def __getattr__(self, name):
        return getattr(self.module, name)

    def socket(self, *arguments):
        error = {"recv": BlockingIOError, "sendto": ConnectionRefusedError}[self.fails]

        class Socket(socket.socket):
            pass

        def fail(*arguments):
            raise error

        setattr(Socket, self.fails, fail)
        return Socket(*arguments)


@pytest.mark.mpi(2)
def test_without_datagrams_there_is_no_doorbell(comm, monkeypatch):
    def refuse(*arguments):
        raise OSError("not on this system")

    if comm.rank == 0:
        monkeypatch.setattr(socket, "socket", refuse)
    grid = Grid(comm, 2)
    assert grid.bell is None
    monkeypatch.undo()
    number = np.array([1.0])
    grid.node.patience.wait(grid.world.Iallreduce(MPI.IN_PLACE, number))
    assert number[0] == 2
    grid.close()
