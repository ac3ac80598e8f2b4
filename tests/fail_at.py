"""Run `chimera-mpi` with a fault in it: fail_at.py PHASE[:FAULT[:CALL]] RANK ARGUMENTS.

In the given phase, at its first CALL or a later one, one rank raises, or does what FAULT says. The phase `clock` comes
CALL ms after the start, `run` so long after the first step has begun. Several faults, and as many ranks, are joined by
plus signs.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from mpi4py import MPI

from chimera_mpi import checkpoint, config, data, report, runlog, survival, train
from chimera_mpi.cli import main
from chimera_mpi.runtime import crew, gradients, handover, norm, pipeline, stage

PHASES = {
    "config": (config, "load"),
    "data": (data, "open_corpus"),
    "build": (pipeline.Pipeline, "_mailbox"),
    "begin": (train.Run, "run"),
    "forward": (stage.Stage, "forward"),
    "backward": (torch.autograd, "backward"),
    "reduce": (gradients.Gradients, "_start"),
    "judge": (norm.GlobalNorm, "heed"),
    "update": (torch.optim.AdamW, "step"),
    "evaluate": (train.Run, "evaluate"),
    "log": (runlog.RunLog, "step"),
    "flush": (runlog._Bursts, "commit"),
    "write": (checkpoint.Draft, "write"),
    "commit": (checkpoint.Draft, "commit"),
    "report": (report, "summary"),
    "close": (train.Run, "close"),
    "recover": (survival.Survival, "_go_on"),
    "hand_over": (survival.Survival, "_begin"),
    "handed_over": (handover.Handover, "finish"),
    "agree": (crew.Crew, "agree"),
}


def broken(*arguments, **named):
    raise RuntimeError("a fault put in")


def sleep(*arguments, **named):
    while True:
        time.sleep(1)


def kill(*arguments, **named):
    """And leave a file named FAULT_TOLD, if it is set."""
    if told := os.environ.get("FAULT_TOLD"):
        open(told, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def launcher():
    """The process that FAULT_LAUNCHED_BY started, of which this one comes."""
    process = os.getpid()
    while True:
        with open(f"/proc/{process}/stat") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])
        if parent in (int(os.environ["FAULT_LAUNCHED_BY"]), 0, 1):
            return process
        process = parent


def sending(number, find_process, times=1):
    """To go on with the phase after a signal, or several, each a while after the other."""

    def send(original, *arguments, **named):
        for again in range(times):
            time.sleep(1.5 * again)
            os.kill(find_process(), number)
        return original(*arguments, **named)

    return send


def spoilt(original, *arguments, **named):
    """What the phase returns, not a number."""
    return tuple(tensor * torch.nan for tensor in original(*arguments, **named))


INSTEAD = {
    "raise": broken,
    "hang": sleep,
    "freeze": lambda *_, **__: ctypes.PyDLL(None).sleep(10**6),  # and no other thread of the rank runs
    "exit": lambda *_, **__: sys.exit(0),
    "vanish": lambda *_, **__: os._exit(0),
    "kill": kill,
}
BESIDES = {
    "nan": spoilt,
    "interrupt": sending(signal.SIGINT, os.getpid),
    "interrupt_twice": sending(signal.SIGINT, os.getpid, times=2),
    "term": sending(signal.SIGTERM, os.getpid),
    "usr1": sending(signal.SIGUSR1, os.getpid),
    "term_launcher": sending(signal.SIGTERM, launcher),
    "usr1_launcher": sending(signal.SIGUSR1, launcher),
}


def faulty(original, fault, at_call):
    calls = 0

    def phase(*arguments, **named):
        nonlocal calls
        calls += 1
        if fault in BESIDES and (calls == at_call or (fault == "nan" and calls > at_call)):
            return BESIDES[fault](original, *arguments, **named)
        return (INSTEAD[fault] if fault in INSTEAD and calls >= at_call else original)(*arguments, **named)

    return phase


def soon(original, fault, ms):
    """A phase that goes on as ever, and is followed by a fault so much later."""

    def phase(*arguments, **named):
        threading.Timer(ms / 1e3, INSTEAD[fault]).start()
        return original(*arguments, **named)

    return phase


def put_in(what):
    name, fault, call = (what.split(":") + ["raise", "1"][what.count(":") :])[:3]
    if name == "clock":
        threading.Timer(int(call) / 1e3, INSTEAD[fault]).start()
    elif name == "run":
        train.Run.run = soon(train.Run.run, fault, int(call))
    else:
        place, attribute = PHASES[name]
        setattr(place, attribute, faulty(getattr(place, attribute), fault, int(call)))


if __name__ == "__main__":
    faults, ranks, *arguments = sys.argv[1:]
    for what, rank in zip(faults.split("+"), ranks.split("+"), strict=True):
        if MPI.COMM_WORLD.rank == int(rank):
            put_in(what)
    sys.exit(main(arguments))
