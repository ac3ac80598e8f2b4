"""The device that each rank computes on, and what its MPI can do with it, as command line and environment say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import Config
    from ..runtime.staging import Staging


def find_staging(world: Any, local_rank: int, config: Config) -> tuple[Staging, str, int]:
    """This rank's device and its way to MPI; all ranks' in words; and how many of them share this one's. Collective.
    Raises InputError."""
    from mpi4py import MPI

    from ..runtime.agreement import agree
    from ..runtime.device import UNAWARE, awareness_of, describe_sharing, locate, staging_on, use_device

    device = agree(world, lambda: use_device(config.device, local_rank))
    aware = UNAWARE
    if world.allreduce(device.type == "cuda", MPI.LOR):
        info = world.bcast(_ompi_info() if world.rank == 0 else None)
        aware = awareness_of(world, config.device_aware_mpi, os.environ, info)
    staging = staging_on(device, aware)
    mine = locate(device, MPI.Get_processor_name())
    everyone = world.allgather(mine)
    where = describe_sharing(everyone)
    return staging, where if device.type == "cpu" else f"{where}, {staging}", everyone.count(mine)


def _ompi_info() -> str:
    """What Open MPI tells of itself, where it is there: the one beside this Python first."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    program = shutil.which("ompi_info", path=path)
    if program is None:
        return ""
    try:
        return subprocess.run([program, "--parsable", "--all"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
