"""Pretrained weights: safetensors under Hugging Face names, of which a rank reads only the slices that it keeps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from toolkit.checkpoint.stored_tensor import StoredTensor
from toolkit.errors import ModelError
from toolkit.parallel.shard import Whole, runs, set_source, source_of
from toolkit.train.host_memory import release_freed_memory
from toolkit.train.weights.part import ModelPart, OnLayer, decoder_layers, outside_layers
from toolkit.train.weights.renaming import Conversion, ConvertedTensor, find_origins

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
                        values = source_of(parameter).clone(memory_format=torch.contiguous_format)
                        real[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    child._parameters[key] = real[parameter]

    def done(module: nn.Module) -> None:
        if on_layer is not None:
            on_layer(module)
        release_freed_memory()

    with torch.no_grad():
        for layer in decoder_layers(model):
            if part is not None:
                part.cut_layer(layer, fill)
            fill(layer)
            done(layer)
        if part is not None:
            part.cut_rest(model, fill, done)
        for module in outside_layers(model):
            fill(module)
            done(module)
        done(model)


class _Files:
    """Which file holds which tensor, and its shape."""

    def __init__(self, name_or_path: str) -> None:
        self.path_of: dict[str, Path] = {}
        self.shape_of: dict[str, torch.Size] = {}
        for path in _paths(name_or_path):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no dict
                        self.path_of[name] = path
                        self.shape_of[name] = torch.Size(file.get_slice(name).get_shape())
                        self._refuse_quantised(name, file.get_slice(name).get_dtype())
            except SafetensorError as error:
                raise ModelError(f"{path} cannot be read ({error}). Fetch the model again.") from error

    def _refuse_quantised(self, name: str, dtype: str) -> None:
        if dtype.startswith(("F8", "F4")):
            raise ModelError(
                f"{self.path_of[name]}: {name} is stored as {dtype}. Quantised weights cannot be trained: "
                "take the model's bf16 or fp32 weights."
            )

    def tensor(self, name: str, dtype: torch.dtype) -> StoredTensor:
        """The tensor `name`, to be read in `dtype`."""
        return StoredTensor(self.path_of[name], name, self.shape_of[name], dtype)

    def sources(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, tuple[Whole, torch.Size]]:
        """For every tensor of the model that is stored: where it comes from, and its shape."""
        plain, conversions = find_origins(model, self.path_of)
        found: dict[str, tuple[Whole, torch.Size]] = {
            name: (self.tensor(key, dtype), self.shape_of[key]) for name, key in plain.items()
        }
        for conversion in conversions:
            for name, shape in self._shapes(conversion).items():
                found[name] = (
                    ConvertedTensor(conversion, name, lambda key: self.tensor(key, dtype).clone(), dtype),
                    shape,
                )
        return found

    def _shapes(self, conversion: Conversion) -> dict[str, torch.Size]:
        made = conversion.apply(lambda key: torch.empty(self.shape_of[key], device="meta"))
        return {name: value.shape for name, value in made.items()}


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
    sources = files.sources(model, dtype)
    _mend_ties(model, sources, name_or_path)
    missing = []
    for name, parameter in model.named_parameters():
        if name in sources:
            set_source(parameter, _checked(name, parameter, sources, name_or_path))
        else:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{name_or_path}: no stored weights for {', '.join(missing[:3])}{more}. "
            "Save the model with the transformers version in use, or set model.init=random."
        )
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in sources and name in saved:
            # Learnt without a gradient, as the bias by which some routers balance their experts.
            buffer.copy_(_checked(name, buffer, sources, name_or_path).clone())


def _checked(name: str, value: torch.Tensor, sources: dict[str, tuple[Whole, torch.Size]], name_or_path: str) -> Whole:
    source, shape = sources[name]
    if shape != value.shape:
        raise ModelError(
            f"{name_or_path}: {name} is stored as {list(shape)}, but the config makes it {list(value.shape)}. "
            "Remove the model.overrides that change sizes."
        )
    return source


def _mend_ties(model: PreTrainedModel, sources: dict[str, tuple[Whole, torch.Size]], name_or_path: str) -> None:
    """Let tied parameters share what is stored under either name, and refuse what is stored as two."""
    for name, other in model.all_tied_weights_keys.items():
        here, there = sources.get(name), sources.get(other)
        if here is not None and there is not None and not _equal(here, there):
            raise ModelError(
                f"{name_or_path}: its config ties {name} to {other}, but their stored weights differ. "
                "Set model.overrides.tie_word_embeddings=false to train them apart."
            )
        if here is not None:
            sources.setdefault(other, here)
        if there is not None:
            sources.setdefault(name, there)


def _equal(one: tuple[Whole, torch.Size], other: tuple[Whole, torch.Size]) -> bool:
    (values, shape), (others, other_shape) = one, other
    if shape != other_shape:
        return False
    return all(torch.equal(values.narrow(0, *run), others.narrow(0, *run)) for run in runs(0, shape[0]))
