"""A checkpoint of a few kilobytes that has all a large one has: several files, every common dtype, odd shapes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.manifest import FileRecord, Manifest, read_manifest
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import CheckpointContents, FileSizes, SavedCheckpoint, save
from toolkit.checkpoint.save_plan import Kinds, PlannedFile
from toolkit.checkpoint.tensor_source import Snapshot, SnapshotMemory, TensorData

SIZES = FileSizes(max_file_bytes=600, min_file_bytes=200)


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """All tensors of one kind, in the order of `specs`, on every rank; iterating may be collective."""

    kind: str
    specs: Sequence[TensorSpec]
    tensors: Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class GatheredTensors:
    """Complete tensors that every rank iterates over: what a ShardedTensorSource is held against."""

    groups: Sequence[TensorGroup]

    @property
    def specs(self) -> Kinds:
        return [(group.kind, group.specs) for group in self.groups]

    def tensors(self, files: Sequence[PlannedFile], ranks: Ranks) -> Iterator[TensorData]:
        for group in self.groups:
            for name, tensor in group.tensors:
                yield group.kind, name, tensor
                del tensor  # else it would be referenced while the next one is gathered

    def snapshot(self, files: Sequence[PlannedFile], ranks: Ranks, memory: SnapshotMemory) -> Snapshot:
        written = {(file.kind, spec.name) for file in files if file.rank == ranks.rank for spec in file.specs}
        memory.clear(sum(file.nbytes for file in files if file.rank == ranks.rank), len(written))
        copies = []
        for kind, name, tensor in self.tensors(files, ranks):
            if (kind, name) in written:
                copies.append((kind, name, memory.copy(tensor)))
            del tensor
        return lambda ranks: iter(copies)


def parameters(step: int) -> dict[str, torch.Tensor]:
    """fp32, other values at every step."""
    made = torch.Generator().manual_seed(step)
    shapes = {
        "wte.weight": (17, 5),
        "h.0.ln.bias": (5,),
        "h.0.fc.weight": (5, 20),
        "h.1.scale": (),
        "lm.weight": (3, 7),
    }
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def buffers(step: int) -> dict[str, torch.Tensor]:
    """What else a model holds, the dtypes in an order that aligns nothing."""
    return {
        "h.0.mask": torch.tensor([True, False, True]),
        "h.0.half": torch.arange(7).bfloat16() + step,
        "h.0.count": torch.tensor(step),
        "h.1.ids": torch.arange(4) * step,
        "h.1.none": torch.empty(0, 3),
    }


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of every kind."""
    values = parameters(step)
    return {
        "model": values | buffers(step),
        "exp_avg": {name: value * 0.1 for name, value in values.items()},
        "exp_avg_sq": {name: value**2 for name, value in values.items()},
    }


def groups_of(step: int) -> list[TensorGroup]:
    """One group of each kind."""
    return [
        TensorGroup(kind=kind, specs=[TensorSpec.of(*item) for item in tensors.items()], tensors=tensors.items())
        for kind, tensors in tensors_of(step).items()
    ]


def write_config(directory: Path) -> None:
    """Stands for the config and the tokenizer."""
    (directory / "config.json").write_text('{"model_type": "gpt2"}\n')


def contents_of(step: int, *, groups: Sequence[TensorGroup] | None = None, **fields: Any) -> CheckpointContents:
    """As `save` takes them."""
    given = {"trainer_state": {"step": step, "note": "x" * step}, "write_model_files": write_config}
    tensors = GatheredTensors(groups_of(step) if groups is None else groups)
    return CheckpointContents(tensors=tensors, **(given | fields))


def save_tiny(
    run_dir: Path, step: int, *, ranks: Ranks | None = None, sizes: FileSizes = SIZES, **fields: Any
) -> SavedCheckpoint:
    """Save it, in several files."""
    return save(run_dir, step, contents_of(step, **fields), ranks=ranks, sizes=sizes)


def forge_manifest(checkpoint: Path, *, files: Sequence[Any] | None = None, step: int | None = None) -> None:
    """A manifest that is valid in itself, for whatever is in the directory now: as an attacker would write it."""
    old = read_manifest(checkpoint)
    if files is None:
        paths = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json")
        files = [
            FileRecord(
                path=path.relative_to(checkpoint).as_posix(),
                size=path.stat().st_size,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for path in paths
        ]
    made = Manifest.of(step=old.step if step is None else step, sequence=old.sequence, files=files)
    (checkpoint / "manifest.json").write_bytes(made.encode())


def forge_header(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file with this header, which may be anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
