"""Youtu: latent attention. What leads to the latents is whole on every rank; heads are split where they leave them.

Hugging Face's plan splits the MLP alone.
"""

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan

PLAN = TensorPlan(
    styles={
        **{f"self_attn.{name}": COLUMN for name in ("q_proj", "q_b_proj", "kv_b_proj")},
        "self_attn.o_proj": ROW,
        "mlp.gate_proj": COLUMN,
        "mlp.up_proj": COLUMN,
        "mlp.down_proj": ROW,
    },
)
