"""Read a config.json, and typed fields of it: a value that Hugging Face's class could not use is refused here."""

import math
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.files import decode_json_object, printable, read_text, reason_of
from toolkit.units import LARGEST_COUNT

_MOST = sys.float_info.max
_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_config_json(path: Path) -> dict[str, Any]:
    """Return the object in the file. Raises ModelError if it has none, and FileNotFoundError without a file.

    A number that JSON has not stands there as transformers writes it: `{"__float__": "Infinity"}`.
    """
    try:
        return decode_json_object(read_text(path), object_hook=_special_float)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        advice = "Correct it, or save the model again."
        raise ModelError(f"{printable(path)} cannot be read: {reason_of(error)}. {advice}") from None


def _special_float(value: dict[str, Any]) -> Any:
    return _SPECIAL_FLOATS.get(str(value["__float__"]), value) if value.keys() == {"__float__"} else value


def number(
    config: Mapping[str, Any], field: str, default: float, *, least: float = -math.inf, most: float = math.inf
) -> float:
    """Read a finite number within bounds; null is 0."""
    value = config.get(field, default)
    if value is None:
        return 0.0
    if type(value) in (int, float) and max(least, -_MOST) <= value <= min(most, _MOST):
        return float(value)
    bounds = "" if math.isinf(most) else f" from {least:g} to {most:g}"
    raise wrong(field, value, config, f"a number{bounds}")


def count(
    config: Mapping[str, Any], field: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT
) -> int:
    """Read a whole number within bounds; null is the default."""
    value = config.get(field)
    return checked_count(config, field, default if value is None else value, least=least, most=most)


def optional_count(
    config: Mapping[str, Any], field: str, default: int | None = None, *, most: int = LARGEST_COUNT
) -> int | None:
    """Read a whole number within bounds; null is None."""
    value = config.get(field, default)
    return None if value is None else checked_count(config, field, value, most=most, or_null=True)


def checked_count(
    config: Mapping[str, Any],
    field: str,
    value: Any,
    *,
    least: int = 1,
    most: int = LARGEST_COUNT,
    or_null: bool = False,
) -> int:
    """Check that a value is a whole number within bounds, and return it."""
    if type(value) is int and least <= value <= most:
        return value
    is_above = type(value) is int and value > most
    bounds = f"from {least} to {most}" if most != LARGEST_COUNT or is_above else f"from {least}"
    raise wrong(field, value, config, f"a whole number {bounds}{', or null for none' if or_null else ''}")


def flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """Read true or false; null is the default."""
    value = config.get(field, default)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise wrong(field, value, config, "true or false")


def sequence(config: Mapping[str, Any], field: str) -> list[Any] | None:
    """Read a list; None if the config has none."""
    value = config.get(field)
    if value is None or isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    raise wrong(field, value, config, "a list")


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Read a JSON object; an empty one if the config has none."""
    value = config.get(field)
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise wrong(field, value, config, "an object")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model inside a multimodal config, or the config itself."""
    if config.get("text_config") is None:
        return config
    text = mapping(config, "text_config")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return outer | dict(text)


def wrong(field: str, value: Any, config: Mapping[str, Any], allowed: str) -> ModelError:
    """Return the error for a value that the field cannot have."""
    settings = ((field, None if value is None else shown(value)), ("model_type", config.get("model_type")))
    return ModelError.between(settings, f"{field} is {allowed}")


def shown(value: Any) -> str:
    """Write a value as Python does, shortened."""
    return reprlib.repr(value)


def name(value: Any) -> str:
    """Write a name as it is, and anything else as Python does."""
    return value if isinstance(value, str) and value.isprintable() else shown(value)
