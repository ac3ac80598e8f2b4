"""What a schedule will cost, before it runs. Needs neither torch nor MPI."""

from .costs import Costs
from .measured import measured_costs
from .memory import peak_activations, weight_versions
from .simulate import simulate

__all__ = ["Costs", "measured_costs", "peak_activations", "simulate", "weight_versions"]
