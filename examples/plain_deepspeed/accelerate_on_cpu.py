"""What accelerate builds on CPU ranks when it is asked for FSDP or DeepSpeed. Nothing is wrong with the numbers.

    accelerate launch --cpu --num_processes 2 examples/plain_deepspeed/accelerate_on_cpu.py     one process
    torchrun --nproc_per_node 2 examples/plain_deepspeed/accelerate_on_cpu.py                   DDP in the place of FSDP

A layout tried on CPU ranks before renting GPUs is another one (docs/known-bugs.md).
"""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin


def built(asked: str) -> tuple[int, str]:
    """How many processes there are, and the class of what `prepare` makes of a model. One call a process."""
    if asked == "fsdp":
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    else:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)), batch_size=2)
    model, _, _ = accelerator.prepare(model, optimizer, data)
    return accelerator.num_processes, type(model).__name__


if __name__ == "__main__":
    processes, kind = built("fsdp")
    print(f"{processes} process{'es' * (processes > 1)}, {kind}")
