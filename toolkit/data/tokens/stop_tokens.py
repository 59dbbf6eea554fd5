"""The tokens at which a model's generation stops, besides the end-of-text token of its tokenizer."""

import json
from typing import Any

from toolkit.errors import DataError
from toolkit.files import expanded, reason_of

GENERATION_CONFIG = "generation_config.json"


def generation_stops(name: str) -> tuple[int, ...]:
    """Return `eos_token_id` of the generation_config.json beside a tokenizer, which a model has and a tokenizer alone
    does not; nothing where there is none. `name`: as `data.tokenizer`. Raises DataError for a file that is damaged.
    """
    from transformers.utils import cached_file

    path = expanded(name)
    file = cached_file(
        str(path) if path.is_dir() else name,
        GENERATION_CONFIG,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return ()
    try:
        with open(file, encoding="utf-8") as opened:
            content: Any = json.load(opened)
        stops = content.get("eos_token_id")
        if stops is None:
            return ()
        if not isinstance(stops, list):
            stops = [stops]
        return tuple(sorted({int(token) for token in stops}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"its {GENERATION_CONFIG} cannot be read ({reason_of(error)})"
        raise DataError.of("data.tokenizer", name, reason, "correct the file, or remove it") from None
