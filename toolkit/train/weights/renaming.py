"""From the tensors of a checkpoint to those of a model: the names and conversions that transformers applies on loading.

A checkpoint may lack the prefix of the base model, or have names of its own (GPT-NeoX's `embed_out`); some models hold
several stored tensors as one, or one as several (experts, fused projections). The rules are transformers' own.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Stored tensors that become one or several of the model's."""

    name: str
    """The model's name of the first one."""
    rule: Any
    """transformers' WeightConverter."""
    stored: Sequence[tuple[str, str]]
    """(name in the checkpoint, the pattern of the rule that it fits), in the order of the checkpoint."""
    model: PreTrainedModel

    def apply(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors by name; `read` gives a stored one."""
        rule = copy.deepcopy(self.rule)
        for key, pattern in self.stored:
            rule.add_tensor(self.name, key, pattern, read(key))
        converted = rule.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


class ConvertedTensor:
    """One tensor that a conversion makes. All of its stored tensors are read when a part of it is asked for."""

    def __init__(
        self, conversion: Conversion, name: str, read: Callable[[str], torch.Tensor], dtype: torch.dtype
    ) -> None:
        self.conversion, self.name, self.read, self.dtype = conversion, name, read, dtype

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """These rows or columns."""
        return self.clone().narrow(dim, start, length)

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """All of it."""
        values = self.conversion.apply(self.read)[self.name]
        return values.to(self.dtype, copy=True, memory_format=memory_format)

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros of the same dtype."""
        return torch.zeros(*shape, dtype=self.dtype)


def find_origins(model: PreTrainedModel, stored: Iterable[str]) -> tuple[Mapping[str, str], Sequence[Conversion]]:
    """(the model's name -> the stored one, the conversions of all others). Stored tensors without use are left out."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    held = model.state_dict()
    prefix = model.base_model_prefix
    plain: dict[str, str] = {}
    merged: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, held)
        if name not in held and key in held:
            name, pattern = key, None
        if pattern is not None:
            merged.setdefault(name, []).append((key, pattern))
        elif name in held:
            plain.setdefault(name, key)
    conversions = [
        Conversion(name=name, rule=rule_of[found[0][1]], stored=found, model=model) for name, found in merged.items()
    ]
    return plain, conversions
