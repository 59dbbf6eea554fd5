"""StableLM: Llama's projections. With qk_layernorm every head has a norm of its own, and every rank computes all."""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(
    styles=LLAMA,
    divided={"self_attn": ("num_heads", "num_key_value_heads")},
    gathered=lambda config: ("self_attn",) if config.qk_layernorm else (),
)
