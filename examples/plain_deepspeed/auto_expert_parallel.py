"""DeepSpeed's AutoEP as its tutorial shows it, on a small Mixtral: `deepspeed.initialize` fails with transformers 5.23.

    torchrun --nproc_per_node 2 examples/plain_deepspeed/auto_expert_parallel.py

An error, and no silent difference, but it is why nothing can be compared with AutoEP (docs/known-bugs.md).
"""

from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
}


def error() -> str:
    """What deepspeed.initialize says. One call a process; on two ranks."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={**CONFIG, "zero_allow_untested_optimizer": True}
        )
        ids = torch.ones(1, 4, dtype=torch.long)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "none"


if __name__ == "__main__":
    print(error())
