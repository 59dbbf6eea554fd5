"""ModernBERT's decoder: separate projections; the MLP's first layer holds its input and its gate."""

from toolkit.families.tensor_plan import COLUMN, PACKED_COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        **{f"attn.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")},
        "attn.Wo": ROW,
        "mlp.Wi": PACKED_COLUMN,
        "mlp.Wo": ROW,
    },
    divided={"attn": ("num_heads", "all_head_size")},
)
