"""Nodes on one machine that have a network each: namespaces with addresses of their own, joined by a bridge.

    python tests/cluster/network.py --nodes 4 mpiexec -n 4 -ppn 1 chimera-mpi train ...

puts the ranks of MPICH's mpiexec on such nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.processes import missing


def why_not() -> str | None:
    """Why there can be no such network here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := missing("ip", "nsenter", "unshare"):
        return lacking
    probe = f"cm{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine lets nobody make network namespaces"
    ip("netns", "delete", probe)
    return None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Network:
    """Hosts n1, n2, ... of `nodes` namespaces, at 10.S.0.1 and on; this machine is 10.S.0.254. Use `with`.

    S and all names are by the number of the process, so that several can be up at once. `hosts` is a hosts file.
    """

    def __init__(self, nodes: int, folder: Path):
        self.tag = os.getpid() % 100_000
        self.prefix = f"10.{64 + self.tag % 128}.0"
        self.head = f"{self.prefix}.254"
        self.bridge = f"cm{self.tag}"
        self.addresses = {f"n{i}": f"{self.prefix}.{i}" for i in range(1, nodes + 1)}
        self.hosts = folder / "hosts"
        self.folder = folder

    def namespace(self, node: str) -> str:
        return f"cm{self.tag}{node}"

    def port(self, number: int) -> str:
        """The bridge's end of a node's cable."""
        return f"cm{self.tag}v{number}"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for i, node in enumerate(self.addresses):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "delete", self.port(i))  # with its namespace it would go some time later, and keep its name
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self.namespace(node))
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", self.bridge)

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {node}" for node, address in self.addresses.items())]
        self.hosts.write_text("\n".join(lines) + "\n")
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.head}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for i, (node, address) in enumerate(self.addresses.items()):
            space, port = self.namespace(node), self.port(i)
            ip("netns", "add", space)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", port, "master", self.bridge, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def pids(self, node: str) -> list[int]:
        """The processes of a node: killing all of them is its crash."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(node)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def remote_shell(self) -> Path:
        """A program that takes the place of ssh: HOST COMMAND..., its options ignored."""
        shell = self.folder / "remote-shell"
        enter = f"nsenter --net=/run/netns/cm{self.tag}$host unshare --mount --uts"
        shell.write_text(f"""\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
exec {enter} bash -c 'hostname "$0" && mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm &&
    mount --bind {self.hosts} /etc/hosts && eval "$@"' "$host" "$@"
""")
        shell.chmod(0o755)
        return shell


OVER_TCP = {"UCX_TLS": "tcp,self"}  # MPICH would take the memory that all nodes of one machine share


def mpiexec_over(network: Network) -> list[str]:
    """What MPICH's mpiexec needs to put its ranks on these nodes, one after the other."""
    return [
        "-launcher", "ssh", "-launcher-exec", str(network.remote_shell()),
        "-iface", network.bridge, "-hosts", ",".join(network.addresses),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="begins with mpiexec")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chimera-network-"))
    try:
        with Network(args.nodes, folder) as network:
            launcher, *rest = args.command
            command = [launcher, *mpiexec_over(network), *rest]
            return subprocess.run(command, env={**os.environ, **OVER_TCP}).returncode
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
