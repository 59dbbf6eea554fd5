"""DiffLlama: attention subtracts the second half of its heads from the first, so every rank computes all of them."""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(styles=LLAMA, gathered=lambda config: ("self_attn",))
