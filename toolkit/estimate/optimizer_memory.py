"""Bytes of what DeepSpeed's optimizers keep of the tensors that they update, and of an update's temporaries."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.rank_parameters import ParameterGroup, RankParameters
from toolkit.estimate.states import moments_8bit, update_of_factored

_MUON_COPIES = 6
"""Copies of a matrix in an update by Muon: as it arrives, side by side, scaled, its two products with itself, and the
next iterate (toolkit/engines/optimizers/muon.py)."""


@dataclass(frozen=True)
class UpdatedTensors:
    """Tensors of one size that an optimizer updates."""

    group: ParameterGroup
    numel: int
    """Elements of one tensor."""
    count: int = 1
    """How many tensors there are."""


def moment_bytes(settings: DeepSpeedSettings, params: RankParameters, tensors: Sequence[UpdatedTensors]) -> int:
    """Return the bytes of the optimizer's states of these tensors, moments and counters."""
    if settings.factored:
        return 4 * params.factors
    hidden = [(tensor.numel, tensor.count) for tensor in tensors if tensor.group.is_hidden]
    others = [(tensor.numel, tensor.count) for tensor in tensors if not tensor.group.is_hidden]
    if settings.hidden_in_8_bits:
        hidden_bytes = moments_8bit(hidden)
    else:  # Muon's momentum
        hidden_bytes = sum(4 * numel * count for numel, count in hidden)
    return hidden_bytes + settings.optimizer_bytes(others)


def temporary_bytes(
    settings: DeepSpeedSettings, params: RankParameters, tensors: Sequence[UpdatedTensors], *, dp: int
) -> int:
    """Return the bytes of temporaries of updates one after the other, at most.

    PyTorch's own optimizers make an fp32 copy of each tensor, a fused one none. Muon makes _MUON_COPIES of the matrices
    of a round, of which a rank has so many elements at once, or its share. `dp`: data-parallel ranks.
    """
    if settings.factored:
        return update_of_factored(params)
    copied = 0
    if not settings.fused:
        copied = 4 * max((tensor.numel for tensor in tensors if not tensor.group.is_hidden), default=0)
    if not settings.muon:
        return copied
    share = sum(group.numel for group in params.groups if group.is_hidden) // dp
    largest_matrix = max((matrix.numel for matrix in params.hidden_matrices), default=0)
    elements_at_once = max(largest_matrix, min(share, UPDATE_CHUNK_ELEMENTS))
    element_bytes = 4 if settings.precision == "fp32" else 2
    return max(copied, _MUON_COPIES * element_bytes * elements_at_once)
