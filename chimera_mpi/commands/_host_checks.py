"""What one process sees of its machine. Each check is a function of a `Host`; `CHECKS` has all of them."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..draw.look import size
from ..errors import InputError, counted
from ..host import sharpen_timer
from ._findings import Finding, Found, each, error, from_message, ok, warning
from ._host import Host, family_of
from ._ranks import refuse_singletons
from ._slurm_checks import slurm

NO_MPI = "pip install 'chimera-mpi[mpich]' where the machine has no MPI, else load its module (module load mpich)"
FEW_SHARED_BYTES = 256 << 20
FEW_DISK_BYTES = 2 << 30
NO_DISK_BYTES = 16 << 20
SEGMENTS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*")  # of MPICH and Open MPI
LATE_S = 1e-3  # of a short sleep
NAP_S = 100e-6

# ---- MPI


def mpi_library(host: Host) -> Finding | None:
    return host.library and ok("MPI library", host.library.text)


def thread_level(host: Host) -> Finding | None:
    if host.library is None:
        return None
    if host.library.level == "multiple":
        return ok("thread level", "multiple")
    remedy = "keep to progress=poll, or take an MPI built with MPI_THREAD_MULTIPLE: progress=thread needs it"
    return warning("thread level", host.library.level, remedy)


def largest_tag(host: Host) -> Finding | None:
    if host.library is None:
        return None
    return ok("largest tag", f"{host.library.largest_tag}, above which tags are wrapped")


def launcher(host: Host) -> Finding | None:
    if host.library is None:
        return None
    size = host.library.size
    try:
        refuse_singletons(size, host.environ)
    except InputError as mismatch:
        what, _, remedy = str(mismatch).partition("; ")
        return error("launcher", what, remedy)
    if size > 1:
        return ok("launcher", f"{size} ranks")
    return ok("launcher", "1 rank: mpirun -n 2 chimera-mpi doctor tries messages, sums and overlap too")


def mpiexec(host: Host) -> Finding | None:
    """Whether the launcher that a user would take belongs to the library."""
    if host.is_launched or not host.family:
        return None
    said = host.ask(["mpiexec", "--version"])
    if not said:
        return warning(
            "mpiexec", "there is none on the PATH", f"load the module of {host.family}, or start ranks by srun"
        )
    found = family_of(said)
    if found in (host.family, ""):
        return ok("mpiexec", f"{found or said.splitlines()[0]}, {shutil.which('mpiexec') or 'on the PATH'}")
    return warning(
        "mpiexec",
        f"that of {found} is first on the PATH, but mpi4py loads {host.family}: each rank would be alone",
        f"take the mpiexec of {host.family}, or set MPI4PY_MPIABI={found.lower().replace(' ', '')} to load {found}",
    )


# ---- the machine


def packages(host: Host) -> Iterator[Finding]:
    """Versions against what the installed package asks for."""
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        wanted = requires("chimera-mpi") or []
    except PackageNotFoundError:
        yield warning("packages", "chimera-mpi is not installed, but run from a folder", "pip install -e .")
        return
    installed = {}
    for requirement in wanted:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    amiss = list(mismatches(wanted, installed))
    for is_needed, what, asked in amiss:
        make = error if is_needed else warning
        yield make("packages", what, f"pip install '{asked}'")
    if not amiss:
        told = ", ".join(f"{name} {installed[name]}" for name in ("torch", "mpi4py", "h5py", "numpy"))
        yield ok("packages", f"{told}: as asked for")


def mismatches(wanted: Sequence[str], installed: Mapping[str, str]) -> Iterator[tuple[bool, str, str]]:
    """Of requirements: whether the program needs it, what is wrong, and what would be right."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, wanted):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        found, asked = installed.get(requirement.name), f"{requirement.name}{requirement.specifier}"
        if found is None:
            if is_needed:
                yield True, f"{requirement.name} is not there", asked
        elif not requirement.specifier.contains(found, prereleases=True):
            yield is_needed, f"{requirement.name} is {found}, not {requirement.specifier}", asked


def cores(host: Host) -> Finding:
    """Whether each thread of each rank has a core."""
    ranks, there, own, _ = host.share
    threads = int(text) if (text := host.environ.get("OMP_NUM_THREADS", "")).isdigit() else host.share.threads
    told = f"{counted(ranks, 'rank')} of {counted(threads, 'thread')} on {counted(there, 'core')} of this node"
    more = f", of which it has {host.machine_cores}" if host.machine_cores > there else ""
    if ranks > there:
        remedy = f"start at most {there} ranks on a node for speed"
        if more:
            remedy += ", or bind them to more cores (mpirun --bind-to none, srun --cpus-per-task)"
        return warning("cores", told + more + ": ranks share cores", remedy)
    if ranks * threads > there:
        return warning("cores", told + more, f"set OMP_NUM_THREADS={host.share.threads}, or leave it unset")
    if own * ranks < there:
        remedy = f"mpirun --bind-to none, or srun --cpus-per-task={there // ranks}"
        return warning("cores", f"{told}{more}, but this rank is bound to {own}", remedy)
    return ok("cores", told + more)


def waiting(host: Host) -> Finding | None:
    return ok("waiting", host.share.waits) if host.share.waits else None


def shared_memory(host: Host) -> Finding:
    try:
        free = shutil.disk_usage(host.shared_memory).free
    except OSError:
        return ok("shared memory", f"no {host.shared_memory}: replicas on a node sum their gradients by messages")
    told, remedy = f"{size(free)} free in {host.shared_memory}", "in Docker --shm-size=8g, or set shared_sums=false"
    left = _left_behind(host)
    if left:
        told += f", {size(sum(left.values()))} in {len(left)} files of MPI jobs that were killed"
        remedy = f"while no MPI job of yours runs here: cd {host.shared_memory} && rm -f {' '.join(SEGMENTS)}"
    if free >= FEW_SHARED_BYTES > sum(left.values()):
        return ok("shared memory", told)
    return warning("shared memory", told, remedy)


def _left_behind(host: Host) -> dict[str, int]:
    """The bytes of each of the user's files by which an MPI shared memory, and that no process has any more."""
    paths = [path for pattern in SEGMENTS for path in host.shared_memory.glob(pattern)]
    used = "".join(_maps(process) for process in host.processes.glob("[0-9]*")) if paths else ""
    found = {}
    for path in paths:
        with suppress(OSError):  # gone since
            facts = path.stat()
            if facts.st_uid == os.getuid() and str(path) not in used:
                found[str(path)] = facts.st_blocks * 512
    return found


def _maps(process: Path) -> str:
    """The files that a process has in its memory, among other things."""
    with suppress(OSError):  # ended since, or another user's
        return (process / "maps").read_text(errors="replace")
    return ""


def timer(host: Host) -> Finding:
    """Waits sleep in short naps: how late these end."""
    sharpen_timer()
    late_s = statistics.median(_lateness() for _ in range(20))
    told = f"naps of {NAP_S * 1e6:.0f} us end {late_s * 1e6:.0f} us late"
    if late_s < LATE_S:
        return ok("timer", told)
    return warning("timer", told, "a busy or a power-saving machine: set spin_s=1 if ranks have cores of their own")


def _lateness() -> float:
    start = time.perf_counter()
    time.sleep(NAP_S)
    return time.perf_counter() - start - NAP_S


# ---- files


def file_locks(host: Host) -> Finding:
    """A log really made in the folder of logs, which a second writer must not get."""
    from ..runlog import RunLog, locks_wanted, read_run

    folder = existing(host.folder)
    path = folder / f".chimera-doctor-{os.getpid()}.h5"
    locking = locks_wanted(host.environ)
    try:
        with RunLog.create(path, {}, 1, locking=locking):
            read_run(path)
            is_guarded = _is_refused(path)
    except InputError as refused:
        return from_message("file locks", "error", str(refused))
    finally:
        with suppress(OSError):  # a file system without it may refuse that too
            path.unlink()
    if not locking:
        remedy = "see to it that no two runs share a log, or unset HDF5_USE_FILE_LOCKING"
        return warning("file locks", f"off: a log in {folder} can be written, by two runs at once too", remedy)
    if is_guarded:
        return ok("file locks", f"a log in {folder} can be written, by one run at a time")
    return warning("file locks", f"{folder} grants a lock twice", "log to another file system, or one log a run")


def _is_refused(path: Path) -> bool:
    """Whether a second writer of this log is."""
    from ..lock import Lock, beside

    try:
        Lock(beside(path)).release()
    except BlockingIOError:
        return True
    return False


def disk_room(host: Host) -> Finding:
    folder = existing(host.folder)
    free = shutil.disk_usage(folder).free
    told, remedy = f"{size(free)} free in {folder}", "free some space, or log= and checkpoint= to another file system"
    if free < NO_DISK_BYTES:
        return error("disk room", told, remedy)
    return warning("disk room", told, remedy) if free < FEW_DISK_BYTES else ok("disk room", told)


def existing(folder: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.isdir(path))


Check = Callable[[Host], Found]

CHECKS: tuple[Check, ...] = (
    mpi_library,
    thread_level,
    largest_tag,
    launcher,
    mpiexec,
    packages,
    cores,
    waiting,
    timer,
    shared_memory,
    file_locks,
    disk_room,
    slurm,
)


OF_NODES: tuple[Check, ...] = (cores, timer, shared_memory)  # which may differ from that of rank 0


def examine(host: Host, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """What each check finds, in their order."""
    for check in checks:
        yield from each(check(host))
