"""Offload of the optimizer to NVMe with ZeRO-1 or ZeRO-2: DeepSpeed keeps the states in host memory without a word.

    torchrun --nproc_per_node 1 examples/plain_deepspeed/nvme.py

It trains the same, and takes the memory that it was configured not to take (docs/known-bugs.md).
"""

import sys
import tempfile
from pathlib import Path

import deepspeed
import torch


def files_written(stage: int, folder: str) -> int:
    """Files in `folder` after a step of a matrix of four MiB. One call a process."""
    offload = {"device": "nvme", "nvme_path": folder}
    model = torch.nn.Linear(1024, 1024, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "offload_optimizer": offload},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engine.backward(engine(torch.ones(1, 1024)).square().mean())
    engine.step()
    return sum(path.is_file() for path in Path(folder).rglob("*"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as drive:
        print(files_written(int(sys.argv[1]) if len(sys.argv) > 1 else 2, drive))
