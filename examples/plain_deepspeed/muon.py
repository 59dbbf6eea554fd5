"""DeepSpeed's Muon: under ZeRO, clipping applies to the orthogonal updates and not to the gradient.

    torchrun --nproc_per_node 2 examples/plain_deepspeed/muon.py

One step of four square matrices whose gradient is small: its norm is far below the limit, so clipping should change
nothing. Under ZeRO the update is orthogonalized where gradients are reduced, and clipping comes after it
(docs/known-bugs.md).
"""

from typing import Any

import deepspeed
import torch
from torch import nn

WIDTH, LIMIT, RATE = 64, 1.0, 0.02


def step(zero_stage: int, limit: float) -> tuple[float, float]:
    """Take one step; return the norm that DeepSpeed reports (0 without ZeRO), and by how much the weights change."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": limit,
        "zero_optimization": {"stage": zero_stage, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": RATE, "weight_decay": 0.0, "ns_method": "standard"}},
    }
    for parameter in model.parameters():
        parameter.use_muon = True  # type: ignore[attr-defined]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.backward(1e-3 * engine(torch.ones(4, WIDTH)).square().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=zero_stage == 3):
        changes = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
    norm = engine.get_global_grad_norm()
    return float(norm or 0.0), float(torch.stack([change.norm() for change in changes]).norm())


if __name__ == "__main__":
    for zero_stage in range(4):
        for limit in (0.0, LIMIT):
            norm, change = step(zero_stage, limit)
            print(f"ZeRO-{zero_stage}, gradient_clipping {limit}: norm {norm:.4g}, weights change by {change:.4g}")
