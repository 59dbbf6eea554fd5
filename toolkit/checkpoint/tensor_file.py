"""A safetensors file, written tensor after tensor.

The library's `save_file` wants all tensors of a file in memory at once. What is in the header (names, shapes, dtypes,
hence offsets) is known before the first value is, so a writer can start with it and let the values follow as they are
gathered. The hash is taken of the same bytes on their way out: what is on the disk is never read to be trusted.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from toolkit.checkpoint.header import TensorSpec, encode_header
from toolkit.checkpoint.output_file import OutputFile
from toolkit.checkpoint.piece_stream import PieceStream


class TensorFile:
    """A new file at `path` in `folder`, for exactly the tensors of `specs` in their order; `stream` writes it."""

    def __init__(self, folder: Path, path: str, specs: Sequence[TensorSpec], stream: PieceStream) -> None:
        assert sys.byteorder == "little", "safetensors are little-endian"
        self._specs, self._stream = specs, stream
        self._written = 0
        self._written_bytes = 0
        """Of the tensor that is due."""
        self._piece: torch.Tensor | None = None
        self._filled = 0
        header = encode_header(specs)
        self._file = OutputFile(folder, path)
        self._append(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has been written."""
        return self._written == len(self._specs)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, copied at once. Raises ValueError when it is not the one that is due."""
        given = TensorSpec.of(name, tensor)
        if given != self._due(name):
            raise ValueError(f"{_describe(given)} was given, where {_describe(self._due(name))} is due")
        self.write_bytes(name, [tensor.detach().contiguous().reshape(-1).view(torch.uint8)] if tensor.numel() else [])

    def write_bytes(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """The same from runs of its bytes, in order, in one call or several."""
        due = self._due(name)
        if due.name != name:
            raise ValueError(f"{name} was given, where {_describe(due)} is due")
        for part in parts:
            self._append(part)
            self._written_bytes += part.numel()
        if self._written_bytes > due.nbytes:
            raise ValueError(f"{self._written_bytes} bytes were given, where {_describe(due)} is due")
        if self._written_bytes == due.nbytes:
            self._written, self._written_bytes = self._written + 1, 0

    def close(self) -> None:
        """Nothing follows: the stream has it on the disk. Raises ValueError when tensors are missing."""
        if not self.is_complete:
            raise ValueError(f"{_describe(self._specs[self._written])} is due, where the file was closed")
        self._flush(is_last=True)

    def abandon(self) -> None:
        """Close without a promise, when the stream has ended."""
        self._file.abandon()

    def _due(self, name: str) -> TensorSpec:
        if self.is_complete:
            raise ValueError(f"{name} follows, where all {len(self._specs)} tensors have been written")
        return self._specs[self._written]

    def _append(self, content: torch.Tensor) -> None:
        while content.numel():
            if self._piece is None:
                self._piece = self._stream.take()
            count = min(content.numel(), self._piece.numel() - self._filled)
            self._piece[self._filled : self._filled + count].copy_(content[:count])
            self._filled += count
            content = content[count:]
            if self._filled == self._piece.numel():
                self._flush(is_last=False)

    def _flush(self, *, is_last: bool) -> None:
        piece = self._stream.take() if self._piece is None else self._piece
        self._stream.put(self._file, piece, self._filled, is_last=is_last)
        self._piece, self._filled = None, 0


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
