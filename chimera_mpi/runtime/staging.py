"""What lies between a tensor and MPI: nothing on the CPU; on a device host memory, or only a synchronisation.

Work on a device is asynchronous: a tensor has its values once an event that follows its making is complete. This is
the one place that waits for such events before MPI reads, and that makes the device wait before it reads what MPI
wrote. Streams and events are as in torch's notes on CUDA semantics; `device.CudaStreams` has torch's own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .clock import DeviceStopwatch, Stopwatch, Tick
from .tensors import Spec, Tensors

IDLE_BYTES = 1 << 30


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Streams(Protocol):
    """A device's queues of work: one that computes, and one for copies each way, which run beside it."""

    device: torch.device

    def computed(self) -> Event:
        """After all that has been given to the device to compute so far."""

    def compute_after(self, event: Event) -> None:
        """Let what is computed from now on wait for `event`. The host does not wait."""

    def fetch(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy to the host, in the order of the calls; the event that follows. Both tensors must live until then."""

    def bring(self, target: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        """Copy to the device, as `fetch` does the other way."""

    def tick(self) -> Tick:
        """An event that also has a time."""

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies can go on with by themselves, with anything in it."""

    def pin(self, memory: torch.Tensor) -> None:
        """Make such memory of what another has allocated."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, before the memory is freed."""


class Outgoing(Protocol):
    """A tensor on its way to MPI."""

    @property
    def tensor(self) -> torch.Tensor:
        """What MPI sends, once `ready`."""

    def ready(self) -> bool:
        """Whether its memory holds the values."""

    def sent(self) -> None:
        """MPI has done with it."""


class Incoming(Protocol):
    """A tensor on its way from MPI."""

    @property
    def tensor(self) -> torch.Tensor:
        """What MPI receives into."""

    def hasten(self) -> None:
        """MPI has filled it: move it on. `take` does so too."""

    def take(self) -> torch.Tensor:
        """The tensor on the device, for what is computed from now on. Only once MPI has filled `tensor`."""


class Staging(Protocol):
    """How tensors of this rank's device get to MPI and back."""

    device: torch.device
    in_place: bool  # whether MPI reads and writes the tensors themselves, at any time
    sums_on_device: bool  # whether what is `summed` lies in memory of a device

    def leaving(self, tensor: torch.Tensor) -> Outgoing:
        """Begin to send a contiguous tensor, as it will be when all is computed that has been asked for so far."""

    def arriving(self, spec: Spec) -> Incoming:
        """Begin to receive."""

    def brought(self, tensors: Tensors) -> Tensors:
        """Tensors of the host, on the device, for what is computed from now on."""

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, for a mirror."""

    def summed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros where MPI can sum: in host memory, or on the device."""

    def mirror_of(self, memory: torch.Tensor) -> Mirror:
        """Zeros on the device, which MPI reads and writes by way of `memory`."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let copies from and to host memory go on by themselves; `unpin` before it is freed."""

    def unpin(self, memory: torch.Tensor) -> None: ...

    def computed(self) -> Event:
        """After all that has been given to the device to compute so far."""

    def stopwatch(self, clock: Callable[[], float]) -> Stopwatch | DeviceStopwatch:
        """What measures ops on the device, in the seconds of `clock`."""


WHOLE = slice(None)


class Mirror:
    """A tensor on the device, and the memory through which MPI reads and writes it: here its own."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = self.memory = tensor

    def fetch(self, part: slice = WHOLE) -> Event:
        """Bring the memory up to the tensor, as it will be when all is computed that has been asked for so far."""
        return DONE

    def bring(self, part: slice = WHOLE, after: Event | None = None) -> None:
        """Bring the tensor up to the memory, for what is computed from now on.

        The copy comes after what has been asked for so far, which may still use the tensor, unless after `after`.
        """


class Done:
    """The event of what needs no waiting."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE = Done()


class InPlace(NamedTuple):
    """A tensor that MPI reads or writes itself."""

    tensor: torch.Tensor

    def ready(self) -> bool:
        return True

    def sent(self) -> None:
        pass

    def hasten(self) -> None:
        pass

    def take(self) -> torch.Tensor:
        return self.tensor


class Direct:
    """Tensors in host memory hold their values when an op returns: MPI takes them as they are."""

    device, in_place, sums_on_device = torch.device("cpu"), True, False

    def leaving(self, tensor: torch.Tensor) -> InPlace:
        return InPlace(tensor)

    def arriving(self, spec: Spec) -> InPlace:
        return InPlace(torch.empty(spec.shape, dtype=spec.dtype, device=self.device))

    def brought(self, tensors: Tensors) -> Tensors:
        return tensors

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def summed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def mirror_of(self, memory: torch.Tensor) -> Mirror:
        return Mirror(memory)

    def pin(self, memory: torch.Tensor) -> None:
        pass

    def unpin(self, memory: torch.Tensor) -> None:
        pass

    def computed(self) -> Event:
        return DONE

    def stopwatch(self, clock: Callable[[], float]) -> Stopwatch:
        return Stopwatch(clock)

    def __str__(self) -> str:
        return "messages from host memory"


class Pool:
    """Buffers that are used again once nothing uses them any more, neither MPI nor a copy.

    It grows to the most that are in use at once. Of those that are idle it keeps as much, so that the next step finds
    what this one had; or `idle_bytes`, if that is more.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], idle_bytes: int = IDLE_BYTES):
        self.allocate, self.idle_bytes = allocate, idle_bytes
        self._given_back: defaultdict[int, deque[tuple[torch.Tensor, Event]]] = defaultdict(deque)
        self._idle_bytes = self._used_bytes = self._most_used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        self._used_bytes += size
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        waiting = self._given_back[size]
        if not (waiting and waiting[0][1].query()):
            return self.allocate(size)
        self._idle_bytes -= size
        return waiting.popleft()[0]

    def give_back(self, buffer: torch.Tensor, after: Event) -> None:
        """Nothing uses `buffer` once `after` is complete."""
        self._given_back[len(buffer)].append((buffer, after))
        self._idle_bytes += len(buffer)
        self._used_bytes -= len(buffer)
        limit = max(self.idle_bytes, self._most_used_bytes)
        for size, waiting in self._given_back.items():
            while self._idle_bytes > limit and waiting and waiting[0][1].query():
                waiting.popleft()
                self._idle_bytes -= size


def shaped(buffer: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A tensor at the beginning of a buffer of bytes."""
    return buffer[: spec.nbytes].view(spec.dtype).view(spec.shape)


@dataclass
class Fetched:
    """A copy in pinned memory, and what is copied, which must live until then."""

    pool: Pool
    buffer: torch.Tensor
    tensor: torch.Tensor
    source: torch.Tensor | None
    copied: Event

    def ready(self) -> bool:
        if self.copied.query():
            self.source = None
        return self.source is None

    def sent(self) -> None:
        self.pool.give_back(self.buffer, DONE)


@dataclass
class Brought:
    """Pinned memory to receive into, and the tensor on the device that it is copied to.

    The tensor is of the allocator of the computing stream, which may not be done with what was there before: so the
    copy comes `after` all that was given to it before the tensor was made.
    """

    streams: Streams
    pool: Pool
    buffer: torch.Tensor
    tensor: torch.Tensor
    target: torch.Tensor
    after: Event
    copied: Event | None = None

    def hasten(self) -> None:
        if self.copied is None:
            self.copied = self.streams.bring(self.target, self.tensor, self.after)
            self.pool.give_back(self.buffer, self.copied)

    def take(self) -> torch.Tensor:
        self.hasten()
        assert self.copied is not None
        self.streams.compute_after(self.copied)
        return self.target


class HostMirror(Mirror):
    """Memory of the host, best pinned."""

    def __init__(self, streams: Streams, memory: torch.Tensor):
        self.streams, self.memory = streams, memory
        self.tensor = torch.zeros_like(memory, device=streams.device)

    def fetch(self, part: slice = WHOLE) -> Event:
        return self.streams.fetch(self.memory[part], self.tensor[part], self.streams.computed())

    def bring(self, part: slice = WHOLE, after: Event | None = None) -> None:
        after = after or self.streams.computed()
        self.streams.compute_after(self.streams.bring(self.tensor[part], self.memory[part], after))


class DeviceMirror(Mirror):
    """The tensor itself, once it is computed."""

    def __init__(self, streams: Streams, memory: torch.Tensor):
        super().__init__(memory)
        self.streams = streams

    def fetch(self, part: slice = WHOLE) -> Event:
        return self.streams.computed()


class OnDevice:
    """What all ways from a device to MPI have in common."""

    in_place = False

    def __init__(self, streams: Streams, sums_on_device: bool = False):
        self.streams, self.device = streams, streams.device
        self.sums_on_device = sums_on_device

    def brought(self, tensors: Tensors) -> Tensors:
        """Through pinned memory, which torch keeps until the copy is done."""
        return tuple(self._brought(tensor) for tensor in tensors)

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return self.streams.pinned(size, dtype).zero_()

    def summed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        if self.sums_on_device:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.streams.pinned(size, dtype).zero_()

    def mirror_of(self, memory: torch.Tensor) -> Mirror:
        own = self.sums_on_device and memory.device == self.device
        return DeviceMirror(self.streams, memory) if own else HostMirror(self.streams, memory)

    def pin(self, memory: torch.Tensor) -> None:
        self.streams.pin(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self.streams.unpin(memory)

    def computed(self) -> Event:
        return self.streams.computed()

    def stopwatch(self, clock: Callable[[], float]) -> DeviceStopwatch:
        return DeviceStopwatch(clock, self.streams.tick)


class ThroughHost(OnDevice):
    """Messages go through pinned host memory, for an MPI that knows nothing of devices. Copies overlap compute."""

    def __init__(self, streams: Streams):
        super().__init__(streams)
        self.pool = Pool(lambda nbytes: streams.pinned(nbytes, torch.uint8))

    def leaving(self, tensor: torch.Tensor) -> Fetched:
        buffer = self.pool.take(tensor.nbytes)
        host = shaped(buffer, Spec(tuple(tensor.shape), tensor.dtype))
        copied = self.streams.fetch(host, tensor, self.streams.computed())
        return Fetched(self.pool, buffer, host, tensor, copied)

    def arriving(self, spec: Spec) -> Brought:
        buffer = self.pool.take(spec.nbytes)
        target = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return Brought(self.streams, self.pool, buffer, shaped(buffer, spec), target, self.streams.computed())

    def __str__(self) -> str:
        return "messages and sums through pinned host memory"


@dataclass
class Computed:
    """A tensor that MPI reads on the device, once it is computed."""

    tensor: torch.Tensor
    computed: Event

    def ready(self) -> bool:
        return self.computed.query()

    def sent(self) -> None:
        pass


@dataclass
class Received:
    """Memory on the device that MPI writes while the device computes. What is computed gets a copy of it."""

    streams: Streams
    pool: Pool
    buffer: torch.Tensor
    tensor: torch.Tensor

    def hasten(self) -> None:
        pass

    def take(self) -> torch.Tensor:
        own = self.tensor.clone()
        self.pool.give_back(self.buffer, self.streams.computed())
        return own


class DeviceAware(OnDevice):
    """MPI reads and writes device memory. It knows nothing of streams, so it gets memory that no work is left on:
    tensors once they are computed, and to receive into buffers of its own, since torch's allocator hands out memory
    that earlier work may still use. Copies on the device are cheap."""

    def __init__(self, streams: Streams, sums_on_device: bool = True):
        super().__init__(streams, sums_on_device)
        self.pool = Pool(self._allocate)

    def leaving(self, tensor: torch.Tensor) -> Computed:
        return Computed(tensor, self.streams.computed())

    def arriving(self, spec: Spec) -> Received:
        buffer = self.pool.take(spec.nbytes)
        return Received(self.streams, self.pool, buffer, shaped(buffer, spec))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.streams.computed().synchronize()
        return buffer

    def __str__(self) -> str:
        return f"messages from device memory, sums {'there too' if self.sums_on_device else 'in host memory'}"
