"""Tensor: one parameter of a model, and how many of its elements a tensor-parallel rank holds.

Blocks are runs of features along the split dimension: heads of some width, or single columns. A rank holds an equal
share of each block; where there are fewer units than ranks (key-value heads), neighbours hold the same one.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

Place = Literal["layer", "first", "last"]
Blocks = tuple[tuple[int, int], ...]
"""(units, features of each) one after the other."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter, or a buffer of the model."""

    name: str
    """Hugging Face's name; inside a decoder layer, what follows the layer's index."""
    shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that tensor parallelism splits; None where every rank holds the whole."""
    blocks: Blocks = ()
    """How that dimension falls into units; () for columns that may lie anywhere."""
    is_vocabulary: bool = False
    """Its rows are tokens: they are padded to a multiple of the ranks."""
    place: Place = "layer"
    """Where it lives: in every decoder layer, on the first pipeline stage, or on the last."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it, which puts it into another group of the optimizer: it is a matrix."""
        return len(self.shape) >= 2

    def local_numels(self, tp: int) -> tuple[int, ...]:
        """Elements on one of `tp` ranks. Several numbers where the engine makes several parameters of one tensor.

        It does so where a fused projection has blocks that ranks split and others that they share.
        """
        if tp == 1 or self.dim is None:
            return (self.numel,)
        features = self.shape[self.dim]
        other = self.numel // features
        if self.is_vocabulary:
            return (-(-features // tp) * other,)
        blocks = self.blocks or ((features, 1),)
        parts: list[int] = []
        kind = None
        for units, width in blocks:
            shared = units % tp != 0
            local = (width if shared else units // tp * width) * other
            if shared == kind:
                parts[-1] += local
            else:
                parts.append(local)
            kind = shared
        return tuple(parts)
