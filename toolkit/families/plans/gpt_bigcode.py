"""GPT-BigCode: GPT-2 with one key and one value head, which ranks share; without multi_query, interleaved by head."""

from typing import Any

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, head_dim, heads


def _query_key_value(config: Any) -> tuple[tuple[int, int], ...]:
    size = head_dim(config)
    return ((heads(config), size), (1, size), (1, size)) if config.multi_query else ((heads(config), 3 * size),)


PLAN = TensorPlan(
    styles={"attn.c_attn": COLUMN, "attn.c_proj": ROW, "mlp.c_fc": COLUMN, "mlp.c_proj": ROW},
    fused={"attn.c_attn": _query_key_value},
    divided={"attn": ("embed_dim", "num_heads", "split_size", "num_key_value_groups")},
)
