"""BitNet, as it is trained: a norm over all features lies in front of each row-parallel layer, so columns are gathered.

Layers that hold packed weights of 1.58 bits are no plain linear layers, and are refused.
"""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(styles=LLAMA, gathered=lambda config: ("self_attn", "mlp"))
