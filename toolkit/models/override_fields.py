"""Fields that `model.overrides` may name: those of a family's config class, and the keys of mappings inside it.

`override_fields.json` has them as docs/generate_override_fields.py read them from transformers' classes; here they are
looked up without transformers.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.errors import Refusal, nearest
from toolkit.files import printable
from toolkit.models.config_fields import shown
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.families.spec import FACT_OF

PATH = Path(__file__).with_name("override_fields.json")
_ROPE_SPELLINGS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Fields that older configs have beside their others, and that transformers keeps in `rope_parameters`."""


def unknown_overrides(
    config: Mapping[str, Any], overrides: Mapping[str, Any], known: Iterable[str] = (), *, path: str = "model.overrides"
) -> Iterator[Refusal]:
    """Refuse every override that the model's config class does not have, nested ones too.

    A field that the class does not declare may be overridden where the model's own config has it and the family's
    modules read it: `head_dim` of Qwen3 30B-A3B. `known` are the fields of a class that the table does not have: one of
    another version of transformers, or of a model's own code. Without them, nothing is known of such a class, and
    nothing is refused.
    """
    if not overrides:
        return
    model_type = str(config.get("model_type"))
    table = _table()
    entry: dict[str, Any] = {} if "auto_map" in config else table["families"].get(model_type, {})
    fields = [*table["shared"].split(), *entry["fields"].split()] if entry else list(known)
    fields += [name for name in entry.get("undeclared", "").split() if name in config]
    for name, value in overrides.items() if fields else ():
        if name not in fields:
            family = CONFIG_SCHEMAS.get(model_type)
            meant = family.spelling.get(FACT_OF.get(name, "")) if family else None
            if name in _ROPE_SPELLINGS and "rope_parameters" in fields:
                meant = "rope_parameters"
            hint = f"Did you mean {meant}?" if meant else nearest(name, fields)
            yield _refusal(f"{path}.{name}", f"the config of {model_type} has no such field", hint)
        elif name == "rope_parameters" and entry and value is not None:
            yield from _unknown_rope_keys(f"{path}.{name}", value, entry, {**config, **overrides})
        elif (inner := entry.get("configs", {}).get(name)) and isinstance(value, Mapping):
            yield from unknown_overrides({"model_type": inner}, value, path=f"{path}.{name}")


def _unknown_rope_keys(path: str, rope: Any, entry: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse keys that the rotary embedding of this type does not read: transformers would use its default instead."""
    if not isinstance(rope, Mapping):
        yield _refusal(path, "it is not a mapping", "Write {rope_theta: 10000.0}, for instance")
        return
    if any(isinstance(value, Mapping) for value in rope.values()):  # by type of layer
        labels = [*entry.get("rope_labels", "").split(), *(config.get("layer_types") or ())]
        yield from _unknown_keys(path, rope, labels, "no layer of this model has such a type")
        for label in rope.keys() & set(labels):
            if rope[label] is not None:
                yield from _unknown_rope_keys(f"{path}.{label}", rope[label], entry, config)
        return
    types = _table()["rope_types"]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in types:
        hint = nearest(str(rope_type), types) or f"Types: {', '.join(types)}"
        yield _refusal(f"{path}.rope_type", f"{shown(rope_type)} is not a type of rotary embedding", hint)
        return
    allowed = [*types[rope_type].split(), *entry.get("rope_keys", "").split()]
    yield from _unknown_keys(path, rope, allowed, f"rope_type {rope_type} has no such key")


def _unknown_keys(path: str, keys: Iterable[str], allowed: list[str], reason: str) -> Iterator[Refusal]:
    for key in keys:
        if key not in allowed:
            hint = nearest(key, allowed) or f"It has {', '.join(dict.fromkeys(allowed)) or 'none'}"
            yield _refusal(f"{path}.{key}", reason, hint)


def _refusal(path: str, reason: str, hint: str) -> Refusal:
    return Refusal(field=path, settings=(printable(path),), reason=reason, remedy=(hint.strip(),) if hint else ())


@functools.cache
def _table() -> dict[str, Any]:
    """The table; without families where another version of transformers is installed, whose classes may differ."""
    table: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    try:
        same = version("transformers") == table["transformers"]
    except PackageNotFoundError:
        same = True
    return table if same else table | {"families": {}}
