"""What the ranks of a job see together. Each check is collective and finds the same on all ranks."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draw.look import size
from ..lock import Lock
from ._findings import Finding, Found, each, error, ok, warning
from ._host_checks import existing
from ._ranks import laid_out

if TYPE_CHECKING:
    from ..runtime.grid import Node
    from ..runtime.staging import Staging

LARGE_BYTES = 4 << 20  # of the messages and sums that are timed
NUMBERS = LARGE_BYTES // 8
MOST_SKEW_S = 1.0
LITTLE_OVERLAP = 0.5
SEEN_WITHIN_S = 2.0  # a file, on another node


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, their device and its way to MPI; `hosts[rank]` is where each is."""

    world: Any
    node: Node
    hosts: Sequence[str]
    staging: Staging
    devices: str
    folder: Path

    def who(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def wait(self, *requests: Any) -> None:
        self.node.patience.wait(*requests)


def devices(ranks: Ranks) -> Finding:
    """What each rank computes on, and whether MPI takes its memory."""
    from ..runtime.device import locate
    from ..runtime.staging import ThroughHost

    everywhere = ranks.world.allgather(locate(ranks.staging.device, ranks.hosts[ranks.world.rank]))
    unused = ranks.world.allreduce(ranks.staging.device.type == "cpu" and os.path.exists("/dev/nvidia0"))
    through_host = ranks.world.allreduce(isinstance(ranks.staging, ThroughHost))
    if unused:
        remedy = "a torch for CUDA, srun --gpus-per-node, and look at CUDA_VISIBLE_DEVICES"
        return warning("devices", f"{ranks.devices}, but there is a GPU that torch does not see", remedy)
    gpus = Counter(where for where in everywhere if where.name != "CPU")
    if max(gpus.values(), default=0) > 1:
        return warning("devices", ranks.devices, "start one rank a GPU (srun --ntasks-per-node, --gpus-per-task=1)")
    if through_host:
        remedy = "an MPI built for CUDA (MPICH_GPU_SUPPORT_ENABLED=1 on Cray), or device_aware_mpi=true if it is one"
        return warning("devices", ranks.devices, remedy)
    return ok("devices", ranks.devices)


def alike(ranks: Ranks) -> Iterator[Finding]:
    """Whether all ranks have the same software and as many cores."""
    rows = ranks.world.allgather(_facts(ranks))
    odd = list(outliers(rows))
    for what, rank, found, usual in odd:
        where = f"{ranks.who(rank)} has {what} {found}, most have {usual}"
        if what == "cores":
            yield warning("ranks alike", where, "bind ranks alike, on nodes of one kind: a step waits for the slowest")
        else:
            yield error("ranks alike", where, "install one environment on all nodes, or in a folder that they share")
    if not odd:
        yield ok("ranks alike", f"{len(rows)} ranks on {_nodes(ranks)}: one software, as many cores")


def _facts(ranks: Ranks) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from ._ranks import library_name

    facts = {"cores": str(ranks.node.own_cores), "Python": platform.python_version(), "MPI library": library_name()}
    for package in ("chimera-mpi", "torch", "mpi4py", "numpy", "h5py"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    return facts


def outliers(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, int, str, str]]:
    """Of one row a rank: what differs, whose, what it is there, and what it is on most ranks."""
    for what in rows[0]:
        usual = Counter(row[what] for row in rows).most_common(1)[0][0]
        yield from ((what, rank, row[what], usual) for rank, row in enumerate(rows) if row[what] != usual)


def clocks(ranks: Ranks) -> Finding:
    """Whether the nodes know what time it is: those of logs, of checkpoints and of Slurm's limit are theirs."""
    rounds = []
    for _ in range(5):
        ranks.wait(ranks.world.Ibarrier())
        rounds.append(ranks.world.allgather(time.time()))
    ahead_s = [statistics.median(round[rank] - round[0] for round in rounds) for rank in range(ranks.world.size)]
    return judge_clocks(ahead_s, ranks.who)


def judge_clocks(ahead_s: Sequence[float], who: Callable[[int], str]) -> Finding:
    """Of the seconds that each rank's clock is ahead of rank 0's."""
    rank = max(range(len(ahead_s)), key=lambda rank: abs(ahead_s[rank]))
    if abs(ahead_s[rank]) <= MOST_SKEW_S:
        return ok("clocks", f"agree to {MOST_SKEW_S:.0f} s")
    return warning(
        "clocks", f"that of {who(rank)} is {ahead_s[rank]:+.1f} s off rank 0's", "let chrony or NTP set them"
    )


def ring(ranks: Ranks) -> Finding:
    """A large message from each rank to the next."""
    import numpy as np

    world = ranks.world
    sent, received = np.full(NUMBERS, world.rank, dtype=np.float64), np.empty(NUMBERS)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    start = time.perf_counter()
    ranks.wait(world.Irecv(received, before), world.Isend(sent, after))
    return _judge(ranks, "ring", "messages", bool((received == before).all()), time.perf_counter() - start)


def allreduce(ranks: Ranks) -> Finding:
    """A large sum over all ranks."""
    import numpy as np
    from mpi4py import MPI

    world = ranks.world
    numbers = np.full(NUMBERS, world.rank + 1.0)
    start = time.perf_counter()
    ranks.wait(world.Iallreduce(MPI.IN_PLACE, numbers))
    is_right = bool((numbers == world.size * (world.size + 1) / 2).all())
    return _judge(ranks, "all-reduce", "sum", is_right, time.perf_counter() - start)


def _judge(ranks: Ranks, name: str, what: str, is_right: bool, seconds: float) -> Finding:
    wrong = [rank for rank, right in enumerate(ranks.world.allgather(is_right)) if not right]
    slowest_s = max(ranks.world.allgather(seconds))
    if wrong:
        remedy = "another MPI, or another transport of it (UCX_TLS, FI_PROVIDER): this one damages data"
        return error(name, f"wrong {what} on {', '.join(map(ranks.who, wrong))}", remedy)
    return ok(name, f"right, {size(LARGE_BYTES)} in {slowest_s * 1e3:.1f} ms")


def shared_folder(ranks: Ranks) -> Finding | None:
    """Whether all nodes see the folder of logs and checkpoints, and each other's locks in it."""
    world = ranks.world
    leaders = [rank for rank in range(world.size) if ranks.hosts.index(ranks.hosts[rank]) == rank]
    if len(leaders) == 1:
        return None
    lock = _locked(existing(ranks.folder)) if world.rank == 0 else None
    path = world.bcast(lock and lock.path)
    if path is None:
        return None
    seen = world.allgather(_seen(path) if world.rank in leaders[1:] else "locked")
    if lock:
        lock.release()
    return judge_folder(path.parent, seen, ranks.who)


def _locked(folder: Path) -> Lock | None:
    try:
        return Lock(folder / f".chimera-doctor-{os.getpid()}.lock")
    except OSError:  # the check of file locks says so
        return None


def _seen(path: Path) -> str:
    """What another node sees of a lock."""
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return "nothing"
        time.sleep(0.05)
    try:
        Lock(path).release()
    except OSError:
        return "locked"
    return "free"


def judge_folder(folder: Path, seen: Sequence[str], who: Callable[[int], str]) -> Finding:
    """Of what each rank sees of a lock that rank 0 has there: "locked", "free" or "nothing"."""
    if "nothing" in seen:
        remedy = "checkpoint= and log= to a folder that all nodes share"
        return error(
            "shared folder", f"{who(seen.index('nothing'))} does not see what rank 0 writes in {folder}", remedy
        )
    if "free" in seen:
        remedy = "mount it with locks that count on all nodes (Lustre: -o flock), or one log a run"
        return warning("shared folder", f"{who(seen.index('free'))} sees no lock of rank 0's in {folder}", remedy)
    return ok("shared folder", f"all nodes see {folder} and its locks")


def overlap(ranks: Ranks) -> Iterator[Finding]:
    """How much of a large message and of a sum goes on while ranks compute, as `train` would have it here."""
    from ..config import checked
    from ..runtime.calibration import Effort, Ensemble
    from ..runtime.grid import Grid

    if ranks.world.allreduce(ranks.node.ranks > ranks.node.cores):
        yield ok("overlap", "not measured: ranks share cores")
        return
    effort = Effort((1,), (LARGE_BYTES,), (LARGE_BYTES,), trips=2, repeats=3, point_s=0.2, longest_s=1.0)
    grid = Grid(ranks.world, 1)
    ensemble = Ensemble(grid.world, ranks.node.patience, effort)
    with laid_out(grid, checked({})) as (layout, has_thread):
        found = list(_overlap(ensemble, layout, ranks.staging, has_thread))
    yield from found


def _overlap(ensemble: Any, layout: Any, staging: Staging, has_thread: bool) -> Iterator[Finding]:
    from ..runtime.calibration import read_messages, read_moved, read_sums

    for where, pair, is_there in (
        ("in a node", layout.neighbours(), max(layout.sizes) > 1),
        ("between nodes", layout.apart(), layout.nodes > 1),
    ):
        if is_there:
            alone_s = min(message.seconds for message in read_messages(ensemble, pair, staging, "host"))
            moved = read_moved(ensemble, pair, LARGE_BYTES, alone_s, staging)
            yield judge_overlap(f"message {where}", alone_s, moved, has_thread)
    groups = list(layout.groups())
    if groups:
        last = read_sums(ensemble, groups[-1], staging)[-1]
        what = f"sum over {last.replicas} ranks on {last.nodes} node{'s' * (last.nodes > 1)}"
        yield judge_overlap(what, last.seconds, last.hidden or 0.0, has_thread, by_ranks=last.nodes == 1)


def judge_overlap(what: str, alone_s: float, share: float, has_thread: bool, by_ranks: bool = False) -> Finding:
    """Of the share of a large message or sum that goes on under compute; none can where the ranks add up themselves."""
    by = "a thread moves it" if has_thread else "no thread moves it"
    told = (
        f"{100 * share:.0f} % of a {what} of {size(LARGE_BYTES)}, {alone_s * 1e3:.1f} ms, goes on under compute; {by}"
    )
    if by_ranks:
        return ok("overlap", f"{told}: the ranks add up themselves")
    if share >= LITTLE_OVERLAP:
        return ok("overlap", told)
    remedy = "more cores than ranks, for the thread" if has_thread else "try progress=thread"
    return warning("overlap", told, f"{remedy}; calibrate measures it thoroughly")


def _nodes(ranks: Ranks) -> str:
    count = len(set(ranks.hosts))
    return f"{count} node{'s' * (count != 1)}"


JobCheck = Callable[[Ranks], Found]

ALWAYS: tuple[JobCheck, ...] = (devices,)
TOGETHER: tuple[JobCheck, ...] = (alike, clocks, shared_folder, ring, allreduce, overlap)


def examine_together(ranks: Ranks) -> Iterator[Finding]:
    """What each check finds, in their order. Collective."""
    for check in ALWAYS if ranks.world.size == 1 else (*ALWAYS, *TOGETHER):
        yield from each(check(ranks))
