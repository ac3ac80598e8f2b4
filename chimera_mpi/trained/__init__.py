"""What one does with a model that has been trained: keep it as Hugging Face does, take one from there, ask it on."""

from .generate import Sampling, continued
from .huggingface import Exported, Imported, export_model, import_model
from .model import Trained, open_trained

__all__ = [
    "Exported",
    "Imported",
    "Sampling",
    "Trained",
    "continued",
    "export_model",
    "import_model",
    "open_trained",
]
