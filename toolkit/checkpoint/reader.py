"""Reading a checkpoint, or any Hugging Face model directory: each rank reads only the slices of tensors that it needs.

Opening reads headers and small files, and rejects names and offsets that could lead elsewhere. Whether a checkpoint is
complete is checked by `select_checkpoint`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.checkpoint import names
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.safetensors_header import TensorSpec, read_header
from toolkit.files import printable, read_json_object
from toolkit.parallel.shard import runs


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
        specs = read_header(self.path / file, follow=follow)
        self.specs.setdefault(kind, {}).update(specs)
        self._path_of.update({(kind, name): self.path / file for name in specs})

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._path_of

    def tensor(self, kind: str, name: str, *, dtype: torch.dtype | None = None) -> StoredTensor:
        """A tensor to be read, by default in the dtype it is stored in. Raises CheckpointError where it is missing."""
        if not self.has(kind, name):
            raise names.checkpoint_error(self.path, f"it has no {kind} of {name}. Is it of this model and optimizer?")
        spec = self.specs[kind][name]
        return StoredTensor(self._path_of[kind, name], name, torch.Size(spec.shape), dtype or spec.dtype)


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
