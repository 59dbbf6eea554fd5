"""Write toolkit/models/override_fields.json: what `model.overrides` may name, by family of causal LM.

python docs/generate_override_fields.py

Read from the config classes of the installed transformers: each class's own fields and their other names, those that
the family's modules read without the class declaring them, the fields of configs inside it, and the keys of its rotary
embedding.
"""

import contextlib
import importlib.resources
import json
import os
import re
import warnings
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.models.override_fields import PATH

_READ_FIELD = re.compile(r"getattr\((?:self\.)?config, \"([a-z]\w*)\"")
"""A field that a module reads whether or not its config class declares it: qwen3_moe's head_dim."""
_ROPE_KEY = re.compile(r"rope_(?:parameters|scaling|params)(?:\[layer_type\])?(?:\.get\(|\[)[\"'](\w+)[\"']")


def override_fields() -> dict[str, Any]:
    """The content of the file."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    shared = field_names(PreTrainedConfig())
    types = rope_types()
    families: dict[str, Any] = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with contextlib.suppress(StrictDataclassError):  # a class that refuses its own defaults
            add(name, CONFIG_MAPPING[name], families, shared, types)
    return {
        "transformers": transformers.__version__,
        "shared": words(shared),
        "rope_types": {name: words(keys) for name, keys in types.items()},
        "families": dict(sorted(families.items())),
    }


def add(
    name: str,
    config_class: type[PreTrainedConfig],
    families: dict[str, Any],
    shared: set[str],
    types: dict[str, set[str]],
) -> None:
    """Add the entry of one config class, and those of the configs inside it; keys without words are left out."""
    config = config_class()
    own = field_names(config)
    read_fields = set(_READ_FIELD.findall(_sources(config_class, "modeling_")))
    entry: dict[str, Any] = {"fields": words(own - shared), "undeclared": words(read_fields - own - shared)}
    if "rope_parameters" in own:
        defaults = config.rope_parameters or {}
        labels = {*(getattr(config, "_rope_type_labels", None) or getattr(config, "layer_types", None) or ())}
        labels |= {key for key, value in defaults.items() if isinstance(value, dict)}
        entry["rope_labels"] = words(labels)
        known = set.union(*types.values())
        read = {*config.ignore_keys_at_rope_validation, *defaults, *_rope_keys_read(config_class)}
        entry["rope_keys"] = words(read - known - labels)
    entry["configs"] = {
        field: sub_class.model_type or sub_class.__name__
        for field, sub_class in config_class.sub_configs.items()
        if sub_class is not PreTrainedConfig and issubclass(sub_class, PreTrainedConfig)
    }
    families[name] = {key: value for key, value in entry.items() if value}
    for field, inner in entry["configs"].items():
        if inner not in families:
            add(inner, config_class.sub_configs[field], families, shared, types)


def field_names(config: PreTrainedConfig) -> set[str]:
    """The fields of a config, under all of their names."""
    return {*config.to_dict(), *config.attribute_map}


def rope_types() -> dict[str, set[str]]:
    """The keys that each kind of rotary embedding takes, as transformers' own validation has them."""
    found: dict[str, set[str]] = {}

    class Recorder(PreTrainedConfig):
        @staticmethod
        def _check_received_keys(
            rope_type: str,
            received_keys: set[str],
            required_keys: set[str],
            optional_keys: set[str] | None = None,
            ignore_keys: set[str] | None = None,
        ) -> None:
            found[rope_type] = required_keys | (optional_keys or set()) | {"type", "partial_rotary_factor"}
            raise LookupError  # what follows looks at values

    for method in dir(Recorder):
        if match := re.fullmatch(r"_validate_(\w+)_rope_parameters", method):
            with contextlib.suppress(LookupError):
                getattr(Recorder(), method)({"rope_type": match[1]})
    return found


def words(names: Iterable[str]) -> str:
    """Names as one text: a family is a line of the file."""
    return " ".join(sorted(names))


def _rope_keys_read(config_class: type[PreTrainedConfig]) -> set[str]:
    """The keys of `rope_parameters` that the family's own code reads."""
    return set(_ROPE_KEY.findall(_sources(config_class, "configuration_", "modeling_")))


def _sources(config_class: type[PreTrainedConfig], *prefixes: str) -> str:
    """The text of the modules of a family whose file names begin so."""
    package = config_class.__module__.rpartition(".")[0]
    files = sorted(importlib.resources.files(package).iterdir(), key=str)
    selected = [file for file in files if file.name.startswith(prefixes) and file.name.endswith(".py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in selected)


def encoded(content: dict[str, Any]) -> str:
    """The text of the file, with a line a family."""
    head = {key: value for key, value in content.items() if key != "families"}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["families"].items())
    return f'{json.dumps(head, indent=2)[:-2]},\n  "families": {{\n{lines}\n  }}\n}}\n'


if __name__ == "__main__":
    PATH.write_text(encoded(override_fields()), encoding="utf-8")
    print(PATH)
