"""Files to lint: found in directories, read with care, and read again after a fix."""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.dsconfig.lint.document import MAX_BYTES, Document, NotAConfigError
from toolkit.dsconfig.lint.finding import printable
from toolkit.dsconfig.lint.inspect import is_accelerate
from toolkit.dsconfig.lint.json_text import read_json
from toolkit.dsconfig.lint.schema import schema
from toolkit.dsconfig.lint.yaml_text import read_yaml

_YAML = (".yaml", ".yml")
_SUFFIXES = (".json", *_YAML)
_MOST_FILES = 2000
_SELDOM_ELSEWHERE = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16")


def find(arguments: Iterable[str]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was found in a directory. Raises NotAConfigError for what does not exist."""
    seen: set[Path] = set()
    for argument in arguments:
        path = Path(argument)
        for one, below in _below(path) if path.is_dir() else [(path, False)]:
            if one not in seen:
                seen.add(one)
                yield one, below


def _below(folder: Path) -> list[tuple[Path, bool]]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        found += [Path(root) / name for name in sorted(names) if name.lower().endswith(_SUFFIXES)]
        if len(found) > _MOST_FILES:
            raise NotAConfigError(f"{name_of(folder)}: more than {_MOST_FILES} files. Name a folder with fewer.")
    if not found:
        raise NotAConfigError(f"{name_of(folder)}: no *.json, *.yaml or *.yml in this directory. Name another one.")
    return [(path, True) for path in found]


def name_of(path: Path) -> str:
    """A path as it may be printed."""
    return printable(str(path), 200)


def read_text(path: Path) -> str:
    """The text of a small regular file. Raises NotAConfigError with one line for anything else."""
    name = name_of(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name holds a null character"
        raise NotAConfigError(f"{name}: cannot be read ({reason}). Give the path of a config.") from None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotAConfigError(f"{name}: not a regular file. Give the path of a config.")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotAConfigError(f"{name}: larger than 1 MiB. A config has a few KiB; give another file.")
    if b"\0" in data:
        raise NotAConfigError(f"{name}: a binary file. Give a JSON or YAML file.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotAConfigError(f"{name}: not UTF-8 (byte {error.start}). Save it as UTF-8.") from None


def parse(path: Path, text: str) -> Document:
    """Read a text as what its name says. Raises NotAConfigError where it is not."""
    name = name_of(path)
    return read_yaml(text, name) if path.suffix.lower() in _YAML else read_json(text, name)


def is_config(document: Document) -> bool:
    """Whether a file that was found in a directory holds a config, and not some other JSON or YAML."""
    value = document.value
    if not isinstance(value, dict):
        return False
    if document.syntax == "yaml":
        return is_accelerate(value)
    if is_accelerate(value):
        return True
    # Other files have a train_batch_size too, such as the Trainer's trainer_state.json.
    known = value.keys() & schema()["keys"].keys()
    return bool(known & set(_SELDOM_ELSEWHERE)) and 2 * len(known) >= len(value)
