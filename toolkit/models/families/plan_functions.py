"""Functions that families.json names in tensor-parallel plans: blocks of fused projections, and refusals of a tp."""

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.models.tensor_plan import Blocks, FusedBlocks, head_dim, heads, kv_heads

_CHUNKS = 4
"""CodeGen was trained on four TPU cores: its fused projection is four chunks, each with queries, values and keys.

Every chunk is sharded over the ranks, so a rank's projection again consists of four chunks; the heads in front of the
output projection lie chunk by chunk too.
"""

_NO_INTERFACE = "its experts do not use transformers' experts interface"


def _query_key_value(config: Any) -> Blocks:
    """All query heads, then all key heads, then all value heads."""
    size = head_dim(config)
    return (heads(config), size), (kv_heads(config), size), (kv_heads(config), size)


def _multi_query(config: Any) -> Blocks:
    """One key and one value head, which ranks share; without multi_query the three are interleaved head by head."""
    size = head_dim(config)
    return ((heads(config), size), (1, size), (1, size)) if config.multi_query else ((heads(config), 3 * size),)


def _falcon(config: Any) -> Blocks:
    """The new architecture groups query heads with their key and value; Falcon-7B and Falcon-RW are as GPT-BigCode."""
    if config.new_decoder_architecture:
        group = heads(config) // config.num_kv_heads + 2
        return ((config.num_kv_heads, group * head_dim(config)),)
    return _multi_query(config)


def _codegen(config: Any) -> Blocks:
    """Return the queries, values and keys of each chunk, which are blocks of one size."""
    return 3 * _codegen_heads(config)


def _codegen_heads(config: Any) -> Blocks:
    return ((heads(config) // _CHUNKS, head_dim(config)),) * _CHUNKS


def _three_of_hidden(config: Any) -> Blocks:
    """Three blocks as wide as the hidden state."""
    return ((int(config.hidden_size), 1),) * 3


def _needs_whole_chunks(config: Any, tp: int) -> str | None:
    if heads(config) % (_CHUNKS * tp):
        return f"its {heads(config)} heads lie in {_CHUNKS} chunks, and tp must divide the heads of a chunk"
    return None


def _needs_whole_groups(config: Any, tp: int) -> str | None:
    if config.new_decoder_architecture and config.num_kv_heads % tp:
        return f"its {config.num_kv_heads} groups of heads do not split"
    return None


FUSED: Mapping[str, FusedBlocks] = {
    "query_key_value": _query_key_value,
    "multi_query": _multi_query,
    "falcon": _falcon,
    "codegen": _codegen,
    "codegen_heads": _codegen_heads,
    "three_of_hidden": _three_of_hidden,
}
NEEDS: Mapping[str, Callable[[Any, int], str | None]] = {
    "whole_chunks": _needs_whole_chunks,
    "whole_groups": _needs_whole_groups,
    "fused_weights": lambda config, tp: "slow_but_exact=true slices whole weights" if config.slow_but_exact else None,
    "no_experts": lambda config, tp: _NO_INTERFACE if config.is_moe else None,
}
