"""What a process asks of its operating system and its C library; nothing where these have no such thing."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
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


def available_memory_bytes() -> float:
    """Of this machine, or less where a control group grants less; all there is where a system does not say."""
    free = _available(_read("/proc/meminfo"))
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, float(int(limit) - int(used))) if limit.isdigit() and used.isdigit() else free


def _available(meminfo: str) -> float:
    found = [line.split() for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    return 1024.0 * int(found[0][1]) if found else float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
