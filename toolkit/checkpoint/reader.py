"""A checkpoint, or any model directory in Hugging Face format, opened for reading: tensors come slice by slice.

Opening reads headers and small files only. It refuses what could lead elsewhere (names, offsets), but does not ask
whether a checkpoint is whole: `choose` does.
"""

from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.header import TensorSpec, read_header
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.names import INDEX, MANIFEST, MODEL, SINGLE, TRAINER_STATE, is_safe_path, kind_of, shown
from toolkit.checkpoint.plain_file import read_json_object
from toolkit.checkpoint.stored_tensor import StoredTensor
from toolkit.errors import CheckpointError


class CheckpointReader:
    """The tensors and the trainer's state of one directory.

    `specs`: for each kind (`model`, `exp_avg`, …) its tensors by name. `step` and `trainer_state` are None where there
    are weights only. Raises CheckpointError where the directory holds no model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step: int | None = None
        self.trainer_state: dict[str, Any] | None = None
        self.specs: dict[str, dict[str, TensorSpec]] = {}
        self._path_of: dict[tuple[str, str], Path] = {}
        try:
            if (path / MANIFEST).exists():
                self._open_checkpoint()
            else:
                for file in model_files(path):
                    self._add(MODEL, file, follow=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{shown(str(path))}: cannot be read ({shown(str(error))}). Choose another checkpoint.", path=str(path)
            ) from error

    def _open_checkpoint(self) -> None:
        manifest = read_manifest(self.path)
        for record in manifest.files:
            kind = kind_of(record.path)
            if kind is not None:
                self._add(kind[0], record.path, follow=False)
        self.step = manifest.step
        self.trainer_state = read_json_object(self.path / TRAINER_STATE)

    def _add(self, kind: str, file: str, *, follow: bool) -> None:
        specs = read_header(self.path / file, follow=follow)
        self.specs.setdefault(kind, {}).update(specs)
        self._path_of.update({(kind, name): self.path / file for name in specs})

    @property
    def kinds(self) -> list[str]:
        """Of tensors, that there are."""
        return list(self.specs)

    def names(self, kind: str) -> list[str]:
        """Of the tensors of a kind; none where there is no such kind."""
        return list(self.specs.get(kind, ()))

    def has(self, kind: str, name: str) -> bool:
        """Whether there is such a tensor."""
        return (kind, name) in self._path_of

    def tensor(self, kind: str, name: str, *, dtype: torch.dtype | None = None) -> StoredTensor:
        """A tensor to be read, in the dtype it is stored in unless another is given. Raises CheckpointError."""
        if not self.has(kind, name):
            raise CheckpointError(
                f"{shown(str(self.path))}: it holds no {kind} of {name}. Is it of this model and optimizer?",
                path=str(self.path),
            )
        spec = self.specs[kind][name]
        return StoredTensor(self._path_of[kind, name], name, torch.Size(spec.shape), dtype or spec.dtype)


def model_files(folder: Path) -> list[str]:
    """The files of tensors of a Hugging Face directory. Raises OSError or ValueError where there are none."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(f"it holds neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    weight_map = read_json_object(folder / INDEX, follow=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{INDEX} has no weight_map")
    for file in weight_map.values():
        if not is_safe_path(file) or "/" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {shown(file)}, which is no file of tensors beside it")
    return sorted(set(weight_map.values()))
