"""Trial: what one strategy's run in memory leaves behind, for a comparison to read. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.parity.curve import LossCurve

Tensors = Mapping[str, NDArray[np.floating]]
"""Hugging Face name -> whole value, in the order of the model."""
EMBEDDINGS = "embeddings"
"""The key of what enters the first decoder layer in `Trial.outputs`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. Rank 0 has everything; the other ranks have the curve and empty mappings."""

    curve: LossCurve
    parameters: Tensors = field(default_factory=dict)
    """After the last step."""
    initial: Tensors = field(default_factory=dict)
    """Before the first step."""
    first_gradients: Tensors = field(default_factory=dict)
    """Of the first step, before clipping."""
    first_updates: Tensors = field(default_factory=dict)
    """What `update_step` added to each parameter."""
    update_step: int = 1
    """The first step whose learning rate is not zero: a warm-up begins with zero, and moves nothing."""
    outputs: Mapping[str, float] = field(default_factory=dict)
    """sqrt(sum of squares) over the first global batch of what enters the first decoder layer (`embeddings`) and of
    each layer's output, by the layer's name. Empty for families that are not taken apart."""
    batches: tuple[str, ...] = ()
    """A hash of each step's global batch: equal where the same samples stood in the same places. `a!=b` where ranks
    that should have read the same did not."""
    learning_rates: tuple[float, ...] = ()
    """What the optimizer used; NaN where its groups differ."""
    micro_losses: tuple[tuple[float, int], ...] = ()
    """Of each sample of the first global batch: sum of token losses and number of targets. The reference only."""
    micro_size: int = 1
    torn_at_start: frozenset[str] = frozenset()
    """As `torn`, before the first step."""
    torn: frozenset[str] = frozenset()
    """Parameters of which two ranks should hold the same bits after the last step, and do not."""
    copies: int = 0
    """How many such copies were compared."""
    eval_loss: float | None = None
    seen: Any = None
    """What `inspect` returned on this rank."""

    def without_values(self) -> "Trial":
        """The same with names and no tensors, for when their files are gone."""
        empty: Tensors = {name: np.empty(0) for name in self.initial}
        return replace(self, parameters={}, initial=empty, first_gradients={}, first_updates={})


class SavedTensors(Mapping[str, NDArray[np.floating]]):
    """Tensors in a folder, a .npy each, read when they are looked at: a comparison holds one at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, str] = {}

    def add(self, name: str, value: NDArray[np.floating]) -> None:
        """Write one tensor."""
        file = f"{len(self._files):05d}.npy"
        np.save(self._folder / file, value)
        self._files[name] = file

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        value: NDArray[np.floating] = np.load(self._folder / self._files[name], mmap_mode="r")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
