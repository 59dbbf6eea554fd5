"""Ulysses sequence parallelism (Jacobs et al. 2023): each rank holds s/u positions, and in attention all positions of
some heads. Two all-to-alls per attention convert between the two. DeepSpeed provides them.

Dims: b samples, s positions, u ranks that share a sequence.
"""

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import PretrainedConfig


def register_attention(
    config: PretrainedConfig, attn_implementation: str, *, ranks: int, micro_batch_size: int, seq_len: int
) -> Any:
    """Replace transformers' attention function in this process. Return DeepSpeed's model parallel unit."""
    return UlyssesSPAttentionHF.register_with_transformers(
        SimpleNamespace(config=config),
        core_attn_implementation=attn_implementation,
        sequence_parallel_size=ranks,
        micro_batch_size=micro_batch_size,
        seq_length=seq_len,
        seq_length_is_variable=False,
    )


def local_positions(ids: torch.Tensor, rank: int, ranks: int) -> tuple[slice, torch.Tensor]:
    """Return this rank's slice of the sequence of `ids` [b, s] and its position ids in the full sequence, [b, s/u]."""
    length = ids.shape[1] // ranks
    local = slice(rank * length, (rank + 1) * length)
    return local, torch.arange(local.start, local.stop).expand(len(ids), -1).contiguous()
