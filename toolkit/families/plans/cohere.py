"""Cohere: Llama's projections. With use_qk_norm every head has a norm of its own, and every rank computes all."""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(styles=LLAMA, gathered=lambda config: ("self_attn",) if config.use_qk_norm else ())
