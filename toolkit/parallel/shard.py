"""Shard: where a local parameter lies in the whole Hugging Face parameter.

Every parameter of a cut model carries one (`shard_of`), so that whoever reads, writes, compares or counts parameters
needs no knowledge of layers: a whole tensor is `take`n apart and `put` together by these numbers alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from toolkit.errors import LayoutError

RUN = 4096
"""Rows, or columns, of a whole parameter that are drawn, read or copied at once. Initial weights depend on it."""


def runs(start: int, length: int) -> Iterator[tuple[int, int]]:
    """[start, start + length) as (first, count) of each run in it, so that no more than one needs to be in memory."""
    for boundary in range(start // RUN * RUN, start + length, RUN):
        first = max(start, boundary)
        yield first, min(start + length, boundary + RUN) - first


class Whole(Protocol):
    """A whole parameter, or something that makes parts of one when asked: drawn, or read from a file."""

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """A part along one dimension."""

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros of the same dtype."""

    def clone(self, *, memory_format: torch.memory_format = ...) -> torch.Tensor:
        """All of it."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A run of features that split over ranks in units: heads of `width` features, or single columns of an MLP."""

    units: int
    width: int = 1

    @property
    def features(self) -> int:
        """Features of the whole block."""
        return self.units * self.width

    def is_shared(self, size: int) -> bool:
        """Whether `size` ranks must share units: there are fewer units than ranks."""
        return self.units % size != 0 and size % self.units == 0

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """(first feature, features) of rank `rank` of `size`. Raises LayoutError where they do not divide."""
        if self.units % size == 0:
            each = self.features // size
            return rank * each, each
        if size % self.units:
            raise LayoutError(
                f"tp={size}: {self.units} heads or columns do not split into {size} shares. "
                f"Set tp to a divisor of {self.units}."
            )
        return rank * self.units // size * self.width, self.width


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a whole parameter that a rank holds."""

    name: str
    """Hugging Face's name of the whole parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int | None = None
    """The dimension that is split; None where the rank holds the whole."""
    pieces: tuple[tuple[int, int], ...] = ()
    """(start, length) along `dim`, in the order in which the local parameter holds them."""
    padding: int = 0
    """Rows behind the pieces that are no part of the whole; they stay zero."""
    owner: bool = True
    """Whether this rank is the first one that holds these pieces: it counts in norms and writes checkpoints."""

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts."""
        return self.dim is not None

    def take(self, whole: Whole) -> torch.Tensor:
        """The local values, out of a whole tensor. A tensor of its own, contiguous."""
        if self.dim is None:
            return whole.clone(memory_format=torch.contiguous_format)
        width = sum(length for _, length in self.pieces) + self.padding
        local = whole.new_zeros((*self.shape[: self.dim], width, *self.shape[self.dim + 1 :]))
        offset = 0
        for start, length in self.pieces:
            for first, count in runs(start, length):
                local.narrow(self.dim, offset, count).copy_(whole.narrow(self.dim, first, count))
                offset += count
        return local

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the local values to their places in a whole tensor."""
        if self.dim is None:
            whole.copy_(local)
            return
        offset = 0
        for start, length in self.pieces:
            whole.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))
            offset += length


def pieces_of(blocks: Sequence[Block], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The pieces of rank `rank` where `blocks` follow each other in the whole parameter."""
    pieces = []
    offset = 0
    for block in blocks:
        start, length = block.share(rank, size)
        pieces.append((offset + start, length))
        offset += block.features
    return tuple(pieces)


def mark(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Give a parameter its shard, and the marks by which DeepSpeed counts tensor-parallel parameters in norms."""
    parameter.shard = shard  # type: ignore[attr-defined]
    # DeepSpeed counts a parameter on every model-parallel rank where it is marked, and on rank 0 in any case.
    counted = shard.is_split and shard.owner
    parameter.tensor_model_parallel = parameter.model_parallel = counted  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: nn.Parameter) -> Shard:
    """The shard of a parameter of a cut model."""
    shard: Shard = parameter.shard  # type: ignore[attr-defined]
    return shard


def is_counted(parameter: nn.Parameter, *, on_first_tensor_rank: bool) -> bool:
    """Whether this rank counts the parameter in a sum over the model's parameters: of each value exactly one rank does.

    A split one counts on its owners, any other on the first tensor-parallel rank, and a tied copy not at all.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    shard = shard_of(parameter)
    return shard.owner if shard.is_split else on_first_tensor_rank


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether the parameter has its shard already."""
    return hasattr(parameter, "shard")


def set_source(parameter: nn.Parameter, source: Whole) -> None:
    """Say where the values of a meta parameter come from; who cuts it then asks for no more than it keeps."""
    parameter.source = source  # type: ignore[attr-defined]


def source_of(parameter: nn.Parameter) -> Whole:
    """The parameter's values: itself, or the source that it was given."""
    source: Whole | None = getattr(parameter, "source", None)
    return parameter.detach() if source is None else source
