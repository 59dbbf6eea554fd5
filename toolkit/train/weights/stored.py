"""Pretrained weights: safetensors under Hugging Face names, of which a rank reads only the slices that it keeps."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from toolkit.errors import ModelError
from toolkit.parallel.shard import set_source
from toolkit.train.weights.part import ModelPart, OnLayer, decoder_layers

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weights(
    model: PreTrainedModel,
    name_or_path: str,
    *,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_layer: OnLayer | None = None,
) -> None:
    """Give every meta parameter of `model` its stored value in `dtype`. Raises ModelError for what is not there."""
    files = _Files(name_or_path)
    _set_sources(model, files, name_or_path, dtype)
    real: dict[nn.Parameter, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        for child in module.modules():
            for key, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.is_meta:
                    if parameter not in real:
                        values = parameter.source.clone()  # type: ignore[attr-defined]
                        real[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    child._parameters[key] = real[parameter]

    with torch.no_grad():
        for layer in decoder_layers(model):
            if part is not None:
                part.cut_layer(layer, fill)
            fill(layer)
            if on_layer is not None:
                on_layer(layer)
        if part is not None:
            part.cut_rest(model, fill)
        fill(model)
        if on_layer is not None:
            on_layer(model)


class StoredTensor:
    """A tensor in a safetensors file, read slice by slice."""

    def __init__(self, path: Path, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.path, self.name, self.shape, self.dtype = path, name, shape, dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Only these rows or columns are read."""
        ranges = [slice(None)] * len(self.shape)
        ranges[dim] = slice(start, start + length)
        with safe_open(self.path, framework="pt") as file:
            values: torch.Tensor = file.get_slice(self.name)[tuple(ranges)]
        return values.to(self.dtype)

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """All of it."""
        with safe_open(self.path, framework="pt") as file:
            values: torch.Tensor = file.get_tensor(self.name)
        return values.to(self.dtype)

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros of the same dtype."""
        return torch.zeros(*shape, dtype=self.dtype)


class _Files:
    """Which file holds which tensor."""

    def __init__(self, name_or_path: str) -> None:
        self.path_of: dict[str, Path] = {}
        for path in _paths(name_or_path):
            with safe_open(path, framework="pt") as file:
                self.path_of.update(dict.fromkeys(file.keys(), path))


def _paths(name_or_path: str) -> Iterator[Path]:
    index = _find(name_or_path, _INDEX)
    if index is None:
        single = _find(name_or_path, _SINGLE)
        if single is None:
            raise ModelError(
                f"model.init=pretrained with model.name_or_path={name_or_path!r}: no safetensors weights could be "
                "read. Give a directory with weights, or set model.init=random."
            )
        yield single
        return
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        found = _find(name_or_path, name)
        if found is None:
            raise ModelError(f"{name_or_path}: {name} is missing, though its index names it. Fetch the model again.")
        yield found


def _find(name_or_path: str, file: str) -> Path | None:
    try:
        found: Any = cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)


def _set_sources(model: PreTrainedModel, files: _Files, name_or_path: str, dtype: torch.dtype) -> None:
    missing = []
    for name, parameter in model.named_parameters():
        key = _stored_name(model, name, files)
        if key is None:
            missing.append(name)
            continue
        stored = StoredTensor(files.path_of[key], key, parameter.shape, dtype)
        with safe_open(stored.path, framework="pt") as file:
            shape = tuple(file.get_slice(key).get_shape())
        if shape != tuple(parameter.shape):
            raise ModelError(
                f"{name_or_path}: {key} is stored as {list(shape)}, but the config makes it {list(parameter.shape)}. "
                "Remove the model.overrides that change sizes."
            )
        set_source(parameter, stored)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{name_or_path}: no stored weights for {', '.join(missing[:3])}{more}. "
            "Save the model with the transformers version in use, or set model.init=random."
        )


def _stored_name(model: PreTrainedModel, name: str, files: _Files) -> str | None:
    """The name in the file: as it is, or without the prefix of the base model, as old checkpoints have it."""
    bare = name.removeprefix(f"{model.base_model_prefix}.")
    return next((key for key in (name, bare) if key in files.path_of), None)
