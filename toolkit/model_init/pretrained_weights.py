"""Pretrained weights: safetensors under Hugging Face names, of which a rank reads only its local shard.

A checkpoint may lack the prefix of the base model or use other names (GPT-NeoX's `embed_out`); some models merge
several stored tensors into one, or split one (experts, fused projections). The rules are transformers' own.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import cached_file

from toolkit.checkpoint.names import INDEX, SINGLE
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import StoredTensor, model_files
from toolkit.errors import ModelError
from toolkit.files import reason_of
from toolkit.model_init.freed_memory import release_freed_memory
from toolkit.model_init.model_modules import Materializer, OnLayer, decoder_layers
from toolkit.model_init.model_partition import ModelPartition, finish_outside_layers
from toolkit.parallel.shard import FullTensor, runs, set_source
from toolkit.units import some

_LAYER = re.compile(r"\.(\d+)\.")
_NAME = "model.name_or_path"
_RANDOM = ("model.init", "random")


def read_weights(
    model: PreTrainedModel,
    name_or_path: str,
    *,
    dtype: torch.dtype,
    partition: ModelPartition | None = None,
    on_layer: OnLayer | None = None,
    has_overrides: bool = False,
) -> None:
    """Set every meta parameter of `model` to its stored value, in `dtype`. A collective call.

    `has_overrides`: whether fields of the stored config were changed, which messages then advise to undo.
    Raises ModelError for weights that are missing, and, once all are read, for those that are not finite.
    """
    files = _Files(name_or_path)
    not_finite: set[str] = set()
    _set_sources(model, files, name_or_path, dtype, not_finite, has_overrides=has_overrides)
    materializer = Materializer(model)

    def done(module: nn.Module) -> None:
        if on_layer is not None:
            on_layer(module)
        release_freed_memory()

    with torch.no_grad():
        for layer in decoder_layers(model):
            if partition is not None:
                partition.shard_layer(layer, materializer.fill)
            materializer.fill(layer)
            done(layer)
        finish_outside_layers(model, materializer, partition, done)
    # A rank that raised alone would leave the others waiting for it.
    names = sorted(set().union(*Ranks.of().gather(not_finite)))
    if names:
        verb = "have" if len(names) > 1 else "has"
        reason = f"{some(names)} {verb} values that are not finite in {str(dtype).removeprefix('torch.')}"
        raise ModelError.of(_NAME, name_or_path, reason, "choose weights without NaN and infinity", _RANDOM)


def stored_weights(
    model: PreTrainedModel, name_or_path: str, *, dtype: torch.dtype
) -> dict[str, tuple[FullTensor, torch.Size]]:
    """Return source and shape of every tensor of `model`, which is on the meta device, that is stored there."""
    sources = _Files(name_or_path).sources(model, dtype)
    _fix_ties(model, sources, name_or_path)
    return sources


class _Files:
    """The file and the shape of each stored tensor."""

    def __init__(self, name_or_path: str) -> None:
        self.path_of: dict[str, Path] = {}
        self.shape_of: dict[str, torch.Size] = {}
        for path in _paths(name_or_path):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no dict
                        self.path_of[name] = path
                        self.shape_of[name] = torch.Size(file.get_slice(name).get_shape())
                        self._refuse_quantized(name, file.get_slice(name).get_dtype())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({reason_of(error)}). Download the model again.") from error

    def _refuse_quantized(self, name: str, dtype: str) -> None:
        if dtype.startswith(("F8", "F4")):
            raise ModelError(
                f"{self.path_of[name]}: {name} is stored as {dtype}. Quantized weights cannot be trained: "
                "use the model's bf16 or fp32 weights."
            )

    def tensor(self, name: str, dtype: torch.dtype) -> StoredTensor:
        """Return the tensor `name`, to be read in `dtype`."""
        return StoredTensor(self.path_of[name], name, self.shape_of[name], dtype)

    def sources(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, tuple[FullTensor, torch.Size]]:
        """Return source and shape of every tensor of the model that is stored."""
        plain, conversions = find_origins(model, self.path_of)
        sources: dict[str, tuple[FullTensor, torch.Size]] = {
            name: (self.tensor(key, dtype), self.shape_of[key]) for name, key in plain.items()
        }
        for conversion in conversions:
            for name, like in conversion.apply(lambda key: torch.empty(self.shape_of[key], device="meta")).items():
                source = ConvertedTensor(conversion, name, lambda key: self.tensor(key, dtype).clone(), dtype)
                sources[name] = (source, like.shape)
        return sources


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Stored tensors that are converted to one or several tensors of the model."""

    name: str
    """The model's name of the first result."""
    rule: Any
    """transformers' WeightConverter."""
    stored: Sequence[tuple[str, str]]
    """(name in the checkpoint, the pattern of the rule that it matches), in checkpoint order."""
    model: PreTrainedModel

    def apply(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name; `read` loads a stored one."""
        rule = copy.deepcopy(self.rule)
        for key, pattern in self.stored:
            rule.add_tensor(self.name, key, pattern, read(key))
        converted = rule.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class ConvertedTensor:
    """One result of a conversion. All of its stored tensors are read whenever a part of it is read."""

    def __init__(
        self, conversion: Conversion, name: str, read: Callable[[str], torch.Tensor], dtype: torch.dtype
    ) -> None:
        self.conversion = conversion
        self.name = name
        self.read = read
        self.dtype = dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self.clone().narrow(dim, start, length)

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        values = self.conversion.apply(self.read)[self.name]
        return values.to(self.dtype, copy=True, memory_format=memory_format)

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype)


class _Watched:
    """A source whose values are looked at as they are read: its name is noted where one is not finite."""

    def __init__(self, source: FullTensor, name: str, not_finite: set[str]) -> None:
        self._source = source
        self._name = name
        self._not_finite = not_finite

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self._noted(self._source.narrow(dim, start, length))

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self._noted(self._source.clone(memory_format=memory_format))

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        return self._source.new_zeros(shape)

    def _noted(self, values: torch.Tensor) -> torch.Tensor:
        # One pass, without a mask of the tensor's size; NaN is both the smallest and the largest value.
        if values.numel() and values.is_floating_point() and not all(map(torch.isfinite, values.aminmax())):
            self._not_finite.add(self._name)
        return values


def find_origins(model: PreTrainedModel, stored: Iterable[str]) -> tuple[Mapping[str, str], Sequence[Conversion]]:
    """Return (the model's name -> the stored name, the conversions of all others), without unused stored tensors."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    expected = model.state_dict()
    prefix = model.base_model_prefix
    plain: dict[str, str] = {}
    merged: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name = key
            pattern = None
        if pattern is not None:
            merged.setdefault(name, []).append((key, pattern))
        elif name in expected:
            plain.setdefault(name, key)
    conversions = [
        Conversion(name=name, rule=rule_of[stored_names[0][1]], stored=stored_names, model=model)
        for name, stored_names in merged.items()
    ]
    return plain, conversions


def _paths(name_or_path: str) -> Iterator[Path]:
    index = _find(name_or_path, INDEX)
    if index is None:
        single = _find(name_or_path, SINGLE)
        if single is None:
            settings = (("model.init", "pretrained"), (_NAME, name_or_path))
            reason = "no safetensors weights could be read"
            raise ModelError.between(settings, reason, "give a directory with weights", _RANDOM)
        yield single
        return
    try:
        names = model_files(index.parent)
    except (OSError, ValueError) as error:
        raise ModelError(f"{index}: cannot be read ({reason_of(error)}). Download the model again.") from None
    for name in names:
        path = _find(name_or_path, name)
        if path is None:
            raise ModelError(f"{name_or_path}: {name} is missing, but its index names it. Download the model again.")
        yield path


def _find(name_or_path: str, file: str) -> Path | None:
    try:
        path: Any = cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if path is None else Path(path)


def _set_sources(
    model: PreTrainedModel,
    files: _Files,
    name_or_path: str,
    dtype: torch.dtype,
    not_finite: set[str],
    *,
    has_overrides: bool,
) -> None:
    sources = files.sources(model, dtype)
    _fix_ties(model, sources, name_or_path)
    missing = []
    for name, parameter in model.named_parameters():
        if name in sources:
            source = _checked(name, parameter, sources, name_or_path, has_overrides=has_overrides)
            set_source(parameter, _Watched(source, name, not_finite))
        else:
            missing.append(name)
    if missing:
        stored = _layer_numbers(sources)
        advice = "save the model with the transformers version in use"
        if _layer_numbers(missing) - stored:
            undo = "remove the model.overrides that add some" if has_overrides else "correct its config.json"
            advice = f"it stores {len(stored)} layers: {undo}"
        elif has_overrides:
            advice += ", remove model.overrides that add parameters"
        raise ModelError.of(_NAME, name_or_path, f"it has no weights for {some(missing)}", advice, _RANDOM)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in sources and name in saved:
            # Learned without a gradient, such as the bias with which some routers balance their experts.
            source = _checked(name, buffer, sources, name_or_path, has_overrides=has_overrides)
            buffer.copy_(_Watched(source, name, not_finite).clone())


def _layer_numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_LAYER.search, names) if match}


def _checked(
    name: str,
    value: torch.Tensor,
    sources: dict[str, tuple[FullTensor, torch.Size]],
    name_or_path: str,
    *,
    has_overrides: bool,
) -> FullTensor:
    source, shape = sources[name]
    if shape != value.shape:
        reason = f"{name} is stored as {list(shape)}, but the config makes it {list(value.shape)}"
        undo = "remove the model.overrides that change sizes"
        advice = undo if has_overrides else "correct its config.json, or save the model again"
        raise ModelError.of(_NAME, name_or_path, reason, advice)
    return source


def _fix_ties(model: PreTrainedModel, sources: dict[str, tuple[FullTensor, torch.Size]], name_or_path: str) -> None:
    """Let tied parameters share what is stored under either name; raise where two different values are stored."""
    for name, tied_to in model.all_tied_weights_keys.items():
        source = sources.get(name)
        tied_source = sources.get(tied_to)
        if source is not None and tied_source is not None and not _equal(source, tied_source):
            reason = f"its config ties {name} to {tied_to}, but their stored weights differ"
            separately = ("model.overrides.tie_word_embeddings", False)
            raise ModelError.of(_NAME, name_or_path, reason, separately)
        if source is not None:
            sources.setdefault(tied_to, source)
        if tied_source is not None:
            sources.setdefault(name, tied_source)


def _equal(left: tuple[FullTensor, torch.Size], right: tuple[FullTensor, torch.Size]) -> bool:
    left_values, left_shape = left
    right_values, right_shape = right
    if left_shape != right_shape:
        return False
    return all(
        torch.equal(left_values.narrow(0, start, length), right_values.narrow(0, start, length))
        for start, length in runs(0, left_shape[0])
    )
