"""Import what ranks will need, once, in the process that they are forked from: a rank then starts in a second."""

import gc
import importlib
import os
from contextlib import suppress

import torch

from toolkit.recipe import Recipe
from toolkit.train.environment import local_device
from toolkit.train.model import load_config

_LATE = ("deepspeed.moe.ep_count", "deepspeed.runtime.zero.muon.muon_optimizer")
"""What DeepSpeed imports when an engine starts, some of it seconds long."""


def preload(recipe: Recipe) -> None:
    """For training `recipe` under any engine."""
    torch.set_num_threads(1)
    if local_device().type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    family = load_config(recipe.model).model_type
    modeling = f"transformers.models.{family}.modeling_{family}"
    for name in ("accelerate", "deepspeed", *_LATE, modeling):
        with suppress(ImportError):  # a rank that needs it says so
            importlib.import_module(name)
    # DeepSpeed's bf16 optimizer collects garbage in every step: a third of a second over all these modules, unless they
    # are taken out of what is looked at.
    gc.collect()
    gc.freeze()
