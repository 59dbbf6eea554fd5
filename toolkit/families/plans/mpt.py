"""MPT: fused query, key and value, each as wide as the model; ALiBi per head."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, query_key_value

PLAN = TensorPlan(
    styles={"attn.Wqkv": COLUMN, "attn.out_proj": ROW, "ffn.up_proj": COLUMN, "ffn.down_proj": ROW},
    fused={"attn.Wqkv": query_key_value},
    divided={"attn": ("n_heads",)},
    per_head=("position_bias",),
)
