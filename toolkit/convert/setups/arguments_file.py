"""Files with the arguments of a run: `training_args.bin`, JSON or YAML, as plain values.

`training_args.bin` is a pickle. It is read with stand-ins for every class and function that it names, so that nothing
in it can run: an enumeration becomes its value, any other object its fields.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import RecipeError
from toolkit.files import printable, read_regular, reason_of
from toolkit.lint.linter import parse, read_config_text

_MOST_BYTES = 1 << 24
_PLAIN = {"OrderedDict": OrderedDict, "set": set, "frozenset": frozenset}
_DEEPEST = 32


class _Named:
    """A stand-in for whatever a pickle names: its arguments and fields, and nothing that runs."""

    def __init__(self, *positional: Any, **_: Any) -> None:
        self.positional = positional

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update({str(name): value for name, value in state.items()})


class _ArgumentsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("collections", "builtins") and name in _PLAIN:
            return _PLAIN[name]
        return type(name, (_Named,), {})

    def persistent_load(self, pid: Any) -> Any:
        return None  # a tensor, of which no argument is made


def read_arguments(path: Path) -> dict[str, Any]:
    """Read the arguments of a run. Raises RecipeError, or ConfigError for a JSON or YAML that cannot be read."""
    if path.suffix.lower() in (".bin", ".pt"):
        return _read_pickle(path)
    value = parse(path, read_config_text(path)).value
    if not isinstance(value, dict) or not value:
        message = "these are no arguments of a run, which are names with values. Give training_args.bin, JSON or YAML."
        raise RecipeError(f"{printable(path)}: {message}")
    return {str(name): argument for name, argument in value.items()}


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, max_bytes=_MOST_BYTES, follow=True)
    except OSError as error:
        raise RecipeError(f"{printable(path)}: cannot be read ({reason_of(error)}). Name another file.") from None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            member = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
            if member.file_size > _MOST_BYTES:
                raise pickle.UnpicklingError("too large")
            values = _plain(_ArgumentsUnpickler(io.BytesIO(archive.read(member))).load())
    except Exception as error:  # a damaged archive or pickle can raise anything
        message = f"not the arguments that a Trainer saved, or damaged ({type(error).__name__})"
        raise RecipeError(f"{printable(path)}: {message}. Give its training_args.bin, or JSON or YAML.") from None
    if not isinstance(values, dict) or "per_device_train_batch_size" not in values:
        message = "it holds no TrainingArguments. Give the training_args.bin of a Trainer, or JSON or YAML."
        raise RecipeError(f"{printable(path)}: {message}")
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _plain(value: Any, depth: int = 0) -> Any:
    """Numbers, texts, lists and dicts of what was unpickled."""
    if depth > _DEEPEST:
        return None
    if isinstance(value, _Named):
        fields = {name: _plain(member, depth + 1) for name, member in vars(value).items() if name != "positional"}
        if fields:
            return fields
        arguments: tuple[Any, ...] = getattr(value, "positional", ())
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], str | int | float) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(member, depth + 1) for name, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member, depth + 1) for member in value]
    return value if isinstance(value, str | int | float) else None
