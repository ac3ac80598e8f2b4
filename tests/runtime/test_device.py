"""Which device a rank takes, how sharing is told, and what is concluded about an MPI from what it says of itself."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from chimera_mpi.config import checked
from chimera_mpi.errors import InputError
from chimera_mpi.runtime.calibration import usable_memory_bytes
from chimera_mpi.runtime.device import (
    Awareness,
    Where,
    awareness,
    awareness_of,
    choose_device,
    describe_sharing,
    free_bytes,
    generators,
    locate,
    staging_on,
)
from chimera_mpi.runtime.grid import find_node
from chimera_mpi.runtime.staging import Direct

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)"
OPEN_MPI = "Open MPI v5.0.8, package: Open MPI conda@x Distribution, ident: 5.0.8"
WITH_CUDA = "mca:mpi:base:param:x\nmca:mpi:base:param:mpi_built_with_cuda_support:value:true\n"
WITHOUT_CUDA = WITH_CUDA.replace("true", "false")


@pytest.mark.parametrize(
    ("asked", "local_rank", "visible", "device"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 3, 0, "cpu"),
        ("cpu", 0, 4, "cpu"),
        ("auto", 0, 4, "cuda:0"),
        ("auto", 3, 4, "cuda:3"),
        ("cuda", 5, 4, "cuda:1"),  # shared
        ("cuda", 7, 1, "cuda:0"),  # shared by all, or each sees one of its own
    ],
)
def test_ranks_of_a_node_take_its_devices_in_turn(asked, local_rank, visible, device):
    assert choose_device(asked, local_rank, visible) == torch.device(device)


def test_a_device_that_is_not_there_is_refused_with_a_remedy():
    with pytest.raises(InputError, match=r"^device=cuda, but torch sees no CUDA device: set device=cpu, or [^\n]+$"):
        choose_device("cuda", 0, 0)


@pytest.mark.parametrize("value", ["gpu", "cuda:0", 1])
def test_other_devices_are_unknown(value):
    with pytest.raises(InputError, match="device="):
        checked({"device": value})
    assert checked({"device_aware_mpi": True}).device_aware_mpi is True
    with pytest.raises(InputError, match=r"device_aware_mpi=.*try device_aware_mpi=auto"):
        checked({"device_aware_mpi": "perhaps"})


def test_sharing_is_told_by_what_a_device_is_and_not_by_its_number():
    a, b, c = (Where("one", "H200", name) for name in "abc")
    elsewhere = Where("two", "H200", "a")
    cpu = Where("one", "CPU", "")
    assert describe_sharing([a]) == "1 rank on 1 x H200"
    assert describe_sharing([a, b]) == "2 ranks on 2 x H200"
    assert describe_sharing([a, elsewhere]) == "2 ranks on 2 x H200"
    assert describe_sharing([a, b, a, b]) == "4 ranks on 2 x H200, 2 ranks share one"
    assert describe_sharing([a, b, c, a]) == "4 ranks on 3 x H200, up to 2 ranks share one"
    assert describe_sharing([cpu, cpu]) == "CPU"
    assert describe_sharing([cpu, a]) == "1 rank on CPUs; 1 rank on 1 x H200"


def test_ranks_that_share_a_device_share_what_is_free(monkeypatch):
    monkeypatch.setattr("chimera_mpi.runtime.device.available_memory_bytes", lambda: 100)
    assert free_bytes(torch.device("cpu"), 4) == 25
    free = {"mem_get_info": (100, 800), "memory_reserved": 70, "memory_allocated": 50}
    for name, found in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    cuda = torch.device("cuda", 0)
    assert [free_bytes(cuda, ranks) for ranks in (1, 4)] == [120, 45]  # of which 20 are its own
    assert usable_memory_bytes(cuda, 4) == pytest.approx(0.9 * 45)


YES, MESSAGES, NO = Awareness(True, True), Awareness(True, False), Awareness(False, False)


@pytest.mark.parametrize(
    ("asked", "library", "kinds", "environment", "ompi_info", "expected"),
    [
        ("auto", MPICH, "mpi,system", {}, "", NO),
        ("auto", MPICH, "mpi,system,cuda:device,cuda:host", {}, "", YES),
        ("auto", MPICH, "", {"MPIR_CVAR_ENABLE_GPU": "1"}, "", YES),
        ("auto", MPICH, "", {"MPIR_CVAR_ENABLE_GPU": "0"}, "", NO),
        ("auto", MPICH, "mpi,system", {"MPIR_CVAR_ENABLE_GPU": "1"}, "", NO),  # its own word counts more
        ("auto", CRAY, "", {}, "", NO),
        ("auto", CRAY, "", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "", YES),
        ("auto", CRAY, "", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "", NO),
        ("auto", CRAY, "", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, WITH_CUDA, YES),
        ("auto", OPEN_MPI, "", {}, "", NO),
        ("auto", OPEN_MPI, "", {}, WITHOUT_CUDA, NO),
        ("auto", OPEN_MPI, "", {}, WITH_CUDA, MESSAGES),
        ("auto", OPEN_MPI, "", {"MPIR_CVAR_ENABLE_GPU": "1"}, "", NO),  # of another library
        ("auto", OPEN_MPI, "mpi,system,cuda:device", {}, "", MESSAGES),
        ("auto", MPICH, "", {}, WITH_CUDA, NO),
        (True, MPICH, "mpi,system", {}, "", YES),
        (True, OPEN_MPI, "", {}, "", MESSAGES),
        (False, MPICH, "mpi,system,cuda:device", {}, "", NO),
        (False, OPEN_MPI, "", {}, WITH_CUDA, NO),
    ],
)
def test_what_an_mpi_can_do(asked, library, kinds, environment, ompi_info, expected):
    assert awareness(asked, library, kinds, environment, ompi_info) == expected


def test_an_mpi_without_devices_says_so_here():
    assert awareness_of(MPI.COMM_SELF, True, {}, "").messages
    if not torch.cuda.is_available():
        assert awareness_of(MPI.COMM_SELF, "auto", {}, "") == NO


def test_on_the_cpu_nothing_lies_between():
    cpu = torch.device("cpu")
    staging = staging_on(cpu)
    assert isinstance(staging, Direct) and staging.in_place
    tensor = torch.ones(3)
    assert staging.leaving(tensor).tensor is tensor
    assert staging.mirror_of(tensor).tensor is staging.mirror_of(tensor).memory is tensor
    assert generators(cpu) == (torch.default_generator,)
    assert locate(cpu, "here") == Where("here", "CPU", "")


@pytest.mark.mpi(4)
def test_ranks_of_a_node_are_counted_from_0(comm):
    assert comm.allgather(find_node(comm).rank) == [0, 1, 2, 3]
