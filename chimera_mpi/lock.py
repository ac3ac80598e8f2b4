"""A lock that keeps two jobs from writing one thing."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system that grants none


class Lock:
    """Held on a file of its own, on one node or several; ends with its process, however that ends.

    flock: it belongs to the open file, so nothing else that this process opens or closes can lose it, unlike lockf. The
    file goes when the lock is released; one left by a killed owner holds no lock.
    """

    def __init__(self, path: Path, wanted: bool = True) -> None:
        """Raises `BlockingIOError` if another holds it; where it is not `wanted` it is none."""
        self.path, self.wanted, self._descriptor = path, wanted, -1
        while wanted and self._descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # no locks here: nobody needs the file
                    path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
            if _is_at(path, descriptor):
                self._descriptor = descriptor
                with suppress(OSError):  # a full disk keeps nobody from locking
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
            else:  # its owner removed it between our two calls
                os.close(descriptor)

    def share(self, descriptor: int) -> None:
        """Lock another file as its readers do."""
        if self.wanted:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def lock_if_possible(path: Path) -> Lock:
    """Raises `BlockingIOError` if another holds it; it is none where the file system grants none."""
    try:
        return Lock(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return Lock(path, wanted=False)


def beside(path: Path) -> Path:
    """What to lock for the file at `path`, the same by whatever links it is reached."""
    real = Path(os.path.realpath(path))
    return real.with_name(real.name + ".lock")


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file still has this name. Over NFS one that another node has removed does not show by its number
    of links."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def owner(path: Path) -> str:
    """Who holds the lock on this file."""
    with suppress(OSError):
        return path.read_text() or "another program"
    return "another program"


def owner_lives(path: Path) -> bool | None:
    """Whether the process that holds, or held, the lock on this file lives; None if that cannot be seen from here.

    It asks for the process and not for the lock: to try the lock, if only for a moment, may refuse it to a job.
    """
    held = re.fullmatch(r"process (\d+) on (.*)", owner(path))
    if held is None or held[2] != platform.node():
        return None
    try:
        os.kill(int(held[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return not _is_dead(int(held[1]))


def _is_dead(process: int) -> bool:
    """Ended, but nobody has asked how: as in a container whose first process asks after none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    return False
