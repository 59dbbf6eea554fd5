"""A checkpoint of a few kilobytes that has all a large one has: several files, every common dtype, odd shapes."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.manifest import FileRecord, Manifest, read_manifest
from toolkit.checkpoint.save import FileSizes, Saved, save
from toolkit.checkpoint.source import TensorGroup

SIZES = FileSizes(max_file_bytes=600, min_file_bytes=200)


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
    """As `save` takes them."""
    return [
        TensorGroup(kind=kind, specs=[TensorSpec.of(*item) for item in tensors.items()], tensors=tensors.items())
        for kind, tensors in tensors_of(step).items()
    ]


def write_beside(folder: Path) -> None:
    """Stands for the config and the tokenizer."""
    (folder / "config.json").write_text('{"model_type": "gpt2"}\n')


def save_tiny(run_dir: Path, step: int, **options: Any) -> Saved:
    """Save it, in several files."""
    given = {
        "groups": groups_of(step),
        "trainer_state": {"step": step, "note": "x" * step},
        "beside": write_beside,
        "sizes": SIZES,
    }
    return save(run_dir, step, **(given | options))


def forge_manifest(checkpoint: Path, *, files: Sequence[Any] | None = None, step: int | None = None) -> None:
    """A manifest without a fault in itself, for whatever is in the directory now: as an attacker would write it."""
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
