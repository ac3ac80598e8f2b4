"""Kill ranks at random moments and see that nothing is lost.

    python scripts/bench/chaos.py 100 --seed 1

Each trial starts a small training run, kills one rank of it by SIGKILL at a random call of a random part of the
program, or at a random time, and starts the same command again until it is through. It asks that the killed job ends
within 10 s and not by 0, that its log can be read, and that in the end losses and weights are, to the bit, those of a
run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _bench import ROOT, mpiexec, save, show, started
from _faults import OF_RANK_0, Fault

from chimera_mpi.checkpoint import read_checkpoint
from chimera_mpi.data import prepare
from chimera_mpi.runlog import read_run

END_S = 10.0  # in which a job must end once a rank is killed
JOB_S = 300.0
STEPS = 8
KEYS = {
    "layers": 4, "hidden": 16, "heads": 2, "positions": 16, "sequence_length": 16, "dropout": 0.1,
    "depth": 2, "micro_batches": 4, "mini_batch_size": 16, "steps": STEPS, "eval_every": 4, "spans_every": 4,
    "checkpoint": "checkpoints", "checkpoint_every": 2, "resume": "auto", "log": "run.h5", "watchdog_s": 30,
}  # fmt: skip
# Parts of the program by their names in tests/fail_at.py, and how often at most a rank comes by each of them.
PHASES = {
    "config": 1,
    "data": 2,
    "begin": 1,
    "forward": 8 * STEPS,
    "backward": 8 * STEPS,
    "reduce": 8 * STEPS,
    "update": 2 * STEPS,
    "evaluate": 2,
    "log": STEPS,
    "flush": 12,
    "write": 16,
    "commit": 4,
    "close": 1,
    "clock": 12_000,  # ms
}


@dataclass(frozen=True)
class Trial:
    fault: Fault
    was_hit: bool
    ended_s: float  # after the kill
    wrong: str  # nothing, or what went wrong


def fault_of(chance: random.Random, ranks: int) -> Fault:
    phase = chance.choice(sorted(PHASES))
    return Fault(phase, chance.randint(1, PHASES[phase]), 0 if phase in OF_RANK_0 else chance.randrange(ranks))


class Chaos:
    """Trials in folders of their own, beside a run without faults."""

    def __init__(self, folder: Path, scheme: str, ranks: int):
        self.folder, self.scheme, self.ranks = folder, scheme, ranks
        prepare(folder / "corpus.h5", [ROOT / "data" / "pipelines.txt"])
        code, said = self.start(folder / "whole")
        if code:
            sys.exit(f"the run without faults failed:\n{said}")

    def start(self, folder: Path, fault: Fault | None = None) -> tuple[int, str]:
        """The run's exit code and what it said."""
        folder.mkdir(exist_ok=True)
        program = [str(ROOT / "tests" / "fail_at.py"), str(fault), str(fault.rank)] if fault else ["-m", "chimera_mpi"]
        asked = {**KEYS, "scheme": self.scheme, "data": self.folder / "corpus.h5"}
        keys = [f"{key}={value}" for key, value in asked.items()]
        command = [*mpiexec(), "-n", str(self.ranks), sys.executable, *program, "train", "gpt-tiny", *keys]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": folder}
        with started([command], [{"FAULT_TOLD": str(folder / "killed")}], **pipes) as (job,):
            try:
                said = job.communicate(timeout=JOB_S)[0]
            except subprocess.TimeoutExpired:
                return 124, f"still running after {JOB_S:.0f} s"
        return job.returncode, said

    def attempt(self, number: int, fault: Fault) -> Trial:
        """Kill it once, and start it until it is through."""
        folder = self.folder / f"trial-{number}"
        code, said = self.start(folder, fault)
        killed = folder / "killed"
        was_hit = killed.exists()
        ended_s = time.time() - killed.stat().st_mtime if was_hit else 0.0
        wrong = self._examine(folder, code, ended_s) if was_hit else ""
        if not wrong and code:
            code, said = self.start(folder)
            wrong = f"started again it ended by {code}: {said.strip()[-2000:]}" if code else ""
        wrong = wrong or self._differs(folder)
        if not wrong:
            shutil.rmtree(folder)
        return Trial(fault, was_hit, ended_s, wrong)

    def _examine(self, folder: Path, code: int, ended_s: float) -> str:
        """What is wrong with a job that was killed."""
        if code == 0:
            return "its exit code is 0"
        if ended_s > END_S:
            return f"it ended after {ended_s:.1f} s"
        log = folder / "run.h5"
        return _reading(lambda: read_run(log)) if log.exists() else ""

    def _differs(self, folder: Path) -> str:
        """What of a finished run is not as it must be."""
        mine, whole = read_run(folder / "run.h5"), read_run(self.folder / "whole" / "run.h5")
        for column in ("step", "loss", "grad_norm", "learning_rate"):
            if not np.array_equal(mine.steps[column], whole.steps[column]):
                return f"{column} is {mine.steps[column].tolist()}, not {whole.steps[column].tolist()}"
        if not np.array_equal(mine.evaluations["loss"], whole.evaluations["loss"]):
            return f"evaluations are {mine.evaluations['loss'].tolist()}"
        last = f"checkpoints/step-{STEPS:08d}"
        (_, layers), (_, others) = (read_checkpoint(at / last) for at in (folder, self.folder / "whole"))
        for index, (layer, other) in enumerate(zip(layers, others, strict=True)):
            for name in layer.keys() | other.keys():
                if not layer[name].equal(other[name]):
                    return f"{name} of layer {index} differs"
        return ""


def _reading(read) -> str:
    try:
        read()
    except Exception as error:
        return f"its log cannot be read: {error}"
    return ""


@contextmanager
def own_folder(keep: Path | None) -> Iterator[Path]:
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scheme", default="chimera")
    parser.add_argument("--ranks", type=int, default=2, help="a multiple of 2, the depth")
    parser.add_argument("--folder", type=Path, help="for the runs; those that went wrong stay there")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    faults = [fault_of(chance, asked.ranks) for _ in range(asked.trials)]
    trials = []
    with own_folder(asked.folder) as folder:
        chaos = Chaos(folder, asked.scheme, asked.ranks)
        for number, fault in enumerate(faults):
            trial = chaos.attempt(number, fault)
            trials.append(trial)
            end = f"ended in {trial.ended_s:.1f} s" if trial.was_hit else "was through before"
            print(f"{number}: {fault} of rank {fault.rank}: {end}: {trial.wrong or 'as it must be'}", flush=True)
    hits, right = Counter(), Counter()
    for trial in trials:
        hits[trial.fault.phase] += trial.was_hit
        right[trial.fault.phase] += not trial.wrong
    tried = Counter(trial.fault.phase for trial in trials)
    show("killed in", ["phase", "trials", "killed", "right"], [[p, tried[p], hits[p], right[p]] for p in sorted(tried)])
    print(
        f"{sum(right.values())} of {len(trials)} right, {sum(hits.values())} killed, "
        f"the slowest end {max((t.ended_s for t in trials), default=0):.1f} s after it"
    )
    save(
        asked.json,
        [{"fault": str(t.fault), "rank": t.fault.rank, "ended_s": t.ended_s, "wrong": t.wrong} for t in trials],
    )
    return 0 if sum(right.values()) == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
