"""GPT-2: one Conv1D holds query, key and value; attention splits it by `split_size`."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, query_key_value

PLAN = TensorPlan(
    styles={"attn.c_attn": COLUMN, "attn.c_proj": ROW, "mlp.c_fc": COLUMN, "mlp.c_proj": ROW},
    fused={"attn.c_attn": query_key_value},
    divided={"attn": ("split_size", "num_heads")},
)
