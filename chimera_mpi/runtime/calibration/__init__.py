"""What the parts of a step take on this machine, measured with the runtime's own pieces.

All ranks measure at once, as they compute at once in a step: they share memory and its bandwidth. Each figure is the
median of several repeats, and of the ranks.
"""

from .ensemble import Effort, Ensemble
from .layers import Manner, read_layers, read_slowdown
from .layout import Layout, Pair, usable_memory_bytes
from .messages import WAYS, read_messages, read_moved
from .sums import read_sums

__all__ = [
    "WAYS",
    "Effort",
    "Ensemble",
    "Layout",
    "Manner",
    "Pair",
    "read_layers",
    "read_messages",
    "read_moved",
    "read_slowdown",
    "read_sums",
    "usable_memory_bytes",
]
