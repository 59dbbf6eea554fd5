"""TrainingState: a whole training state that another program saved, by the model's own parameter names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MASTER = "fp32"
"""The kind of the weights themselves, beside the kinds of optimizer states."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A checkpoint that was opened. `shapes` and `buffers`: in the model's order, tied parameters once.

    `read(kind, name)` returns a full parameter in fp32, for the kind MASTER or one of `kinds`.
    """

    tag: Path
    """Directory of the step."""
    program: str
    """Who wrote it: `DeepSpeed`, `Megatron-Core`."""
    ranks: int
    stage: int = 0
    """The ZeRO stage, 0 for programs that have none."""
    step: int
    updates: int
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)
    """The second names of tied parameters, and the names under which they are stored."""
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kinds: tuple[str, ...]
    read: Callable[[str, str], torch.Tensor]
    frozen: tuple[str, ...] = ()
    """Parameters that were not trained, and have no optimizer states."""
    loss_scale: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """What it says of its batch, under DeepSpeed's names."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its optimizer as PyTorch spells them: `lr` (of the next step), `betas`, `eps`, `weight_decay`."""
    seed: int | None = None
    """The seed of its random numbers, where its tensors' files say it."""
    version: str = "unknown"
    notices: tuple[str, ...] = ()
    """What an import of it changes or leaves out, one line each."""

    @property
    def title(self) -> str:
        """`Megatron-Core, step 120`."""
        return f"{self.program}, step {self.step}"
