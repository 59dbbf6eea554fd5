"""Falcon, all three layouts of its fused projection.

Falcon-RW interleaves query, key and value head by head; the new architecture groups query heads with their key and
value; both split as runs of columns. Falcon-7B has all query heads, then one key and one value head that ranks share.
"""

from typing import Any

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, head_dim, heads


def _query_key_value(config: Any) -> tuple[tuple[int, int], ...]:
    size = head_dim(config)
    if config.new_decoder_architecture:
        group = heads(config) // config.num_kv_heads + 2
        return ((config.num_kv_heads, group * size),)
    if config.multi_query:
        return (heads(config), size), (1, size), (1, size)
    return ((heads(config), 3 * size),)


def _needs(config: Any, tp: int) -> str | None:
    if config.new_decoder_architecture and config.num_kv_heads % tp:
        return f"its {config.num_kv_heads} groups of heads do not split"
    return None


PLAN = TensorPlan(
    styles={
        "self_attention.query_key_value": COLUMN,
        "self_attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    },
    fused={"self_attention.query_key_value": _query_key_value},
    divided={"self_attention": ("num_heads", "num_kv_heads")},
    per_head=("alibi", "attention_mask"),
    needs=_needs,
)
