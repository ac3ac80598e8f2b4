"""Send a job back into the queue of a Slurm again and again, and see that in the end nothing shows it.

    python scripts/bench/requeue.py 20 --crashes 2

A private Slurm of five nodes, each with a network of its own, runs a training on four of them. At random moments the
job is preempted by a more urgent one, warned by USR1, requeued by an administrator, or loses a node to a crash. It
must come back by itself each time, and its log and its last checkpoint must be, to the bit, those of a run that nobody
disturbed. As root.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _bench import ROOT, save, show

sys.path.insert(0, str(ROOT / "tests"))
from cluster import slurm
from cluster.network import Network
from cluster.place import Place

from chimera_mpi.data import prepare
from chimera_mpi.runlog import read_run

RUNNING_S, BACK_S = 60.0, 120.0  # until a job runs, until it is in the queue again
MODEL = {
    "layers": 6, "hidden": 16, "heads": 2, "positions": 16, "sequence_length": 16, "mini_batch_size": 12,
    "micro_batches": 4, "warmup_steps": 2, "eval_every": 500, "spin_s": 5e-5, "scheme": "chimera", "depth": 4,
    "checkpoint_every": 20,
}  # fmt: skip
GENTLE = ("preempted", "warned", "requeued")
COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "samples")


class Trials:
    """One run that is disturbed, beside one that is not."""

    def __init__(self, cluster: slurm.Slurm, folder: Path, steps: int, chance: random.Random):
        self.cluster, self.steps, self.chance = cluster, steps, chance
        self.place = Place(cluster, folder)
        self.place.environment |= {"CONFIG": "run.toml", "THREADS": "1"}
        self.place.use(None)
        prepare(folder / "corpus.h5", [ROOT / "data" / "pipelines.txt"])
        keys = {**MODEL, "steps": steps, "data": "corpus.h5"}
        (folder / "run.toml").write_text("".join(f"{key} = {value!r}\n" for key, value in keys.items()))

    def submit(self, name: str) -> str:
        return self.place.submit("--nodes=4", f"--output={name}.out", RUN=name)

    def disturb(self, job: str, how: str) -> float:
        """Once it has run for a random time; returns when it runs again, the seconds it took to be in the queue."""
        self.cluster.wait(job, RUNNING_S, "RUNNING")
        time.sleep(self.chance.uniform(0.5, 12))
        began = time.monotonic()
        if how == "preempted":
            urgent = self.place.submit(
                "--partition=urgent", "--nodes=5", "--output=urgent.out", script=self._urgent_script()
            )
            self.cluster.wait(urgent, BACK_S)
        elif how == "warned":
            self.cluster.run("scancel", "--batch", "--signal=USR1", job)
        elif how == "requeued":
            self.cluster.run("scontrol", "requeue", job)
        else:
            lost = self.chance.choice(self._nodes_of(job))
            self.cluster.crash(lost)
        self.cluster.wait(job, BACK_S, "PENDING", "COMPLETED")
        back_s = time.monotonic() - began
        self.cluster.start_now(job)
        if how == "crashed":
            self.cluster.wait(job, RUNNING_S, "RUNNING", "COMPLETED")
            self.cluster.start_node(lost)
        return back_s

    def _urgent_script(self) -> Path:
        script = self.place.folder / "urgent.sh"
        script.write_text("#!/bin/bash\nsleep 1\n")
        return script

    def _nodes_of(self, job: str) -> list[str]:
        named = self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(job)["NodeList"])
        return named.stdout.split()

    def differs(self, name: str, other: str) -> str:
        """What of two finished runs is not the same."""
        mine, whole = (read_run(self.place.folder / run / "log.h5") for run in (name, other))
        for column in COLUMNS:
            if not np.array_equal(mine.steps[column], whole.steps[column]):
                return f"{column} differs"
        here, there = (self._last_checkpoint(run) for run in (name, other))
        return "" if here == there else "the last checkpoint differs"

    def _last_checkpoint(self, run: str) -> dict[str, bytes]:
        found = (self.place.folder / run).glob(f"checkpoints/step-*{self.steps}/*.safetensors")
        return {path.name: path.read_bytes() for path in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=int, help="that the job is sent back without a crash")
    parser.add_argument("--crashes", type=int, default=0, help="of a node, among them")
    parser.add_argument("--steps", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if reason := slurm.why_not():
        parser.error(reason)
    chance = random.Random(asked.seed)
    events = [chance.choice(GENTLE) for _ in range(asked.times)] + ["crashed"] * asked.crashes
    chance.shuffle(events)
    folder = Path(tempfile.mkdtemp(prefix="requeue-"))
    (folder / "slurm").mkdir()
    with Network(5, folder) as network, slurm.Slurm(folder / "slurm", 5, 2, network) as cluster:
        (folder / "runs").mkdir()
        folder.chmod(0o755)
        trials = Trials(cluster, folder / "runs", asked.steps, chance)
        whole = trials.submit("whole")
        print(f"undisturbed: {cluster.wait(whole, 600)['JobState']}", flush=True)
        job, rows = trials.submit("run"), []
        for number, how in enumerate(events):
            rows.append((how, trials.disturb(job, how)))
            restarts = cluster.job(job)["Restarts"]
            print(f"{number}: {how}: in the queue after {rows[-1][1]:.1f} s, restarts {restarts}", flush=True)
        ended = cluster.wait(job, 600)
        wrong = trials.differs("run", "whole") if ended["JobState"] == "COMPLETED" else ended["JobState"]
        sessions = len(read_run(folder / "runs" / "run" / "log.h5").sessions)
    of_kind = {how: [s for name, s in rows if name == how] for how in dict.fromkeys(name for name, _ in rows)}
    show("sent back", ["how", "times", "longest, s"], [(how, len(s), f"{max(s):.1f}") for how, s in of_kind.items()])
    print(f"{len(rows)} times sent back, {sessions} sessions in the log: {wrong or 'the same bits'}")
    save(asked.json, [{"how": how, "back_s": back_s} for how, back_s in rows])
    if wrong:
        print(f"see {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
