"""The ranks of a job that live, and how they find out together that others have died.

By User-Level Failure Mitigation (ULFM; MPI Forum, MPI 5 working draft): an operation that needs a dead rank ends in an
error; whoever sees one revokes the communicators he has, so that those who wait for him see one too; then all agree on
what has come to its end, and leave the dead out of the next communicator. Open MPI 5 has it, where its mpirun was told.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from mpi4py import MPI

from ..errors import InputError, RunFailed, complain
from .grid import Comm
from .waiting import Patience

T = TypeVar("T")

# The last one is what a test of several requests says, whatever has become of one of them.
DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS}
IDLE_NAP_S = 0.01
NOBODY_DIED, NOTHING_FAILED = 1, 2  # the bits of what ranks agree on
ALL_WELL = NOBODY_DIED | NOTHING_FAILED
REMEDY = "start it by `mpirun --with-ft ulfm` of Open MPI 5, or set survive=none"


def why_not(library: str, environ: Mapping[str, str]) -> str:
    """Why ranks cannot outlive others under this MPI `library`, started with this environment; nothing if they can."""
    if "Open MPI" not in library:
        name = library.split()[0]
        return f"survive=replicas needs an MPI that tells who has died (ULFM), and {name} does not: {REMEDY}"
    if environ.get("OMPI_MCA_mpi_ft_enable", "").lower() not in ("1", "true"):
        return f"survive=replicas needs ULFM, and this job was started without it: {REMEDY}"
    return ""


def is_death(error: BaseException | None) -> bool:
    """Whether an exception, or what it comes of, is that somebody has died."""
    while error is not None:
        if isinstance(error, MPI.Exception):
            return error.Get_error_class() in DEATHS
        error = error.__cause__
    return False


class Died(Exception):
    """Ranks have died, as all that live know. `where` is what this one was at when it learned of it; `saw_it` if it was
    waiting for a dead rank itself."""

    def __init__(self, where: str, saw_it: bool):
        super().__init__(where)
        self.where, self.saw_it = where, saw_it


class Crew:
    """All ranks that live, also those that stand by. Its own communicator, `comm`, changes when it shrinks; `ranks` are
    their numbers when the job began."""

    def __init__(self, world: Comm, patience: Patience, limit_s: float):
        """Whoever hangs in the library for `limit_s` while the others find out who lives ends himself, and is dead."""
        self.comm: Comm = world.Dup()
        self.ranks, self.limit_s = tuple(range(world.size)), limit_s
        self.patience = replace(patience, longest_nap_s=IDLE_NAP_S)  # some stand by for long
        self.is_whole = True  # nobody has died so far

    def attempt(self, act: Callable[[], T], abandon: Callable[[], None]) -> T:
        """What `act` returns, once it has on all ranks. Raises Died on all if somebody dies meanwhile, or RunFailed on
        all if one raises that; the others are torn from theirs. `abandon` is called before: it must let nobody wait for
        this rank. Collective."""
        error, saw_it = None, False
        try:
            result = act()
            self.patience.wait(self.comm.Ibarrier())
        except (RuntimeError, InputError) as raised:
            if not (_is_failure(raised) or is_death(raised)):
                raise
            error, saw_it = raised, not self.comm.Is_revoked()
            self.comm.Revoke()
            abandon()
        found = self.agree(_bits(error))
        if found == ALL_WELL:
            return result
        if error is None:  # others, or one who has died since
            abandon()
        if not found & NOTHING_FAILED:
            raise error if isinstance(error, InputError) else RunFailed(_failure_told(error), on_all=True)
        raise Died("" if isinstance(error, MPI.Exception) else str(error or ""), saw_it) from error

    def agree(self, word: int) -> int:
        """The bits that are set in all `word`s; only NOTHING_FAILED if somebody has died meanwhile. Collective."""
        with self.limited("an agreement"):
            try:
                return int(self.comm.Agree(word))
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                return NOTHING_FAILED

    def seated(self, seats: Sequence[int]) -> Comm | None:
        """A communicator of those who have a seat, in the order of seats. Collective."""
        mine = self.comm.rank
        seat = seats.index(mine) if mine in seats else None
        part = cast(Comm, self.comm.Split(int(seat is None), seat or 0))
        if seat is None:
            part.Free()
        return None if seat is None else part

    def shrink(self) -> tuple[int, ...]:
        """Go on without the dead, whose numbers it returns. Collective. Raises RuntimeError if nobody is dead."""
        before, ranks, self.is_whole = self.comm, self.ranks, False
        with self.limited("shrinking"):
            self.comm = cast(Comm, before.Shrink())
        self.ranks = tuple(ranks[at] for at in self.comm.group.Translate_ranks(None, before.group))
        if len(self.ranks) == len(ranks):
            raise RuntimeError("MPI failed as it does when a rank has died, but all are there")
        return tuple(rank for rank in ranks if rank not in self.ranks)

    @contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Around what must not take long; else this process ends, which to the others is one more death."""
        timer = threading.Timer(self.limit_s, partial(_end, self.ranks[self.comm.rank], what, self.limit_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _is_failure(error: BaseException | None) -> bool:
    return isinstance(error, (RunFailed, InputError))


def _failure_told(error: BaseException | None) -> str:
    return str(error) if _is_failure(error) else "another rank has failed"


def _bits(error: BaseException | None) -> int:
    if error is None:
        return ALL_WELL
    return NOBODY_DIED if _is_failure(error) else NOTHING_FAILED


def _end(rank: int, what: str, limit_s: float) -> None:
    after = f"after the death of a rank, for {limit_s:.0f} s: it ends"
    complain(f"chimera-mpi: rank {rank} hangs in MPI, in {what} {after}")
    faulthandler.dump_traceback()
    os._exit(1)
