"""A thread that drives MPI while ranks compute changes nothing but the time."""

from __future__ import annotations

import time

import pytest
from case import Case
from mpi4py import MPI
from test_laws import every_scheme

from chimera_mpi.errors import InputError
from chimera_mpi.runtime.progress import ProgressThread


@pytest.mark.mpi(4)
@every_scheme(4, 5)
def test_a_thread_changes_nothing(comm, schedule):
    case = Case(comm, schedule, progress_thread=True, bucket_bytes=500)
    case.run()
    case.pipeline.close()


class CountingComm:
    rank = 0

    def __init__(self):
        self.probes = 0

    def Iprobe(self, source):
        self.probes += 1
        return False


def test_it_drives_only_inside_its_context():
    comm = CountingComm()
    thread = ProgressThread(comm, every_s=1e-4)
    time.sleep(0.02)
    assert comm.probes == 0
    with thread:
        while comm.probes < 3:
            time.sleep(1e-3)
    time.sleep(0.02)
    before = comm.probes
    time.sleep(0.02)
    assert comm.probes == before
    thread.close()


def test_an_mpi_of_one_thread_refuses(monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(InputError, match="progress=poll"):
        ProgressThread(CountingComm())
