"""A private Slurm on this machine, without systemd: munged, slurmctld, and a slurmd for each node, as root.

    python tests/cluster/slurm.py --nodes 4 --cpus 2 [--network] bash

runs a command beside one; sbatch, squeue and scontrol in it are of this cluster.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.network import Network
from cluster.processes import Processes, free_ports, missing, search_path

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge libpmi2-0 libpmi0"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


def why_not() -> str | None:
    """Why there can be no Slurm here."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    if lacking := missing("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "setpriv"):
        return f"{lacking}: {INSTALL}"
    return None


class Slurm:
    """Nodes n1, n2, ... with a hostname and a /dev/shm each, and with a network each where one is given. Use `with`.

    Partitions: `main`, and `urgent`, whose jobs send those of `main` back into the queue.
    """

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 2, network: Network | None = None):
        self.folder, self.cpus, self.network = folder, cpus, network
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self.head = network.head if network else "127.0.0.1"
        self.environment = {
            **os.environ,
            "PATH": search_path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._processes = Processes(self.environment)

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._processes.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run("scancel", "--me", "--signal=KILL", "--full")
            self.run("scancel", "--me")
            self._until(lambda: not self.run("squeue", "--me", "--noheader").stdout.strip(), 15, "jobs do not end")
        finally:
            self._processes.end()

    # ---- jobs

    def run(self, *command: str, timeout_s: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of a user of this cluster."""
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**self.environment, **environment}
        )

    def submit(self, script: Path, *words: str, cwd: Path, **environment: str) -> str:
        """sbatch OPTIONS SCRIPT ARGUMENTS: `words` that begin with a dash are options. The number of the job."""
        options = [word for word in words if word.startswith("-")]
        arguments = [word for word in words if not word.startswith("-")]
        command = ["sbatch", "--parsable", f"--chdir={cwd}", *options, str(script), *arguments]
        done = self.run(*command, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, ExitCode, Restarts, ..."""
        shown = self.run("scontrol", "show", "--oneliner", "job", job)
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout.splitlines()[0]))

    def wait(self, job: str, timeout_s: float, *states: str) -> dict[str, str]:
        """Until the job is in one of these states, by default until it has ended for good."""
        wanted = set(states) or ENDED
        self._until(lambda: self.job(job)["JobState"] in wanted, timeout_s, f"job {job} is not {' or '.join(wanted)}")
        return self.job(job)

    def start_now(self, job: str) -> None:
        """A job that is queued again waits for two minutes: what is left of it on the nodes must be gone."""
        self._until(lambda: not [*self.folder.glob(f"spool/*/*_{job}.*")], 60, f"steps of job {job} do not end")
        time.sleep(1.5)  # for a second nodes refuse a job that they have ended
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    # ---- nodes

    def crash(self, node: str) -> None:
        """Kill all that runs on a node that has a network of its own, at once; nothing of it is left there."""
        assert self.network is not None
        inside = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(node)], capture_output=True, text=True, check=True
        )
        for process in inside.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        shutil.rmtree(self.folder / "spool" / node, ignore_errors=True)

    def start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir()
        (self.folder / "tmp" / node).mkdir(exist_ok=True)
        self._processes.start(self._node_command(node), self.folder / f"slurmd-{node}.log")

    def _until(self, condition, timeout_s: float, otherwise: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{otherwise} after {timeout_s} s\n{self._state()}")
            time.sleep(0.05)

    def _state(self) -> str:
        logs = [f"== {path}\n" + path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")]
        return "\n".join([self.run("squeue").stdout, self.run("sinfo", "-N").stdout, *logs])

    # ---- daemons

    def _start(self) -> None:
        for part in ("spool", "state", "munge", "tmp"):
            (self.folder / part).mkdir()
        (self.folder / "munge").chmod(0o711)
        self.folder.chmod(0o755)
        self._start_munge()
        control, *ports = free_ports(1 + len(self.nodes))
        (self.folder / "slurm.conf").write_text(self._configuration(control, ports))
        self._processes.start(["slurmctld", "-D", "-c"], self.folder / "slurmctld.log")
        for node in self.nodes:
            self.start_node(node)
        idle = f"{len(self.nodes)}"
        self._until(
            lambda: self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").stdout.strip() == idle,
            30,
            "nodes are not idle",
        )

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._processes.start(
            ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files], self.folder / "munged.log"
        )
        self._until((munge / "socket").exists, 10, "munged has no socket")

    def _node_command(self, node: str) -> list[str]:
        """slurmd with a hostname, a /dev/shm and a hosts file of its own.

        Not `ip netns exec`, which would mount a /sys that lacks the control groups that slurmd asks for.
        """
        hosts = self.network.hosts if self.network else self._hosts()
        inside = (
            f"hostname {node} && mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && "
            f"mount --bind {shlex.quote(str(hosts))} /etc/hosts && exec slurmd -D -N {node}"
        )
        enter = ["nsenter", f"--net=/run/netns/{self.network.namespace(node)}"] if self.network else []
        return [*enter, "unshare", "--mount", "--uts", "--ipc", "bash", "-c", inside]

    def _hosts(self) -> Path:
        path = self.folder / "hosts"
        path.write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in self.nodes))
        return path

    def _configuration(self, control_port: int, ports: list[int]) -> str:
        folder = self.folder
        settings = {
            "ClusterName": "chimera",
            "SlurmctldHost": f"{socket.gethostname()}({self.head})",
            "SlurmctldPort": control_port,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthInfo": f"socket={folder}/munge/socket",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": f"{folder}/spool/%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "TmpFS": f"{folder}/tmp/%n",  # where PMIx has sockets of each node
            "SlurmdParameters": "config_overrides",  # nodes have the CPUs that this file says
            # Control groups, affinity and accounting need more than a container has.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SwitchType": "switch/none",
            "MailProg": "/bin/true",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            # Tests do not wait as users do.
            "SchedulerParameters": "bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0",
            "KillWait": 10,
            "SlurmdTimeout": 20,
            "ReturnToService": 2,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for node, port in zip(self.nodes, ports, strict=True):
            address = self.network.addresses[node] if self.network else "127.0.0.1"
            where = f"NodeHostname={node} NodeAddr={address} Port={port}"
            lines.append(f"NodeName={node} {where} CPUs={self.cpus} RealMemory=4000 State=UNKNOWN")
        everywhere = f"Nodes={','.join(self.nodes)} MaxTime=1:00:00 DefaultTime=10 State=UP"
        lines.append(f"PartitionName=main {everywhere} Default=YES PriorityTier=1 GraceTime=20")
        lines.append(f"PartitionName=urgent {everywhere} PriorityTier=2 PreemptMode=OFF")
        return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=2, help="of each node")
    parser.add_argument("--network", action="store_true", help="nodes have a network each")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    folder = Path(tempfile.mkdtemp(prefix="chimera-slurm-"))
    try:
        with ExitStack() as stack:
            network = stack.enter_context(Network(args.nodes, folder)) if args.network else None
            slurm = stack.enter_context(Slurm(folder, args.nodes, args.cpus, network))
            environment: Mapping[str, str] = slurm.environment
            return subprocess.run(args.command or ["bash"], env=environment).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
