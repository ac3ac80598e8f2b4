"""What the MPI library does by itself when a rank dies: no code of this project is in here.

The ranks add up numbers until the last of them is killed. The others say "told" once they know, "agreed" once they have
left it out and agreed on that, and "finalized" once MPI_Finalize has come back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import mpi4py

mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402


def say(what: str) -> None:
    os.write(1, f"{what}\n".encode())


def main() -> None:
    world = MPI.COMM_WORLD
    comm = world.Dup()
    if comm.rank == comm.size - 1:
        threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    number = bytearray(8)
    try:
        while True:
            adding = comm.Iallreduce(MPI.IN_PLACE, [number, MPI.DOUBLE])
            while not adding.Test():
                time.sleep(1e-4)
    except MPI.Exception:
        say("told")
    comm.Revoke()
    left = comm.Shrink()
    assert left.Agree(1) == 1
    say("agreed")
    MPI.Finalize()
    say("finalized")


if __name__ == "__main__":
    main()
