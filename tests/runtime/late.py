"""A device in host memory, whose copies and events come as late as they may: what is read too early is garbage."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

GARBAGE = 0xFF  # as bytes: not a number in any floating type


@dataclass(eq=False)
class LateEvent:
    """Complete once it has been asked a few times, or awaited, and all before it on its stream is."""

    stream: LateStream
    asked: int

    done = False

    def query(self):
        self.asked -= 1
        if self.asked <= 0:
            self.synchronize()
        return self.done

    def synchronize(self):
        self.stream.run_until(self)


@dataclass
class LateStream:
    asks: Callable[[], int]
    queue: deque = field(default_factory=deque)

    def put(self, act, after=None):
        event = LateEvent(self, self.asks())
        self.queue.append((act, after, event))
        return event

    def run_until(self, event):
        while not event.done:
            act, after, done = self.queue.popleft()
            if after is not None:
                after.synchronize()
            act()
            done.done = True


class LateStreams:
    """`Streams` by these. Computing is immediate, but nobody who asks an event knows that."""

    device = torch.device("cpu")

    def __init__(self, seed=0, asks=4):
        """An event is complete when it has been asked less than `asks` times, at random."""
        chance = random.Random(seed)
        self.compute, self.out, self.into = (LateStream(lambda: chance.randrange(asks)) for _ in range(3))
        self.under_way: dict[LateEvent, list[torch.Tensor]] = {}
        self.pinned_memory: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.ticks = LateClock(*[1.0] * 100_000)

    def computed(self):
        return self.compute.put(lambda: None)

    def compute_after(self, event):
        self.calls.append("compute after")
        event.synchronize()

    def fetch(self, host, source, after):
        return self._copy("fetch", self.out, host, source, after)

    def bring(self, target, host, after):
        return self._copy("bring", self.into, target, host, after)

    def tick(self):
        return self.ticks.tick()

    def pinned(self, size, dtype):
        memory = torch.empty(size, dtype=dtype)
        spoil(memory)
        self.pinned_memory.append(memory)
        return memory

    def pin(self, memory):
        self.pinned_memory.append(memory)

    def unpin(self, memory):
        self.pinned_memory = [other for other in self.pinned_memory if other is not memory]

    def is_pinned(self, address, nbytes):
        return any(m.data_ptr() <= address and address + nbytes <= m.data_ptr() + m.nbytes for m in self.pinned_memory)

    def _copy(self, what, stream, target, source, after):
        self.calls.append(what)
        self.under_way = {event: tensors for event, tensors in self.under_way.items() if not event.done}
        elsewhere = (tensors for event, tensors in self.under_way.items() if event.stream is not stream)
        for other in (tensor for tensors in elsewhere for tensor in tensors):
            assert not overlap(other, target), f"{what} writes to what a copy the other way uses"
        spoil(target)
        version = source._version

        def act():
            assert source._version == version, f"what is copied was written to before the {what} was done"
            target.copy_(source)

        event = stream.put(act, after)
        self.under_way[event] = [target, source]
        return event


class LateClock:
    """Ticks as a device gives them: each is done some milliseconds after the one before."""

    def __init__(self, *milliseconds):
        self.left, self.now_ms, self.waits = deque(milliseconds), 0.0, 0

    def tick(self):
        self.now_ms += self.left.popleft()
        return LateTick(self, self.now_ms)


@dataclass
class LateTick:
    clock: LateClock
    at_ms: float

    def synchronize(self):
        self.clock.waits += 1

    def elapsed_time(self, end):
        assert self.clock.waits, "a time was read before it was there"
        return end.at_ms - self.at_ms


def spoil(tensor):
    tensor.contiguous().view(-1).view(torch.uint8).fill_(GARBAGE)


def overlap(one, other):
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
