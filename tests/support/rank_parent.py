"""The process that test ranks are forked from. It has imported all that they need, so a rank starts in milliseconds."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ["DS_ACCELERATOR"] == "cpu":
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # Liger's kernels run on CPUs, which is chosen when triton is imported

import importlib
import pkgutil

from toolkit.imports import no_garbage_collection

RANK_SECONDS = 540
"""How long ranks that a test forks may take: nearly as long as the test, whose `timeout` is in pyproject.toml."""


def become_rank_parent() -> None:
    """Import slow modules once, and silence them."""
    with no_garbage_collection():
        from toolkit import checkpoint, convert, data, engines, training
        from toolkit.launch.local_ranks import preload
        from toolkit.launch.output import quiet

        for package in (checkpoint, convert, data, engines, training):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        importlib.import_module("toolkit.report.images")  # the plots of a run, by Matplotlib
    preload("gpt2", "llama", "qwen3", "gpt_neox")
    quiet(debug=False)
