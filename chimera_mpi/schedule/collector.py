"""Spare the garbage collector work that finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection meanwhile; as a decorator, while the function runs.

    A long schedule is hundreds of thousands of small tuples, none of them in a cycle. The collector goes over
    all there are time and again while more are made, which takes as long as to make them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
