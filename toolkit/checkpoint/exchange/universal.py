"""DeepSpeed's universal checkpoints: a folder a parameter, with a file for its fp32 weight and each Adam moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.exchange.partitions import MASTER, PartitionError, Shapes
from toolkit.checkpoint.exchange.scanned_pickle import read_scanned
from toolkit.checkpoint.names import is_safe_path

_KINDS = ("exp_avg", "exp_avg_sq")
FOLDER = "zero"


@dataclass(frozen=True, kw_only=True)
class UniversalParameters:
    """The files of every parameter, scanned, each read when it is asked for."""

    folder: Path
    shapes: Shapes
    kinds: tuple[str, ...]

    def read(self, kind: str, name: str) -> torch.Tensor:
        """A whole parameter, or state of it, in fp32. A copy."""
        value = _values(self.folder / name / f"{kind}.pt")
        wanted = self.shapes[name]
        if value.numel() != torch.Size(wanted).numel():
            raise PartitionError(f"{name}/{kind}.pt has {value.numel()} values, not {list(wanted)}")
        # Files that come from ZeRO 3 are flat.
        return value.to(torch.float32, copy=True).view(wanted)


def open_parameters(tag: Path, groups: Sequence[Shapes]) -> UniversalParameters:
    """The parameters of a universal checkpoint; all of their files are looked at. Raises PartitionError."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    folder = tag / FOLDER
    for name in shapes:
        if not is_safe_path(name) or not (folder / name / f"{MASTER}.pt").is_file():
            raise PartitionError(f"{FOLDER}/{name} has no {MASTER}.pt")
    kinds = tuple(kind for kind in _KINDS if all((folder / name / f"{kind}.pt").is_file() for name in shapes))
    found = UniversalParameters(folder=folder, shapes=shapes, kinds=kinds)
    for name in shapes:
        for kind in (MASTER, *kinds):
            value = _values(folder / name / f"{kind}.pt")
            if value.numel() != torch.Size(shapes[name]).numel():
                raise PartitionError(f"{FOLDER}/{name}/{kind}.pt has {value.numel()} values, not {list(shapes[name])}")
    return found


def updates_in(tag: Path, found: UniversalParameters) -> Any:
    """The count of updates: beside each parameter, or in what ZeRO 3 left of its optimizer. None where neither is."""
    for name in found.shapes:
        path = found.folder / name / "step.pt"
        if path.is_file():
            step = read_scanned(path)
            return int(step) if isinstance(step, torch.Tensor | int | float) else None
    path = tag / FOLDER / "optimizer_state.pt"
    return read_scanned(path) if path.is_file() else None


def _values(path: Path) -> torch.Tensor:
    value = read_scanned(path)
    value = value.get("param") if isinstance(value, dict) else value
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.is_floating_point():
        raise PartitionError(f"{path.parent.name}/{path.name} holds no numbers")
    return value
