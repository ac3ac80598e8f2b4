"""Run `chimera-mpi` until it saves: die_while_saving.py STEP RANK ARGUMENTS. The rank is killed when half a layer of
the checkpoint of that step is on disk."""

import os
import signal
import sys

from mpi4py import MPI

from chimera_mpi.checkpoint import Draft
from chimera_mpi.cli import main

write = Draft.write


def half(draft, index, tensors):
    file = write(draft, index, tensors)
    if draft.step == step:
        os.truncate(draft.part / file.name, file.nbytes // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return file


if __name__ == "__main__":
    step, rank = map(int, sys.argv[1:3])
    if MPI.COMM_WORLD.rank == rank:
        Draft.write = half
    sys.exit(main(sys.argv[3:]))
