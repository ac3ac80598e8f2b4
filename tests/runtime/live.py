"""The bytes of live tensors on the CPU, counted exactly: all that torch allocates and frees, inside of kernels too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "end of "


class Stretch(NamedTuple):
    """Live bytes of what was allocated since the watch began: the most in a stretch, and those at its end."""

    peak_bytes: int
    left_bytes: int


class Watch:
    """The stretches of what was watched, by the names of the marks that end them."""

    def __init__(self) -> None:
        self.stretches: dict[str, Stretch] = {}

    def mark(self, name: str) -> None:
        with record_function(MARK + name):
            pass

    def __getitem__(self, name: str) -> Stretch:
        return self.stretches[name]


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch the allocations of the body, whose `mark`s end the stretches that the watch has afterwards."""
    watch = Watch()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield watch
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    watch.stretches = _stretches(sorted(_flat(tree), key=lambda event: event.start_time_ns))


def _flat(events) -> Iterator:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending += event.children


def _stretches(events) -> dict[str, Stretch]:
    sizes: dict[int, int] = {}  # by address; what was there before the watch is in none
    live = peak = 0
    found = {}
    for event in events:
        if event.tag == _EventType.Allocation:
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            if size > 0:
                sizes[address] = size
                live += size
                peak = max(peak, live)
            else:
                live -= sizes.pop(address, 0)
        elif event.name.startswith(MARK):
            found[event.name.removeprefix(MARK)] = Stretch(peak, live)
            peak = live
    return found
