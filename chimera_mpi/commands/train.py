"""Train a model. Under mpirun or srun every rank is a worker of a pipeline; alone, it is plain serial training."""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InputError, RunFailed, complain
from ..stopping import AGAIN, LAPS, End, Signals, Stops, TimeLimit, find_limit, save_seconds, share_limit
from ._desk import Desk
from ._job import Asked, facts_of, find_asked, fitted, on_rank_0, settle
from ._keys import listed
from ._ranks import end_all, ending_together, library_name, refuse_singletons
from ._terminal import say

if TYPE_CHECKING:
    from ..config import Config
    from ..train import Job, Run

HANG_S = 300.0  # that ranks may take to find out who lives, where watchdog_s says nothing; layers take time beside it

EXAMPLE = """\
  mpirun -n 4 chimera-mpi train gpt-tiny scheme=chimera depth=4 steps=60
  chimera-mpi train my.toml learning_rate=1e-3 log=runs/mine.h5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="PRESET|FILE.toml", help="gpt-tiny, gpt2-small, gpt2-paper, or a file of keys"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as depth=4")
    parser.add_argument_group("keys and their defaults", listed())


def run(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    if not faulthandler.is_enabled():
        faulthandler.enable()
    with Signals() as signals:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        refuse_singletons(world.size, os.environ)
        with ending_together(world):
            try:
                code = _train(world, args, signals, began_s)
                if code == AGAIN:
                    signals.hush()
                return code
            except InputError:
                if world.rank == 0:
                    raise
                return 2
            except RunFailed:
                if world.rank == 0:
                    raise
                return 1


@contextmanager
def _before_the_first_step(world: Any) -> Iterator[None]:
    """Tell in a line that a rank has died before others can survive it, and end all."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
            raise
        end_all(world, 1, "chimera-mpi: a rank has died before the first step: start the job again")


def _train(world: Any, args: argparse.Namespace, signals: Signals, began_s: float) -> int:
    from ..runtime.agreement import agree
    from ..runtime.crew import why_not

    config = agree(world, lambda: _configuration(args))
    if not config.survive:
        return _carry_out(world, config, signals, began_s)
    agree(world, lambda: _refuse(why_not(library_name(), os.environ)))
    with _before_the_first_step(world):
        return _carry_out(world, config, signals, began_s)


def _carry_out(world: Any, config: Config, signals: Signals, began_s: float) -> int:
    from ..runtime.agreement import agree

    asked = find_asked(world, config)
    if asked.resumed and asked.resumed.step == config.steps:
        if world.rank == 0:
            say(f"{asked.resumed.path} has all {config.steps} steps: raise steps= to go on")
        return 0
    facts = facts_of(world, settle(config, asked.node), asked)
    job = fitted(world, asked)
    limit = agree(world, on_rank_0(world, lambda: _limit(job, began_s)))
    stops = Stops(signals, share_limit(limit, world.bcast) if config.survive else limit)
    with ExitStack() as stack:
        desk = Desk(asked, facts, stops, stack)
        if config.survive:
            _survive(world, job, asked, desk)
        run = desk.begin(world, job, asked.resumed)
        end = run.run()
        desk.close(end)
        run.close()
    if world.rank == 0:
        _tell_end(run, end)
    return end.code


def _survive(world: Any, job: Job, asked: Asked, desk: Desk) -> NoReturn:
    """Carry out a job that outlives ranks, and end this process. Collective."""
    from ..models import parameter_count
    from ..runtime.agreement import agree
    from ..runtime.crew import Crew
    from ..survival import Survival, check_survivable

    agree(world, lambda: check_survivable(job))
    limit_s = job.config.watchdog_s if isinstance(job.config.watchdog_s, float) else HANG_S
    crew = Crew(world, asked.node.patience, limit_s + save_seconds(parameter_count(job.task.model)))
    machine_bytes = world.bcast(asked.machine.memory_bytes if asked.machine else math.inf)
    room_bytes = partial(_room_bytes, asked, machine_bytes)
    device = asked.staging.device.type
    survival = Survival(crew, job, desk.begin, desk.note, asked.resumed, room_bytes, device)
    try:
        end = survival.until_the_end()
    except RunFailed as error:
        if crew.is_whole:
            raise
        end = End(str(error), 1)
    desk.close(end)
    if survival.speaks:
        _tell_end(survival.run, end)
    # All ranks are done with MPI, but where one has died, be it just now, MPI may never be through with its own end.
    say("", end="")
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(end.code)


def _configuration(args: argparse.Namespace) -> Config:
    from ..config import check_together, load

    config = load(args.source, args.overrides)
    check_together(config)
    return config


def _refuse(why: str) -> None:
    if why:
        raise InputError(why)


def _room_bytes(asked: Asked, machine_bytes: float) -> float:
    """What this rank may take beside what it has."""
    from ..runtime.device import free_bytes

    return min(machine_bytes, free_bytes(asked.staging.device, asked.sharing))


def _tell_end(run: Run | None, end: End) -> None:
    """What there is of the run, and why it ended early."""
    log = run.log if run else None
    lines = ["", *_summary(log.path), f"log         {log.path}"] if log else []
    if run and run.saver and run.saver.newest:
        lines.append(f"checkpoint  {run.saver.newest}")
    lines += [f"profile     {words}" for words in (run.recorder.told if run and run.recorder else ())]
    if lines:
        say("\n".join(lines))
    if end.code:
        complain(f"chimera-mpi: {end.reason}")


def _summary(log: Path) -> list[str]:
    """A log that cannot be read changes nothing of how its run has ended."""
    from .. import report
    from ..runlog import read_run

    try:
        return report.summary(read_run(log))
    except InputError as error:
        return [f"there is no summary: {error}"]


def _limit(job: Job, began_s: float) -> TimeLimit | None:
    """Raises InputError."""
    from ..models import parameter_count

    config = job.config
    save_s = save_seconds(parameter_count(job.task.model)) if config.checkpoint else 0.0
    rhythm = max(config.eval_every or 1, config.checkpoint_every or 1, config.check_replicas or 1)
    return find_limit(config.time_limit, began_s, os.environ, save_s, max(LAPS, 1 + rhythm))
