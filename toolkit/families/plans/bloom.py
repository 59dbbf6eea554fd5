"""BLOOM: query, key and value interleaved head by head, so a run of columns is a run of heads; ALiBi per head."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        "self_attention.query_key_value": COLUMN,
        "self_attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    },
    divided={"self_attention": ("num_heads",)},
    per_head=("alibi",),
    needs=lambda config, tp: "slow_but_exact=true slices whole weights" if config.slow_but_exact else None,
)
