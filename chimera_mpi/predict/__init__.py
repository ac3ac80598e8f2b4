"""What a schedule will cost, before it runs. Needs neither torch nor MPI."""

from .costs import Costs, Link
from .measured import measured_costs, merged
from .memory import Level, memory_curve, peak_activations, peak_bytes, weight_versions
from .simulate import simulate, steady_step_s

__all__ = [
    "Costs",
    "Level",
    "Link",
    "measured_costs",
    "memory_curve",
    "merged",
    "peak_activations",
    "peak_bytes",
    "simulate",
    "steady_step_s",
    "weight_versions",
]
