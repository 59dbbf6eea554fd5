"""GPT, the first one: GPT-2's layers, with the norms behind the blocks."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, query_key_value

PLAN = TensorPlan(
    styles={"attn.c_attn": COLUMN, "attn.c_proj": ROW, "mlp.c_fc": COLUMN, "mlp.c_proj": ROW},
    fused={"attn.c_attn": query_key_value},
    divided={"attn": ("split_size", "n_head")},
)
