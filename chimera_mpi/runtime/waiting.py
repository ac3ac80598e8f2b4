"""Wait without taking the cores from those that compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI


@dataclass(frozen=True)
class Patience:
    """Poll without pause for `spin_s`, then sleep between polls, from `nap_s` up to `longest_nap_s`.

    A blocking MPI wait would spin for good, and on shared cores keep its neighbours from computing.
    """

    spin_s: float
    nap_s: float = 50e-6
    longest_nap_s: float = 1e-3

    @staticmethod
    def for_node(ranks: int, cores: int) -> Patience:
        """Ranks with cores of their own spin longer; ranks that share cores yield them soon."""
        return Patience(spin_s=50e-6) if ranks > cores else Patience(spin_s=2e-3)

    def __str__(self) -> str:
        return f"waits spin {self.spin_s * 1e6:.0f} us, then sleep"

    def until(self, done: Callable[[], bool]) -> None:
        """Return once `done()`, which drives MPI's progress by itself."""
        if done():
            return
        start = time.perf_counter()
        nap = self.nap_s
        while not done():
            if time.perf_counter() - start > self.spin_s:
                time.sleep(nap)
                nap = min(nap * 1.05, self.longest_nap_s)

    def wait(self, *requests: MPI.Request) -> None:
        """Return once all `requests` are complete."""
        pending = list(requests)
        self.until(lambda: MPI.Request.Testall(pending))
