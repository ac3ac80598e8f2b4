"""The device that a rank computes on, and whether its MPI knows of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from ..errors import InputError
from ..host import available_memory_bytes, peak_resident_bytes, resident_bytes
from .staging import DeviceAware, Direct, Event, Staging, Streams, ThroughHost

CPU = torch.device("cpu")


def choose_device(asked: str, local_rank: int, visible: int) -> torch.device:
    """`asked` is auto, cpu or cuda; `visible` is how many CUDA devices this rank sees. The ranks of a node take them
    in turn, and share them where there are more ranks. Raises InputError."""
    if asked == "cpu" or (asked == "auto" and not visible):
        return CPU
    if not visible:
        raise InputError(
            "device=cuda, but torch sees no CUDA device: set device=cpu, or install a torch for CUDA, "
            "ask the launcher for GPUs, and look at CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank % visible)


def use_device(asked: str, local_rank: int) -> torch.device:
    """Choose, and make it this process's current device. Raises InputError."""
    device = choose_device(asked, local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def held_bytes(device: torch.device) -> int:
    """What this rank has in memory: the tensors on a GPU; else all of the process, since torch counts no others."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def peak_held_bytes(device: torch.device) -> int:
    """The most that it has had."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def free_bytes(device: torch.device, sharing: int) -> float:
    """What this rank may take in addition: its share of what is left of its GPU, or of its node's memory, which so many
    ranks share; and of a GPU what torch holds for it and has in no use."""
    if device.type == "cpu":
        return available_memory_bytes() / sharing
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] / sharing + held


class Where(NamedTuple):
    """The device of a rank: two ranks share it where host and identity are the same."""

    host: str
    name: str
    identity: str


def locate(device: torch.device, host: str) -> Where:
    """Which one it is in truth: launchers may show each rank another one as cuda:0."""
    if device.type == "cpu":
        return Where(host, "CPU", "")
    found = torch.cuda.get_device_properties(device)
    return Where(host, found.name, str(getattr(found, "uuid", device.index)))


def describe_sharing(ranks: Sequence[Where]) -> str:
    """One entry a rank: `4 ranks on 2 x NVIDIA H200, 2 ranks share one`."""
    told = []
    for name in dict.fromkeys(rank.name for rank in ranks):
        here = [rank for rank in ranks if rank.name == name]
        if name == "CPU":
            told.append("CPU" if len(here) == len(ranks) else f"{_ranks(len(here))} on CPUs")
            continue
        on_each = Counter(here)
        most = max(on_each.values())
        shared = f", {'up to ' * (min(on_each.values()) < most)}{most} ranks share one" if most > 1 else ""
        told.append(f"{_ranks(len(here))} on {len(on_each)} x {name}{shared}")
    return "; ".join(told)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


class Awareness(NamedTuple):
    """Whether MPI takes pointers to device memory: in messages, and in sums that do not block."""

    messages: bool
    sums: bool


UNAWARE = Awareness(False, False)


def awareness(asked: str | bool, library: str, kinds: str, environment: Mapping[str, str], ompi_info: str) -> Awareness:
    """What an MPI library can do.

    `kinds` is what it says itself, by the info key mpi_memory_alloc_kinds of MPI 4.1; older ones are known by the
    environment (MPICH) or by the output of `ompi_info --parsable --all` (Open MPI). `asked` is auto, or the user's
    word for it. Open MPI takes device memory in messages and blocking collectives, but not in non-blocking sums (its
    FAQ, Running CUDA-aware Open MPI, 4): those go through host memory.
    """
    is_open_mpi = library.startswith("Open MPI")
    if asked != "auto":
        aware = bool(asked)
    elif kinds:
        aware = "cuda" in kinds
    elif is_open_mpi:
        aware = "mpi_built_with_cuda_support:value:true" in ompi_info
    else:
        aware = any(environment.get(name) == "1" for name in ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU"))
    return Awareness(aware, aware and not is_open_mpi)


def awareness_of(comm: MPI.Intracomm, asked: str | bool, environment: Mapping[str, str], ompi_info: str) -> Awareness:
    """That of the MPI library of this process."""
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return awareness(asked, MPI.Get_library_version(), kinds, environment, ompi_info)


def staging_on(device: torch.device, aware: Awareness = UNAWARE) -> Staging:
    """How tensors of `device` get to MPI."""
    if device.type == "cpu":
        return Direct()
    streams = CudaStreams(device)
    return DeviceAware(streams, aware.sums) if aware.messages else ThroughHost(streams)


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Those that layers on `device` draw from. Seeding them does not wait for the device."""
    own = (torch.cuda.default_generators[device.index],) if device.type == "cuda" else ()
    return (torch.default_generator, *own)


class CudaStreams(Streams):
    """torch's. What is computed is computed on the stream that is current now, autograd's backwards too, as they run
    on the stream of their forward; it is named here since they run in threads of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.init()
        self._compute = torch.cuda.current_stream(device)
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def computed(self) -> torch.cuda.Event:
        return self._compute.record_event()

    def compute_after(self, event: Event) -> None:
        self._compute.wait_event(_of_torch(event))

    def fetch(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> torch.cuda.Event:
        return _copy(self._out, host, source, after)

    def bring(self, target: torch.Tensor, host: torch.Tensor, after: Event) -> torch.cuda.Event:
        return _copy(self._in, target, host, after)

    def tick(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._compute)
        return event

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=CPU, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        if memory.nbytes:
            _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))

    def unpin(self, memory: torch.Tensor) -> None:
        if memory.nbytes:
            _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _check(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"CUDA cannot pin or unpin shared memory: error {int(status)}")


def _copy(stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, after: Event) -> torch.cuda.Event:
    stream.wait_event(_of_torch(after))
    with torch.cuda.stream(stream), torch.no_grad():
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def _of_torch(event: Event) -> torch.cuda.Event:
    assert isinstance(event, torch.cuda.Event)
    return event
