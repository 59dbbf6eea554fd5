"""Computation: what runs in a pass over a micro-batch, in any layout and under any engine."""

from dataclasses import dataclass
from typing import Literal

Attention = Literal["eager", "sdpa", "flash", "blocks"]
"""`blocks`: the toolkit's own (toolkit/parallel/context/), which makes no mask."""
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Computation:
    """The choices that decide which kernels run in a pass, and on which rows."""

    attention: Attention = "sdpa"
    documents: bool = False
    """Whether documents of a sample do not see each other: positions restart inside it."""
    device: Device = "cuda"
    """Device whose kernels run."""
    trainable: str = ""
    """Parameters that train, as `Trainable.text` writes it; empty: all."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once in Liger's loss; 0: those of all."""
    imbalance: float = 1.0
    """Rows of the rank whose experts get most of them, over the mean of the ranks; 1: balanced."""
