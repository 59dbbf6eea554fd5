"""Shard: which part of a full Hugging Face parameter a local parameter is.

Every parameter of a partitioned model has one (`shard_of`), so that code that reads, writes, compares or counts
parameters needs no knowledge of layers: `take` slices a full tensor and `put` assembles it, by these numbers alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from toolkit.errors import LayoutError

RUN = 4096
"""Rows or columns of a full parameter that are drawn, read or copied at once. Initial weights depend on it."""


def runs(start: int, length: int) -> Iterator[tuple[int, int]]:
    """Divide [start, start + length) into (first, count) of each run, so that only one needs to be in memory."""
    for boundary in range(start // RUN * RUN, start + length, RUN):
        first = max(start, boundary)
        yield first, min(start + length, boundary + RUN) - first


class FullTensor(Protocol):
    """A full parameter, or a source that produces parts of one on demand: drawn, or read from a file."""

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return a slice along one dimension."""

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Return zeros of the same dtype."""

    def clone(self, *, memory_format: torch.memory_format = ...) -> torch.Tensor:
        """Return the full tensor."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive features that are sharded in units: heads of `width` features, or single columns of an MLP."""

    units: int
    width: int = 1

    @property
    def features(self) -> int:
        """Features of the full block."""
        return self.units * self.width

    def is_shared(self, size: int) -> bool:
        """Whether `size` ranks must share units: there are fewer units than ranks."""
        return self.units % size != 0 and size % self.units == 0

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """Return (first feature, features) of rank `rank` of `size`. Raises LayoutError if they are not divisible."""
        if self.units % size == 0:
            each = self.features // size
            return rank * each, each
        if size % self.units:
            reason = f"{self.units} heads or columns are not divisible by it"
            raise LayoutError.of("tp", size, reason, ("tp", f"a divisor of {self.units}"))
        return rank * self.units // size * self.width, self.width


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a full parameter on this rank."""

    name: str
    """Hugging Face's name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    dim: int | None = None
    """The sharded dimension; None if the parameter is replicated."""
    pieces: tuple[tuple[int, int], ...] = ()
    """(start, length) along `dim`, in the order of the local parameter."""
    padding: int = 0
    """Rows after the pieces that are not part of the full parameter; they stay zero."""
    over_experts: bool = False
    """Whether expert-parallel ranks hold different parts, too."""
    owner: bool = True
    """Whether this rank is the first with these pieces: it counts them in norms and writes them to checkpoints."""

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of the parameter."""
        return self.dim is not None

    def take(self, whole: FullTensor) -> torch.Tensor:
        """Slice the local values out of a full tensor, as a new contiguous tensor."""
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
        """Write the local values to their positions in a full tensor."""
        if self.dim is None:
            whole.copy_(local)
            return
        offset = 0
        for start, length in self.pieces:
            whole.narrow(self.dim, start, length).copy_(local.narrow(self.dim, offset, length))
            offset += length


def pieces_of(blocks: Sequence[Block], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the pieces of rank `rank` of consecutive `blocks`."""
    pieces = []
    offset = 0
    for block in blocks:
        start, length = block.share(rank, size)
        pieces.append((offset + start, length))
        offset += block.features
    return tuple(pieces)


def mark(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Attach a shard to a parameter, and the attributes by which DeepSpeed counts it in norms."""
    parameter.shard = shard  # type: ignore[attr-defined]
    # DeepSpeed counts a parameter on every model-parallel rank on which it is marked, and always on rank 0.
    counted = shard.is_split and shard.owner
    parameter.tensor_model_parallel = counted  # type: ignore[attr-defined]
    parameter.model_parallel = counted  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: nn.Parameter) -> Shard:
    """Return the shard of a parameter of a partitioned model."""
    shard: Shard = parameter.shard  # type: ignore[attr-defined]
    return shard


def is_counted(parameter: nn.Parameter, *, on_first_tensor_rank: bool) -> bool:
    """Whether this rank counts the parameter in sums over all parameters: of each value exactly one rank does.

    A sharded one counts on its owners, any other on the first tensor-parallel rank, and a tied copy not at all.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    shard = shard_of(parameter)
    return shard.owner if shard.is_split else on_first_tensor_rank


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether the parameter has a shard."""
    return hasattr(parameter, "shard")


def set_source(parameter: nn.Parameter, source: FullTensor) -> None:
    """Set the source of a meta parameter's values, from which a rank reads only its shard."""
    parameter.source = source  # type: ignore[attr-defined]


def source_of(parameter: nn.Parameter) -> FullTensor:
    """Return the source of the parameter's values, or the parameter itself."""
    source: FullTensor | None = getattr(parameter, "source", None)
    return parameter.detach() if source is None else source
