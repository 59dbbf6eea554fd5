"""The process that ranks are forked from: it has imported all that they need, so a rank starts in milliseconds."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import importlib


def become_rank_parent() -> None:
    """Import what is slow, once, and silence it."""
    import torch

    torch.set_num_threads(1)
    # The last ones are what engines import when they start, some of it seconds long.
    for name in (
        "accelerate",
        "deepspeed",
        "transformers",
        "deepspeed.moe.ep_count",
        "deepspeed.runtime.pipe.p2p",
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama", "qwen3", "gpt_neox")),
    ):
        importlib.import_module(name)

    from toolkit.train.launch import quiet

    quiet(debug=False)
    # DeepSpeed's bf16 optimizer collects garbage in each step: 0.3 s where all that was imported is looked at.
    gc.collect()
    gc.freeze()
