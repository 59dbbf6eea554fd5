"""A tensor in a safetensors file, of which a rank reads only the rows or columns that it keeps.

It is a `Whole` (toolkit/parallel/shard.py): a shard takes its pieces out of it as it would out of a tensor in memory.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from toolkit.parallel.shard import runs


class StoredTensor:
    """A tensor in a safetensors file, read slice by slice and given in `dtype`."""

    def __init__(self, path: Path, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.path, self.name, self.shape, self.dtype = path, name, shape, dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Only these rows or columns are read."""
        ranges = [slice(None)] * len(self.shape)
        ranges[dim] = slice(start, start + length)
        return self._read(tuple(ranges)).to(self.dtype)

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """All of it."""
        # A copy, for what safetensors returns lies in the file: it would change, or vanish, with it.
        if not self.shape:
            return self._read(()).to(self.dtype, copy=True)
        out = torch.empty(self.shape, dtype=self.dtype)
        for first, count in runs(0, self.shape[0]):
            out.narrow(0, first, count).copy_(self.narrow(0, first, count))
        return out

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros of the same dtype."""
        return torch.zeros(*shape, dtype=self.dtype)

    def _read(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as file:
            values: torch.Tensor = file.get_slice(self.name)[ranges] if ranges else file.get_tensor(self.name)
        return values
