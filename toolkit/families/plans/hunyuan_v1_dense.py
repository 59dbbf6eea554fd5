"""HunYuan, dense: Llama's layers; all heads share one norm of queries and one of keys."""

from toolkit.families.tensor_plan import LLAMA, TensorPlan

PLAN = TensorPlan(styles=LLAMA)
