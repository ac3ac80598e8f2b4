"""Look at this machine as `train` would meet it; under mpirun, try messages and all-reduces. `--parity` compares a
training step of a scheme with one process."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import InputError
from ._devices import find_staging
from ._ranks import ending_together, library_name, refuse_singletons

EXAMPLE = """\
  mpirun -n 4 chimera-mpi doctor
  mpirun -n 4 chimera-mpi doctor --parity scheme=chimera depth=4 micro_batches=8"""


class Finding(NamedTuple):
    """`state` is ok, warning or error."""

    state: str
    what: str
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parity", action="store_true", help="does training equal one process here?")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="of --parity, such as scheme=chimera depth=4")


def run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with ending_together(world):
        try:
            return _parity(world, args.overrides) if args.parity else _examine(world)
        except InputError:
            if world.rank == 0:
                raise
            return 2


def _examine(world: Any) -> int:
    findings = list(_findings(world))
    if world.rank == 0:
        for finding in findings:
            print(
                f"{finding.state:8}{finding.what:16}{finding.found}" + (f": {finding.remedy}" if finding.remedy else "")
            )
    return int(any(finding.state == "error" for finding in findings))


def _findings(world: Any) -> Iterator[Finding]:
    from mpi4py import MPI

    from ..runtime.grid import find_node
    from ..runtime.mailbox import tag_bound

    yield Finding("ok", "MPI", library_name())
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    yield Finding("ok", "thread level", levels.get(MPI.Query_thread(), "multiple"))
    yield Finding("ok", "largest tag", str(tag_bound(world)))
    yield _launcher(world)
    node = find_node(world)
    shared = node.ranks > node.cores
    yield Finding(
        "warning" if shared else "ok",
        "cores",
        f"{node.ranks} ranks on {node.cores} cores of this node, {node.threads} thread(s) each, {node.patience}",
        "ranks share cores: start fewer for speed" if shared else "",
    )
    yield _locking()
    yield _devices(world, node.rank)
    if world.size > 1:
        yield _ring(world, node.patience)
        yield _allreduce(world, node.patience)


def _devices(world: Any, local_rank: int) -> Finding:
    from ..config import checked

    return Finding("ok", "devices", find_staging(world, local_rank, checked({}))[1])


def _launcher(world: Any) -> Finding:
    try:
        refuse_singletons(world.size, os.environ)
    except InputError as error:
        return Finding("error", "launcher", str(error))
    return Finding("ok", "launcher", f"{world.size} rank(s)")


def _locking() -> Finding:
    from ..runlog import locks_wanted

    if locks_wanted(os.environ):
        return Finding("ok", "HDF5 locking", "on")
    return Finding("warning", "HDF5 locking", "off", "two runs on one log would not see each other")


def _ring(world: Any, patience: Any) -> Finding:
    import numpy as np

    sent, received = np.full(1 << 17, world.rank, dtype=np.float64), np.empty(1 << 17)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    started = time.perf_counter()
    patience.wait(world.Irecv(received, before), world.Isend(sent, after))
    seconds = time.perf_counter() - started
    whole = all(world.allgather(bool((received == before).all())))
    return Finding("ok" if whole else "error", "ring of 1 MiB", f"{seconds * 1e3:.2f} ms" if whole else "wrong values")


def _allreduce(world: Any, patience: Any) -> Finding:
    import numpy as np
    from mpi4py import MPI

    numbers = np.full(1 << 17, world.rank + 1.0)
    started = time.perf_counter()
    patience.wait(world.Iallreduce(MPI.IN_PLACE, numbers))
    seconds = time.perf_counter() - started
    whole = all(world.allgather(bool((numbers == world.size * (world.size + 1) / 2).all())))
    return Finding("ok" if whole else "error", "all-reduce", f"{seconds * 1e3:.2f} ms" if whole else "wrong values")


def _parity(world: Any, overrides: list[str]) -> int:
    from ..config import load
    from ..predict.partition import Recompute
    from ..runtime.agreement import agree
    from ..runtime.grid import find_node
    from ..runtime.parity import parity
    from ..runtime.pipeline import Settings
    from ..tasks import random_corpus
    from ..train import plan_job, read_micro_batch

    small = ["layers=12", "hidden=32", "heads=4", "positions=16", "sequence_length=16", "micro_batch_size=2"]
    config = agree(world, lambda: load("gpt-tiny", [*small, *overrides]))
    job = agree(world, lambda: plan_job(config, world.size))
    if job.plan.schedule.updates > 1:
        raise InputError(f"{config.scheme} is asynchronous and does not equal one process: try scheme=chimera")
    batches = job.task.batches(random_corpus(config, job.task), job.sizes, config.seed)
    micro_batches = [read_micro_batch(batches, 0, number) for number in range(len(job.sizes))]
    staging, devices = find_staging(world, find_node(world).rank, config)
    recompute = Recompute.of(config.recompute)
    settings = Settings(seed=config.seed, recompute=recompute, cuts=tuple(job.cuts), staging=staging)
    differences = parity(world, job.plan.schedule, job.task.model, micro_batches, settings)
    worst = world.bcast(max(d.relative for d in differences) if differences else None)
    if differences:
        print(f"devices: {devices}")
        print("stage  rank  largest relative difference of a weight after two steps, to one process in float64")
        for difference in differences:
            print(f"{difference.stage:5}{difference.rank:6}  {difference.relative:.1e}")
        print("equal" if worst < 1e-12 else "NOT equal")
    return int(not worst < 1e-12)
