"""The small files that make a directory of weights a model for transformers: config, generation config, tokenizer.

They are copied as they are; only the config's dtype follows the weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.checkpoint.names import shown
from toolkit.checkpoint.plain_file import read_json_object, read_plain, write_synced
from toolkit.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""What tokenizers of transformers leave; text, JSON or protocol buffers, never code."""
_NAMES = ("generation_config.json", *TOKENIZER)


def read_config(folder: Path, *, follow: bool) -> dict[str, Any]:
    """config.json. Raises CheckpointError where it cannot be read, or asks for code of its own."""
    given = shown(str(folder))
    try:
        config = read_json_object(folder / CONFIG, follow=follow)
    except FileNotFoundError:
        raise CheckpointError(f"{given}: it has no {CONFIG}. Name a directory in Hugging Face format.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{given}/{CONFIG}: cannot be read ({shown(str(error))}). Bring back the file.") from None
    if "auto_map" in config:
        raise CheckpointError(
            f"{given}: its model is code of its own (auto_map in {CONFIG}), which is not taken along. "
            "Take a model whose architecture is in transformers."
        )
    return config


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config that says what the weights are stored in."""
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """As transformers writes it."""
    write_synced(folder / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def copy_companions(source: Path, folder: Path, *, follow: bool) -> None:
    """Generation config and tokenizer, where there are any. Raises CheckpointError for what is no plain file."""
    for name in present(source):
        try:
            content = read_plain(source / name, follow=follow)
        except OSError as error:
            given = shown(str(source / name))
            raise CheckpointError(f"{given}: cannot be read ({shown(error.strerror or str(error))}).") from None
        write_synced(folder / name, content)


def present(source: Path) -> Iterator[str]:
    """The names of the files that `copy_companions` takes."""
    return (name for name in _NAMES if (source / name).exists() or (source / name).is_symlink())


def has_tokenizer(folder: Path) -> bool:
    """Whether transformers finds a tokenizer there."""
    return any((folder / name).exists() for name in TOKENIZER)
