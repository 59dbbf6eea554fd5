"""GPT-Neo: separate projections, one attention module inside another."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

_ATTENTION = "attn.attention"

PLAN = TensorPlan(
    styles={
        **{f"{_ATTENTION}.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")},
        f"{_ATTENTION}.out_proj": ROW,
        "mlp.c_fc": COLUMN,
        "mlp.c_proj": ROW,
    },
    divided={_ATTENTION: ("num_heads",)},
)
