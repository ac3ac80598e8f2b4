"""Look at this machine as `train` would meet it: MPI, launcher, cores, memory, files, devices, Slurm.

Under mpirun or srun all ranks are compared, and messages, sums and overlap are tried, in a few seconds. Exit code 1 if
anything is wrong. `--parity` compares a training step of a scheme with one process.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from ._devices import find_staging
from ._findings import Finding, error, lines, worst
from ._host import Host, Library, Share
from ._host_checks import NO_MPI, OF_NODES, examine
from ._job_checks import Ranks, examine_together
from ._ranks import ending_together, library_name

EXAMPLE = """\
  chimera-mpi doctor
  mpirun -n 4 chimera-mpi doctor
  mpirun -n 4 chimera-mpi doctor --parity scheme=chimera depth=4 micro_batches=8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", type=Path, default=Path("runs"), metavar="FOLDER", help="of logs; default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--parity", action="store_true", help="does training equal one process here?")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="of --parity, such as scheme=chimera depth=4")


def run(args: argparse.Namespace) -> int:
    if args.overrides and not args.parity:
        raise InputError(f"{args.overrides[0]} is for --parity: give it, or leave the keys out")
    amiss = _amiss()
    if amiss and args.parity:
        raise InputError(f"{amiss.name} {amiss.what}: chimera-mpi doctor says more")
    if amiss:
        return _tell([amiss, *_alone(args.log)], args.json)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with ending_together(world):
        try:
            return _parity(world, args.overrides) if args.parity else _examine(world, args)
        except InputError:
            if world.rank == 0:
                raise
            return 2


def _amiss() -> Finding | None:
    """Which library, without which the others cannot be asked, is not there."""
    for name, module, remedy in (
        ("torch", "torch", "pip install torch, of https://pytorch.org/get-started for your GPUs"),
        ("MPI library", "mpi4py.MPI", NO_MPI),
    ):
        try:
            import_module(module)
        except (ImportError, OSError, RuntimeError) as missing:
            return error(name, f"cannot be loaded: {str(missing).splitlines()[0]}", remedy)
    return None


def _tell(findings: list[Finding], as_json: bool) -> int:
    """Print them; the exit code."""
    if as_json:
        print(json.dumps({"worst": worst(findings), "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        print("\n".join(lines(findings)))
    return int(worst(findings) == "error")


def _alone(folder: Path) -> list[Finding]:
    """What can be said without MPI."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return list(examine(Host(None, Share(1, own, own), folder, os.environ, os.cpu_count() or own)))


def _examine(world: Any, args: argparse.Namespace) -> int:
    """Rank 0 for all, a rank of each other node for what is its own, then all together."""
    from mpi4py import MPI

    from ..config import checked
    from ..runtime.grid import find_node
    from ..runtime.mailbox import tag_bound

    node = find_node(world)
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    library = Library(
        " ".join(library_name().split()), levels.get(MPI.Query_thread(), "multiple"), tag_bound(world), world.size
    )
    share = Share(node.ranks, node.cores, node.own_cores, str(node.patience))
    host = Host(library, share, args.log, os.environ, os.cpu_count() or node.cores)
    hosts = world.allgather(MPI.Get_processor_name())
    findings = list(examine(host)) if world.rank == 0 else []
    elsewhere = world.allgather(list(examine(host, OF_NODES)) if node.rank == 0 and world.rank else [])
    for rank, found in enumerate(elsewhere):
        findings += (f._replace(what=f"{f.what}, on {hosts[rank]}") for f in found if f.state != "ok")
    staging, devices, _ = find_staging(world, node.rank, checked({}))
    findings += examine_together(Ranks(world, node, hosts, staging, devices, args.log))
    return world.bcast(_tell(findings, args.json) if world.rank == 0 else 0)


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
    staging, devices, _ = find_staging(world, find_node(world).rank, config)
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
