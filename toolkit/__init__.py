"""Train Hugging Face GPT models with DeepSpeed and Megatron-style parallelism, and know that the result is right.

The Python API (docs/python-api.md) is what this module exports; each name is imported at its first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.imports import no_garbage_collection

if TYPE_CHECKING:
    from toolkit.config import load_recipe
    from toolkit.config.job import Job
    from toolkit.training.arguments import TrainOptions
    from toolkit.training.callback import Action, Callback, Rollback
    from toolkit.training.train import load_job, train

__version__ = "0.2.0"
__all__ = ["Action", "Callback", "Job", "Rollback", "TrainOptions", "load_job", "load_recipe", "train"]

_MODULES = {
    "Action": "toolkit.training.callback",
    "Callback": "toolkit.training.callback",
    "Job": "toolkit.config.job",
    "Rollback": "toolkit.training.callback",
    "TrainOptions": "toolkit.training.arguments",
    "load_job": "toolkit.training.train",
    "load_recipe": "toolkit.config",
    "train": "toolkit.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] not in sys.modules:
        with no_garbage_collection():
            import_module(_MODULES[name])
    return getattr(sys.modules[_MODULES[name]], name)
