"""Export: a checkpoint becomes a plain Hugging Face directory, in any dtype, tensor by tensor.

The small files that make it a model for transformers are copied unchanged; only the config's dtype follows the weights.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint import names as on_disk
from toolkit.checkpoint.model_directory import NamedWeights, WrittenDirectory, check_unused, write_weights
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.save_plan import MAX_FILE_BYTES
from toolkit.checkpoint.select import select_checkpoint
from toolkit.convert.adapters import MergedWeights, base_of, check_peft, has_adapters
from toolkit.convert.model_card import CARD, model_card
from toolkit.files import printable, read_json_object, read_regular, reason_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL_DIRECTORY = "model"
CONFIG = "config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of transformers' tokenizers: text, JSON or protocol buffers, never code."""
_GENERATION = "generation_config.json"
_NAMES = (_GENERATION, *TOKENIZER)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A model that was exported. `notices`: newer checkpoints that are damaged, one line each."""

    source: Path
    written: WrittenDirectory
    dtype: torch.dtype | None
    notices: tuple[str, ...]


def export_checkpoint(
    path: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
    merge: bool = False,
    will_verify: bool = False,
) -> Exported:
    """Write the newest complete checkpoint of the run `path`, or the one at `path`, as a new directory.

    `dtype` of the exported weights is by default the stored one. LoRA's adapters stay adapters, or with `merge` are
    added to the weights that they are beside. `will_verify`: whether `compare_models` is to read what is written, which
    takes peft where there are adapters. Raises CheckpointError, and RunError without peft.
    """
    check_unused(destination)
    selected = select_checkpoint(_or_final_model(path))
    source = selected.path
    follow = selected.is_weights_only
    are_adapters = has_adapters(selected.path)
    if merge and not are_adapters:
        raise on_disk.checkpoint_error(source, "it has no adapters to merge. Leave --merge out.")
    if will_verify and are_adapters:
        check_peft("--verify of adapters")
    base = base_of(source) if merge else source
    saved = CheckpointReader(base)
    trained = (saved if base == source else CheckpointReader(source)).trainer_state
    weights = cast_weights(saved, dtype, MergedWeights(source, saved).read if merge else None)
    stored = _most_common_dtype(weights)
    config = None if are_adapters and not merge else read_config(base, follow=follow or merge)

    def write_small_files(directory: Path) -> None:
        if config is None:
            copy_small_files(source, directory, follow=follow, names=(on_disk.ADAPTER_CONFIG,))
        else:
            write_config(directory, config, None if stored is None else str(stored).removeprefix("torch."))
        if merge:
            copy_small_files(base, directory, follow=True, names=(_GENERATION,))
        copy_small_files(source, directory, follow=follow)
        if trained is not None:
            on_disk.write_synced(directory / CARD, model_card(source, trained).encode())

    written = write_weights(destination, weights, write_small_files=write_small_files, max_shard_bytes=max_shard_bytes)
    return Exported(source=source, written=written, dtype=stored, notices=selected.notices)


def cast_weights(
    saved: CheckpointReader, dtype: torch.dtype | None, changed: Callable[[str], torch.Tensor] | None = None
) -> NamedWeights:
    """The model of a checkpoint, its floating-point tensors cast to `dtype`; as they are stored where it is None.

    `changed` returns a tensor by its name, in place of what is stored.
    """
    specs = {
        name: replace(spec, dtype=dtype) if dtype and spec.dtype.is_floating_point else spec
        for name, spec in saved.specs[on_disk.MODEL].items()
    }

    def read(name: str) -> torch.Tensor:
        values = saved.tensor(on_disk.MODEL, name).clone() if changed is None else changed(name)
        cast = values.to(specs[name].dtype)
        if cast.is_floating_point() and cast.dtype != values.dtype and bool((cast.isinf() & ~values.isinf()).any()):
            wanted = next(short for short, dtype in DTYPES.items() if dtype == cast.dtype)
            problem = f"{name} has values up to {values.abs().max().item():.3g}, more than {wanted} can represent"
            raise on_disk.checkpoint_error(saved.path, f"{problem}. Export with --dtype bf16 or fp32.")
        return cast

    return NamedWeights(specs=list(specs.values()), read=read)


def _most_common_dtype(weights: NamedWeights) -> torch.dtype | None:
    sizes: dict[torch.dtype, int] = {}
    for spec in weights.specs:
        if spec.dtype.is_floating_point:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _or_final_model(path: Path) -> Path:
    """The `model` directory of a run that saved no checkpoint; otherwise `path`."""
    final = path / _MODEL_DIRECTORY
    if not path.is_dir() or not ((final / CONFIG).is_file() or has_adapters(final)):
        return path
    files = (on_disk.MANIFEST, on_disk.SINGLE, on_disk.INDEX, on_disk.ADAPTERS)
    is_itself = any((path / name).exists() for name in files)
    names = [entry.name.removeprefix(".").partition(".")[0] for entry in path.iterdir()]
    has_checkpoints = any(on_disk.step_of(name) is not None for name in names)
    return path if is_itself or has_checkpoints else path / _MODEL_DIRECTORY


def read_config(directory: Path, *, follow: bool) -> dict[str, Any]:
    """Read config.json. Raises CheckpointError where it cannot be read, or requires custom code."""
    try:
        config = read_json_object(directory / CONFIG, follow=follow)
    except FileNotFoundError:
        raise on_disk.checkpoint_error(
            directory, f"it has no {CONFIG}. Name a directory in Hugging Face format."
        ) from None
    except (OSError, ValueError) as error:
        message = f"cannot be read ({printable(str(error))}). Restore the file."
        raise on_disk.checkpoint_error(directory / CONFIG, message) from None
    if "auto_map" in config:
        problem = f"its model has custom code (auto_map in {CONFIG}), which is not copied"
        raise on_disk.checkpoint_error(directory, f"{problem}. Choose a model whose architecture is in transformers.")
    return config


def write_config(directory: Path, config: dict[str, Any], dtype: str | None = None) -> None:
    """Write config.json as transformers does, with the dtype of the weights, if given."""
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    on_disk.write_synced(directory / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def copy_small_files(source: Path, directory: Path, *, follow: bool, names: Iterable[str] = _NAMES) -> None:
    """Copy generation config and tokenizer, if any. Raises CheckpointError where one is not a regular file."""
    for name in names:
        if not (source / name).exists() and not (source / name).is_symlink():
            continue
        try:
            content = read_regular(source / name, follow=follow)
        except OSError as error:
            raise on_disk.checkpoint_error(source / name, f"cannot be read ({reason_of(error)}).") from None
        on_disk.write_synced(directory / name, content)


def has_tokenizer(directory: Path) -> bool:
    """Whether transformers finds a tokenizer there."""
    return any((directory / name).exists() for name in TOKENIZER)
