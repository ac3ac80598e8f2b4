"""Run `chimera-mpi` with a fault in it: fail_at.py PHASE RANK ARGUMENTS. One rank raises in the given phase."""

import sys

import torch
from mpi4py import MPI

from chimera_mpi import config, data, report, runlog
from chimera_mpi.cli import main
from chimera_mpi.runtime import pipeline, stage

PHASES = {
    "config": (config, "load"),
    "data": (data, "open_corpus"),
    "build": (pipeline.Pipeline, "_mailbox"),
    "forward": (stage.Stage, "forward"),
    "backward": (torch.autograd, "backward"),
    "update": (torch.optim.AdamW, "step"),
    "log": (runlog.RunLog, "step"),
    "report": (report, "summary"),
}


def broken(*arguments, **named):
    raise RuntimeError("a fault put in")


if __name__ == "__main__":
    phase, rank, *arguments = sys.argv[1:]
    if MPI.COMM_WORLD.rank == int(rank):
        setattr(*PHASES[phase], broken)
    sys.exit(main(arguments))
