"""Files of other programs: which program a file is for, and the DeepSpeed config that it names."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from toolkit.lint.document import ConfigDocument
from toolkit.lint.finding import Violation, shown
from toolkit.lint.key_schema import FACTS, schema
from toolkit.lint.values import as_number

_NAMING = ("deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file", "deepspeed_config_path")
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
    sections = any(isinstance(value.get(key), Mapping) for key in ("zero_optimization", "optimizer", "fp16", "bf16"))
    for row in FACTS["programs"]:
        if len(keys & {*row["keys"]}) >= (4 if sections or keys & {"train_batch_size"} else 2):
            scalars = {key: scalar for key, scalar in value.items() if not isinstance(scalar, (list, dict, type(None)))}
            numbers = {key: number for key, text in scalars.items() if (number := as_number(text)) is not None}
            return {**row, "arguments": scalars | numbers if row.get("arguments") else {}}
    known = keys & schema()["keys"].keys()
    is_other = document.syntax == "yaml" and 2 * len(known) < max(len(keys), 1)
    return {"name": "another program", "arguments": {}} if is_other else None


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
