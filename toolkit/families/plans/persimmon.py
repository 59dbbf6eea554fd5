"""Persimmon: query, key and value interleaved head by head; all heads share one norm of queries and one of keys."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        "self_attn.query_key_value": COLUMN,
        "self_attn.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    },
    divided={"self_attn": ("num_heads",)},
)
