"""GPT-J: separate projections; attention and MLP read the same norm."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        **{f"attn.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")},
        "attn.out_proj": ROW,
        "mlp.fc_in": COLUMN,
        "mlp.fc_out": ROW,
    },
    divided={"attn": ("num_attention_heads",)},
)
