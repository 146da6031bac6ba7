"""Invertible, provably Lipschitz Transformers: train, certify, monitor and invert them.

``load`` opens a trained model; ``certify`` and the modules of ``invformer.nn`` (as ``layers``) work
in other people's models, ``local_constants``, ``SubmoduleProbe`` and ``LipschitzMonitor`` on them;
``BitsPerCharacter`` is one of torchmetrics' metrics. All are imported on first use, so that command
lines answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invformer import nn as layers
    from invformer.evaluation.bits_per_character import BitsPerCharacter
    from invformer.lipschitz.submodule_probe import SubmoduleProbe
    from invformer.lipschitz.submodules import local_constants
    from invformer.nn.proof import certify
    from invformer.trained.model import load
    from invformer.training.monitor import LipschitzMonitor

__version__ = "0.2.0"
__all__ = [
    "BitsPerCharacter", "LipschitzMonitor", "SubmoduleProbe", "__version__", "certify", "layers",
    "load", "local_constants",
]  # fmt: skip
PLACES = {
    "BitsPerCharacter": "evaluation.bits_per_character",
    "LipschitzMonitor": "training.monitor",
    "SubmoduleProbe": "lipschitz.submodule_probe",
    "certify": "nn.proof",
    "layers": "nn",
    "local_constants": "lipschitz.submodules",
    "load": "trained.model",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'invformer' has no attribute {name!r}")
    module = import_module(f"invformer.{PLACES[name]}")
    return module if name == "layers" else getattr(module, name)
