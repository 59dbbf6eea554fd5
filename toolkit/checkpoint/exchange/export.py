"""Export: a checkpoint becomes a plain Hugging Face directory, in any dtype, tensor after tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.exchange.companions import copy_companions, read_config, with_dtype, write_config
from toolkit.checkpoint.exchange.new_directory import Weights, Written, check_unused, write_weights
from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import INDEX, MANIFEST, MODEL, SINGLE, shown, step_of
from toolkit.checkpoint.plan import MAX_FILE_BYTES
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL_FOLDER = "model"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported. `notices`: which newer checkpoints are damaged, one line each."""

    source: Path
    written: Written
    dtype: torch.dtype | None
    notices: tuple[str, ...]


def export(
    place: Path, destination: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = MAX_FILE_BYTES
) -> Exported:
    """Write the newest whole checkpoint of `place`, or what it names, as a new directory `destination`.

    `dtype` is that of the exported weights, by default as they are stored. Raises CheckpointError.
    """
    check_unused(destination)
    chosen = choose(_without_checkpoints(place))
    saved = CheckpointReader(chosen.path)
    config = read_config(chosen.path, follow=chosen.is_weights_only)
    weights = cast_weights(saved, dtype)
    stored = _stored_dtype(weights)

    def beside(folder: Path) -> None:
        name = str(stored).removeprefix("torch.")
        write_config(folder, config if stored is None else with_dtype(config, name))
        copy_companions(chosen.path, folder, follow=chosen.is_weights_only)

    written = write_weights(destination, weights, beside=beside, max_shard_bytes=max_shard_bytes)
    return Exported(source=chosen.path, written=written, dtype=stored, notices=chosen.notices)


def cast_weights(saved: CheckpointReader, dtype: torch.dtype | None) -> Weights:
    """The model of a checkpoint, its floating-point tensors in `dtype`; as they are stored where it is None."""
    stored = saved.specs[MODEL]
    specs = [
        TensorSpec(name=name, shape=spec.shape, dtype=dtype if dtype and spec.dtype.is_floating_point else spec.dtype)
        for name, spec in stored.items()
    ]

    return Weights(specs=specs, read=_caster(saved, {spec.name: spec.dtype for spec in specs}))


def _caster(saved: CheckpointReader, dtypes: dict[str, torch.dtype]) -> Callable[[str], torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        values = saved.tensor(MODEL, name).clone()
        cast = values.to(dtypes[name])
        if cast.is_floating_point() and cast.dtype != values.dtype and bool((cast.isinf() & ~values.isinf()).any()):
            wanted = next(short for short, dtype in DTYPES.items() if dtype == cast.dtype)
            raise CheckpointError(
                f"{shown(str(saved.path))}: {name} goes up to {values.abs().max().item():.3g}, more than {wanted} can "
                "hold. Export with --dtype bf16 or fp32."
            )
        return cast

    return read


def _stored_dtype(weights: Weights) -> torch.dtype | None:
    """The one that most values have."""
    sizes: dict[torch.dtype, int] = {}
    for spec in weights.specs:
        if spec.dtype.is_floating_point:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _without_checkpoints(place: Path) -> Path:
    """A run that saved no checkpoint still leaves its model."""
    if not place.is_dir() or not (place / _MODEL_FOLDER / "config.json").is_file():
        return place
    is_itself = any((place / name).exists() for name in (MANIFEST, SINGLE, INDEX))
    has_checkpoints = any(
        step_of(entry.name.removeprefix(".").partition(".")[0]) is not None for entry in place.iterdir()
    )
    return place if is_itself or has_checkpoints else place / _MODEL_FOLDER
