"""Ulysses sequence parallelism (Jacobs et al. 2023): each rank holds s/u positions, and in attention all positions of
some heads. Two all-to-alls per attention convert between the two. DeepSpeed provides them.

Dims: b samples, s positions, u ranks that share a sequence.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import PretrainedConfig
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class DocumentMask:
    """An attention function in which the documents of a sample do not attend to each other.

    DeepSpeed drops the masks that a model makes, because they are of a rank's share of the positions. After the
    all-to-all a rank has all positions of some heads, so the mask of the whole sequence is made here, once for a
    micro-batch: all layers share it, in the dtype that the kernels of CUDA would convert a boolean one to in each.
    """

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend
        self._documents: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def start(self, position_ids: torch.Tensor | None) -> None:
        """Take the documents of the next micro-batch from its position ids [b, s], which restart with each."""
        self._documents = None if position_ids is None else find_packed_sequence_indices(position_ids)
        self._bias = None

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        if self._documents is not None:
            if self._bias is None:
                self._bias = _bias(self._documents, query)
            mask = self._bias
        return self._attend(module, query, key, value, mask, **options)


def _bias(documents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return 0 where a position sees another, an earlier one of its document, and -inf elsewhere: [b, 1, s, s]."""
    documents = documents.to(like.device)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril_()
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(seen.logical_not_(), -torch.inf)


def register_attention(
    config: PretrainedConfig, attn_implementation: str, *, ranks: int, micro_batch_size: int, seq_len: int
) -> tuple[Any, DocumentMask]:
    """Replace transformers' attention function in this process. Return DeepSpeed's model parallel unit and the mask."""
    mask = DocumentMask(ALL_ATTENTION_FUNCTIONS[attn_implementation])
    ALL_ATTENTION_FUNCTIONS[attn_implementation] = mask
    unit = UlyssesSPAttentionHF.register_with_transformers(
        SimpleNamespace(config=config),
        core_attn_implementation=attn_implementation,
        sequence_parallel_size=ranks,
        micro_batch_size=micro_batch_size,
        seq_length=seq_len,
        seq_length_is_variable=False,
    )
    return unit, mask


def local_slice(length: int, rank: int, ranks: int) -> slice:
    """Return the positions of this rank."""
    return slice(rank * length // ranks, (rank + 1) * length // ranks)
