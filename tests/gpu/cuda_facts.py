"""Facts: what one rank did on a stub GPU, as plain data."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Facts:
    """What one rank did in its last step, and what it would save."""

    operations: Counter[str] = field(default_factory=Counter)
    """Calls of each operation of PyTorch."""
    reads: Counter[str] = field(default_factory=Counter)
    """Numbers of the device that the host read, by file and function."""
    order: list[str] = field(default_factory=list)
    """`read` for each of them, and `update` for each kernel of the optimizer."""
    blocking_copies: Counter[str] = field(default_factory=Counter)
    """Copies between host and device for which the host waited, by file and function."""
    fused: list[tuple[set[str], set[str]]] = field(default_factory=list)
    """Devices and dtypes of the tensors of each call of the fused AdamW."""
    held: dict[str, set[str]] = field(default_factory=dict)
    """Devices and dtypes of parameters, of buffers and of each kind of state."""
    collectives: set[tuple[str, str, str]] = field(default_factory=set)
    """Kind, group and dtype of what was sent."""
    saved: set[str] = field(default_factory=set)
    """Devices of the host's copies of what a checkpoint has."""
    flash: set[tuple[str, ...]] = field(default_factory=set)
    """Interface of flash attention, devices and dtypes of its arguments, and whether it is causal."""
    is_over: bool = False
    """Whether the step is over, and nothing more is noted of it."""
    log: list[tuple[str, ...]] = field(default_factory=list)
    """Calls of streams and events."""
    sent: Sequence[list[int]] = ()
    """Headers for the next pipeline stage."""
