"""Import once what every rehearsed rank needs, before the processes of the ranks are forked."""

import importlib
import logging
import warnings

import torch
import transformers

_MODULES = ("deepspeed_engine", "pipeline_engine", "ulysses_engine")


def preload(*, debug: bool) -> None:
    """Import the engines, and silence libraries unless `debug`."""
    torch.set_num_threads(1)  # ranks are forked, and tensors without memory need no threads
    for name in _MODULES:
        importlib.import_module(f"toolkit.engines.{name}")
    if not debug:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
