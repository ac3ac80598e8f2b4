"""What a process asks of its operating system and its C library; nothing where these have no such thing."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def sharpen_timer() -> None:
    """Let Linux end this thread's sleeps on time; by default it may be 50 us late, to save power."""
    if sys.platform == "linux":
        set_timer_slack = 29  # PR_SET_TIMERSLACK of prctl(2), in nanoseconds
        ctypes.CDLL(None).prctl(set_timer_slack, ctypes.c_ulong(1), 0, 0, 0)


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed for the next tensor of that size; whether it will.

    By default it gives large blocks back at once, so each micro-batch pays anew for page faults. Older versions keep
    blocks of 32 MiB at most.
    """
    top_pad, trim_threshold, mmap_threshold = -2, -1, -3  # of mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    keeps = mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 32 << 20)
    return bool(keeps and mallopt(trim_threshold, (1 << 31) - 1) and mallopt(top_pad, 64 << 20))


def sync(path: Path) -> None:
    """Put a file on disk, or the names in a folder, where its file system has a way to."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def resident_bytes() -> int:
    """What this process has in memory; where a system tells the most only, that. Pages it shares count in full."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return peak_resident_bytes()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that it has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory() -> float:
    """The fraction that is left of this machine's memory, or of what a control group of this process may have; 0 where
    nobody tells. What only caches files counts as free."""
    return min((left / whole for left, whole in _memories()), default=0.0)


def available_memory_bytes() -> float:
    """What is left of it in bytes; all there is where nobody tells."""
    everything = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((left for left, _ in _memories()), default=everything)


def _memories() -> Iterator[tuple[float, float]]:
    """Of the machine and of each limited control group around this process: bytes left, and in all."""
    with suppress(OSError, KeyError, ValueError):
        kilobytes = _figures(Path("/proc/meminfo"))
        yield 1024.0 * kilobytes["MemAvailable:"], 1024.0 * kilobytes["MemTotal:"]
    with suppress(OSError, StopIteration):
        groups = (line.partition("::") for line in Path("/proc/self/cgroup").read_text().splitlines())
        own = Path("/sys/fs/cgroup") / next(path.strip("/") for number, _, path in groups if number == "0")
        for group in (own, *own.parents):
            with suppress(OSError, KeyError, ValueError):  # a group without a limit, or not a group
                limit = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text()) - _figures(group / "memory.stat")["inactive_file"]
                yield float(limit - used), float(limit)


def _figures(path: Path) -> dict[str, int]:
    """By the first word of each line, the second."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
