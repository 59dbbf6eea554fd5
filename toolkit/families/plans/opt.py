"""OPT: the MLP's layers lie in the decoder layer itself, which flattens batch and sequence in front of them."""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        **{f"self_attn.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.out_proj": ROW,
        "fc1": COLUMN,
        "fc2": ROW,
    },
    divided={"self_attn": ("num_heads",)},
)
