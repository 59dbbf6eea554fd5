"""Flat buffers: how DeepSpeed pads a group of parameters, and what an optimizer keeps of it."""

from toolkit.estimate.parameters import Group
from toolkit.estimate.states.settings import DeepSpeedSettings

_ALIGNMENT = 2
"""Elements (`nccl_start_alignment_factor`)."""


def padded(group: Group, dp: int) -> int:
    """F: the group's elements in a flat buffer that D ranks share equally, each part aligned."""
    multiple = _ALIGNMENT * dp
    return -(-group.numel // multiple) * multiple


def optimizer_bytes(settings: DeepSpeedSettings, elements: int, tensors: int) -> int:
    """Moments in fp32, and a counter of four bytes beside each tensor that is updated."""
    return 4 * settings.moments * elements + (4 * tensors if settings.counts_in_tensors else 0)
