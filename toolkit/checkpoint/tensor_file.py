"""A safetensors file, written tensor after tensor.

The library's `save_file` wants all tensors of a file in memory at once. What is in the header (names, shapes, dtypes,
hence offsets) is known before the first value is, so a writer can start with it and let the values follow as they are
gathered. The hash is taken of the same bytes on their way out: what is on the disk is never read to be trusted.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from toolkit.checkpoint.header import TensorSpec, encode_header
from toolkit.checkpoint.plain_file import write_all

_PIECE_BYTES = 4 * 2**20
"""Hashed, then written, while it is still in the CPU's cache."""


class TensorFile:
    """A new file at `path`, for exactly the tensors of `specs` in their order."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        assert sys.byteorder == "little", "safetensors are little-endian"
        self._specs = specs
        self._written = 0
        self._hash = hashlib.sha256()
        self._size = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._put(memoryview(encode_header(specs)))
        except BaseException:
            self.abandon()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has been written."""
        return self._written == len(self._specs)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor. Raises ValueError when it is not the one that is due."""
        if self.is_complete:
            raise ValueError(f"{name} follows, where all {len(self._specs)} tensors have been written")
        due, given = self._specs[self._written], TensorSpec.of(name, tensor)
        if given != due:
            raise ValueError(f"{_describe(given)} was given, where {_describe(due)} is due")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._put(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self._written += 1

    def close(self) -> tuple[int, str]:
        """Have everything on the disk; size and sha256. Raises ValueError when tensors are missing."""
        try:
            if not self.is_complete:
                raise ValueError(f"{_describe(self._specs[self._written])} is due, where the file was closed")
            os.fsync(self._descriptor)
        finally:
            self.abandon()
        return self._size, self._hash.hexdigest()

    def abandon(self) -> None:
        """Close without a promise; whoever made the folder removes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _put(self, content: memoryview) -> None:
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            self._hash.update(piece)
            write_all(self._descriptor, piece)
        self._size += len(content)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
