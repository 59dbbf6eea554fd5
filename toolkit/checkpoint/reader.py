"""Reading a checkpoint, or any Hugging Face model directory: each rank reads only the slices of tensors that it needs.

Opening reads headers and small files, and rejects names and offsets that could lead elsewhere. Whether a checkpoint is
complete is checked by `select_checkpoint`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from toolkit.checkpoint import names
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.safetensors_header import TensorSpec, read_offsets
from toolkit.files import printable, read_json_object
from toolkit.parallel.shard import runs
from toolkit.remote_files import RemotePath

_PART_BYTES = 32 * 2**20
"""Bytes of a tensor behind a URL that are asked for at once."""


class StoredTensor:
    """A tensor in a safetensors file, read slice by slice and returned in `dtype`.

    It implements the protocol by which a Shard takes its pieces out of a full tensor (toolkit/parallel/shard.py).
    """

    def __init__(self, path: Path, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.path = path
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        ranges = [slice(None)] * len(self.shape)
        ranges[dim] = slice(start, start + length)
        return self._read(tuple(ranges)).to(self.dtype)

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        # A copy, because what safetensors returns is mapped from the file, and would change or vanish with it.
        if not self.shape:
            return self._read(()).to(self.dtype, copy=True)
        out = torch.empty(self.shape, dtype=self.dtype)
        for first, count in runs(0, self.shape[0]):
            out.narrow(0, first, count).copy_(self.narrow(0, first, count))
        return out

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype)

    def _read(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as file:
            values: torch.Tensor = file.get_slice(self.name)[ranges] if ranges else file.get_tensor(self.name)
        return values


class RemoteTensor(StoredTensor):
    """A tensor in a file behind a URL: of a part of its first dimension only these bytes are read.

    Of a part of another dimension all are, a run of rows at a time. `stored`: its dtype there; `begin`: its offset.
    """

    def __init__(self, file: BinaryIO, begin: int, stored: torch.dtype, tensor: StoredTensor) -> None:
        super().__init__(tensor.path, tensor.name, tensor.shape, tensor.dtype)
        self._file = file
        self._begin = begin
        self._stored = stored

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        if dim == 0:
            return self._rows(start, length).to(self.dtype)
        out = self.new_zeros((*self.shape[:dim], length, *self.shape[dim + 1 :]))
        for first, count in runs(0, self.shape[0]):
            out.narrow(0, first, count).copy_(self._rows(first, count).narrow(dim, start, length))
        return out

    def _read(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        assert not ranges, "slices are read by `narrow`"
        return self._rows(0, 1).reshape(())

    def _rows(self, start: int, count: int) -> torch.Tensor:
        row = self.shape[1:]
        row_bytes = row.numel() * self._stored.itemsize
        content = torch.empty(count * row_bytes, dtype=torch.uint8)
        self._file.seek(self._begin + start * row_bytes)
        unread = memoryview(content.numpy())  # type: ignore[arg-type]
        while unread:
            read = self._file.readinto(unread[:_PART_BYTES])  # type: ignore[attr-defined]
            if not read:
                raise OSError(f"{self.path} ends within {self.name}")
            unread = unread[read:]
        return content.view(self._stored).reshape(count, *row)


class CheckpointReader:
    """The tensors and the trainer state of one directory.

    `specs`: of each kind (`model`, `exp_avg`, …) its tensors by name. `step` and `trainer_state` are None for a model
    directory. Raises CheckpointError where the directory contains no model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step: int | None = None
        self.trainer_state: dict[str, Any] | None = None
        self.specs: dict[str, dict[str, TensorSpec]] = {}
        self._path_of: dict[tuple[str, str], Path] = {}
        self._begin_of: dict[tuple[str, str], int] = {}
        self._open: dict[Path, BinaryIO] = {}
        try:
            if not (path / names.MANIFEST).exists():
                for file in model_files(path):
                    self._add(names.MODEL, file, follow=True)
                return
            manifest = read_manifest(path)
            for record in manifest.files:
                if (kind := names.kind_of(record.path)) is not None:
                    self._add(kind[0], record.path, follow=False)
            self.step = manifest.step
            self.trainer_state = read_json_object(path / names.TRAINER_STATE)
        except (OSError, ValueError) as error:
            message = f"cannot be read ({printable(str(error))}). Choose another checkpoint."
            raise names.checkpoint_error(path, message) from error

    def _add(self, kind: str, file: str, *, follow: bool) -> None:
        read = read_offsets(self.path / file, follow=follow)
        self.specs.setdefault(kind, {}).update({name: spec for name, (spec, _) in read.items()})
        self._path_of.update({(kind, name): self.path / file for name in read})
        self._begin_of.update({(kind, name): begin for name, (_, begin) in read.items()})

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._path_of

    def tensor(self, kind: str, name: str, *, dtype: torch.dtype | None = None) -> StoredTensor:
        """A tensor to be read, by default in the dtype it is stored in. Raises CheckpointError where it is missing."""
        if not self.has(kind, name):
            raise names.checkpoint_error(self.path, f"it has no {kind} of {name}. Is it of this model and optimizer?")
        spec = self.specs[kind][name]
        path = self._path_of[kind, name]
        tensor = StoredTensor(path, name, torch.Size(spec.shape), dtype or spec.dtype)
        if not isinstance(path, RemotePath):
            return tensor
        if path not in self._open:
            self._open[path] = path.open_binary()
        return RemoteTensor(self._open[path], self._begin_of[kind, name], spec.dtype, tensor)


def model_files(directory: Path) -> list[str]:
    """The tensor files of a Hugging Face directory. Raises OSError or ValueError where there are none."""
    if not (directory / names.INDEX).exists():
        if (directory / names.ADAPTERS).exists():
            return [names.ADAPTERS]
        if not (directory / names.SINGLE).exists():
            raise FileNotFoundError(f"it contains neither {names.SINGLE} nor {names.INDEX}")
        return [names.SINGLE]
    weight_map = read_json_object(directory / names.INDEX, follow=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{names.INDEX} has no weight_map")
    for file in weight_map.values():
        if not names.is_safe_path(file) or "/" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{names.INDEX} names {printable(file)}, which is not a safetensors file beside it")
    return sorted(set(weight_map.values()))
