"""A link of a given rate and delay between two network namespaces, carried by a process of ours. Linux, root.

Run as `_link.py RATE DELAY NAMESPACE NAMESPACE` it is that process: it takes packets from a TUN device in each
namespace and hands them to the other when they are due. A kernel with netem can do this too; many have none.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
LARGEST_PACKET_BYTES = 65535
AHEAD_S = 2e-3  # a sender further ahead of the link than this is left waiting, as by a full queue


@contextmanager
def linked(rate_bit_s: float, delay_s: float) -> Iterator[tuple[str, str]]:
    """The names of two namespaces that only this link connects."""
    names = f"bench{os.getpid()}a", f"bench{os.getpid()}b"
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    command = [sys.executable, __file__, str(rate_bit_s), str(delay_s), *names]
    carrier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if carrier.stdout is None or carrier.stdout.readline() != "ready\n":
            sys.exit("the link between the namespaces did not come up: leave out --netns")
        yield names
    finally:
        carrier.terminate()
        carrier.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=True)


@dataclass
class End:
    """A TUN device, when its sender's last packet is through, and the packets on their way to it."""

    device: int
    free_at_s: float = 0.0
    arriving: deque[tuple[float, bytes]] = field(default_factory=deque)

    def accept(self, now_s: float, rate_bit_s: float, delay_s: float, other: End) -> None:
        packet = os.read(self.device, LARGEST_PACKET_BYTES)
        self.free_at_s = max(self.free_at_s, now_s) + len(packet) * 8 / rate_bit_s
        other.arriving.append((self.free_at_s + delay_s, packet))

    def deliver(self, now_s: float) -> None:
        while self.arriving and self.arriving[0][0] <= now_s:
            os.write(self.device, self.arriving.popleft()[1])

    def next_s(self, now_s: float) -> float:
        """When there is something to do without a new packet."""
        due = self.arriving[0][0] if self.arriving else now_s + 1
        return min(due, self.free_at_s - AHEAD_S) if self.is_ahead(now_s) else due

    def is_ahead(self, now_s: float) -> bool:
        return self.free_at_s > now_s + AHEAD_S


def carry(ends: tuple[End, End], rate_bit_s: float, delay_s: float) -> None:
    while True:
        now_s = time.perf_counter()
        for end in ends:
            end.deliver(now_s)
        pause_s = max(0.0, min(end.next_s(now_s) for end in ends) - time.perf_counter())
        reading = [end.device for end in ends if not end.is_ahead(now_s)]
        readable = select.select(reading, [], [], pause_s)[0]
        for end, other in (ends, ends[::-1]):
            if end.device in readable:
                end.accept(time.perf_counter(), rate_bit_s, delay_s, other)


def open_end(namespace: str, address: str) -> End:
    """A TUN device in `namespace`, served from here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            sys.exit(f"cannot enter the namespace {namespace}: {os.strerror(ctypes.get_errno())}")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
        libc.setns(here.fileno(), CLONE_NEWNET)
    ip = ["ip", "-n", namespace]
    subprocess.run([*ip, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
    subprocess.run([*ip, "link", "set", "lo", "up"], check=True)  # a rank speaks with itself over TCP too
    subprocess.run([*ip, "link", "set", "eth0", "mtu", str(LARGEST_PACKET_BYTES), "up"], check=True)
    return End(device)


if __name__ == "__main__":
    opened = open_end(sys.argv[3], "10.99.0.1"), open_end(sys.argv[4], "10.99.0.2")
    print("ready", flush=True)
    carry(opened, float(sys.argv[1]), float(sys.argv[2]))
