"""The laws on a GPU, which all ranks share. Device-independent parts are in test_staging.py and test_device.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from case import Case, mini_batch, tiny

from chimera_mpi.runtime.device import Awareness, awareness_of, staging_on
from chimera_mpi.runtime.staging import Spec, ThroughHost
from chimera_mpi.schedule import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RTOL = 1e-10  # in float64: other kernels than those of the CPU add up in another order


def staging(**aware):
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return staging_on(device, **aware)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_h1"])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 500}, {"clip": 0.1}], ids=str)
def test_equals_one_process(comm, scheme, options):
    case = Case(comm, build(scheme, 2, 4), tiny(tied=True), staging=staging(), **options)
    assert all(p.is_cuda for stage in case.pipeline.stages.values() for p in stage.parameters())
    case.run(steps=3, rtol=RTOL)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"shared_from_bytes": 1}], ids=str)
def test_two_replicas(comm, options):
    case = Case(comm, build("1f1b", 2, 3), tiny(tied=True), staging=staging(), bucket_bytes=500, **options)
    case.run(steps=3, rtol=RTOL)
    case.pipeline.check_replicas()
    case.pipeline.close()


@pytest.mark.mpi(2)
def test_messages_from_the_device_where_mpi_takes_them(comm):
    aware = awareness_of(comm, "auto", {}, "")
    if not aware.messages:
        pytest.skip("this MPI takes no device memory")
    Case(comm, build("chimera", 2, 4), tiny(tied=True), staging=staging(aware=Awareness(True, aware.sums))).run(
        rtol=RTOL
    )


@pytest.mark.mpi(2)
def test_spans_hold_the_work_and_follow_each_other(comm):
    case = Case(comm, build("1f1b", 2, 4), staging=staging())
    for step in range(2):
        spans, _ = case.pipeline.run(case.feed(mini_batch(case.sizes), step), step, lambda step: 0.1)
    assert all(span.end_s > span.start_s for span in spans)
    assert all(b.start_s >= a.end_s - 1e-5 for a, b in pairwise(spans))


def test_what_is_sent_and_received_is_what_was_computed():
    through = staging()
    assert isinstance(through, ThroughHost)
    for number in range(50):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            big = torch.ones(1 << 20, device=through.device)
            for _ in range(5):
                big = big * 1.0  # so that the tensor below is not there at once
            made = (big[:1000] * (number % 7)).to(dtype).reshape(10, 100)
            outgoing = through.leaving(made)
            while not outgoing.ready():
                pass
            incoming = through.arriving(Spec((10, 100), dtype))
            incoming.tensor.copy_(outgoing.tensor)
            outgoing.sent()
            assert torch.equal(incoming.take().cpu(), torch.full((10, 100), number % 7, dtype=dtype))


def test_pinned_memory_is_pinned():
    through = staging()
    assert through.host(10, torch.float32).is_pinned()
    memory = torch.zeros(1 << 16)
    through.pin(memory)
    assert memory.is_pinned()
    through.unpin(memory)
