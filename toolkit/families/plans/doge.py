"""Doge: what attention masks depends on the values of all heads at once, so every rank computes all heads.

Hugging Face's plan splits that dependence (dt_proj) too, and its forward pass then fails.
"""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(
    styles=LLAMA,
    gathered=lambda config: ("self_attn",),
    needs=lambda config, tp: "experts cannot be split yet" if config.is_moe else None,
)
