"""CodeGen: the fused projection is four chunks (it was trained on four TPU cores), each with queries, values, keys.

Every chunk is split over the ranks, so a rank's projection again consists of four chunks; the heads in front of the
output projection lie chunk by chunk too.
"""

from typing import Any

from toolkit.families.tensor_plan import COLUMN, ROW, TensorPlan, head_dim, heads

_CHUNKS = 4


def _query_value_key(config: Any) -> tuple[tuple[int, int], ...]:
    block = (heads(config) // _CHUNKS, head_dim(config))
    return (block, block, block) * _CHUNKS


def _heads_by_chunk(config: Any) -> tuple[tuple[int, int], ...]:
    return ((heads(config) // _CHUNKS, head_dim(config)),) * _CHUNKS


def _needs(config: Any, tp: int) -> str | None:
    if heads(config) % (_CHUNKS * tp):
        return f"its {heads(config)} heads lie in {_CHUNKS} chunks, and tp must divide the heads of a chunk"
    return None


PLAN = TensorPlan(
    styles={"attn.qkv_proj": COLUMN, "attn.out_proj": ROW, "mlp.fc_in": COLUMN, "mlp.fc_out": ROW},
    fused={"attn.qkv_proj": _query_value_key, "attn.out_proj": _heads_by_chunk},
    divided={"attn": ("num_attention_heads",)},
    needs=_needs,
)
