"""Files of other programs: which program a file is for, and the DeepSpeed config that it names."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from toolkit.lint.document import ConfigDocument
from toolkit.lint.finding import Violation, shown
from toolkit.lint.key_schema import FACTS, schema
from toolkit.lint.values import as_number

_NAMING = ("deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file", "deepspeed_config_path")
_SECTIONS = ("zero_optimization", "optimizer", "fp16", "bf16")
_KEYS = 2
_KEYS_BESIDE_DEEPSPEED = 4
"""Keys of another program that make a file its own: more where the file has keys of DeepSpeed, too."""
_ANCESTORS = 4
"""Folders above a file in which a config that it names is looked for: paths are relative to the root of a repository
as often as to their file."""


def other_program(document: ConfigDocument) -> dict[str, Any] | None:
    """Return the program that a file is for, None if it may be DeepSpeed's own.

    It has its `name`, its `runner` (who passes the config that it names to DeepSpeed), and its TrainingArguments.
    """
    value = document.value
    if not isinstance(value, Mapping):
        return None
    keys = {str(key).replace("-", "_") for key in value}
    has_sections = any(isinstance(value.get(key), Mapping) for key in _SECTIONS)
    needed = _KEYS_BESIDE_DEEPSPEED if has_sections or "train_batch_size" in keys else _KEYS
    for row in FACTS["programs"]:
        if len(keys.intersection(row["keys"])) >= needed:
            return {**row, "arguments": _arguments(value) if row.get("arguments") else {}}
    known = keys & schema()["keys"].keys()
    is_other = document.syntax == "yaml" and 2 * len(known) < max(len(keys), 1)
    return {"name": "another program", "arguments": {}} if is_other else None


def _arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the single values of a file, and as numbers those that spell one."""
    arguments: dict[str, Any] = {}
    for key, scalar in value.items():
        if not isinstance(scalar, (list, dict, type(None))):
            number = as_number(scalar)
            arguments[key] = scalar if number is None else number
    return arguments


def named_config(document: ConfigDocument) -> tuple[str, FilePath | None] | None:
    """Return the DeepSpeed config that a file names: the name, and its path if it is there."""
    named = next((name for key in _NAMING if isinstance(name := document.value.get(key), str) and name), None)
    return (named, find(named, document.file)) if named else None


def find(named: str, file: str) -> FilePath | None:
    """Find a named config: relative to the working directory, as its readers do, else to the file or a folder above."""
    folder = FilePath(file).absolute().parent
    for base in (FilePath(), folder, *list(folder.parents)[:_ANCESTORS]):
        if (path := base / FilePath(named).expanduser()).is_file():
            return path
    return None


def check(document: ConfigDocument, program: Mapping[str, Any]) -> Violation:
    """Say whose file it is, and which DeepSpeed config is checked instead."""
    named = named_config(document)
    instead = "it names no file of DeepSpeed"
    if named is not None:
        instead = f"{shown(named[0])}, which it names, {'is checked' if named[1] else 'is not a file here'}"
    return Violation("DS007", (), f"a file of {program['name']}: {instead}")
