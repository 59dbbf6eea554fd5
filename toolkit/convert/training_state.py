"""TrainingState: a whole training state that another program saved, by the model's own parameter names."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import checkpoint_error
from toolkit.files import printable

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


_MOST_STEPS = 2**48
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def count_of(value: Any, place: Path, name: str) -> int:
    """A number of steps as a checkpoint stores it, a number or a tensor of one. Raises CheckpointError."""
    number = value
    if isinstance(value, torch.Tensor):
        number = value.item() if value.numel() == 1 else None
    is_number = type(number) in (int, float)
    if not is_number or not 0 <= number < _MOST_STEPS or number != int(number):
        shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) and number is None else number
        raise checkpoint_error(place, f"{name} is {printable(shown)}, which is no number of steps. Copy it again.")
    return int(number)


def one_too_many(known: Collection[str], stored: Iterable[str]) -> str | None:
    """The first stored name that differs from a known one only in its number: of a layer, or of an expert."""
    patterns = {_NUMBER.sub("#", name) for name in known}
    return next((name for name in stored if name not in known and _NUMBER.sub("#", name) in patterns), None)


def check_tensor(place: Path, name: str, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor, where it is dense, of floating-point numbers and of this shape. Raises CheckpointError."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise checkpoint_error(place, f"{name} is no dense tensor. Copy it again.")
    if not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise checkpoint_error(
            place, f"{name} has the dtype {dtype}, not one of floating-point numbers. Copy it again."
        )
    if tuple(value.shape) != shape:
        problem = f"{name} is {list(value.shape)} there, and {list(shape)} by its config"
        raise checkpoint_error(place, f"{problem}. Use the config that it was trained with.")
    return value
