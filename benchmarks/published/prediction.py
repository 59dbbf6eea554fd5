"""Prediction: what the estimate says of one published run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes on the rank that was measured. None: not modelled."""

    peak: int | None = None
    """Of the same kind as was measured: allocated by PyTorch, reserved by it, or taken from the GPU as a whole."""
    static: int | None = None
    """Allocated between two steps."""
    fits: bool | None = None
    """Whether the run fits on its GPU: every stage, everything that the estimate counts beside the allocator too."""
