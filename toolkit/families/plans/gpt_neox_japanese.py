"""GPT-NeoX Japanese: query, key and value interleaved head by head; attention's bias is added by the decoder layer."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        "attention.query_key_value": COLUMN,
        "attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    },
    divided={"attention": ("num_attention_heads",)},
    behind=("attention.dense_bias",),
)
