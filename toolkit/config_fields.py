"""Typed readers of a config's fields: a value that Hugging Face's class could not use is refused where it is read."""

import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError

LARGEST = 2**31 - 1
"""Of any count. No model comes near it, and what is computed from such sizes stays short enough to print."""

_MOST = sys.float_info.max


def number(
    config: Mapping[str, Any], field: str, default: float, *, least: float = -math.inf, most: float = math.inf
) -> float:
    """A finite number within bounds; null is 0."""
    value = config.get(field, default)
    if value is None:
        return 0.0
    if type(value) in (int, float) and max(least, -_MOST) <= value <= min(most, _MOST):
        return float(value)
    bounds = "" if math.isinf(most) else f" from {least:g} to {most:g}"
    raise wrong(field, value, config, f"a number{bounds}")


def count(
    config: Mapping[str, Any], field: str, default: int | None = None, *, least: int = 1, most: int = LARGEST
) -> int:
    """A whole number within bounds; null is the default."""
    value = config.get(field)
    return checked_count(config, field, default if value is None else value, least=least, most=most)


def optional_count(
    config: Mapping[str, Any], field: str, default: int | None = None, *, least: int = 1, most: int = LARGEST
) -> int | None:
    """The same, or None where the config says null."""
    value = config.get(field, default)
    return None if value is None else checked_count(config, field, value, least=least, most=most, or_null=True)


def checked_count(
    config: Mapping[str, Any], field: str, value: Any, *, least: int = 1, most: int = LARGEST, or_null: bool = False
) -> int:
    """A value as a whole number within bounds."""
    if type(value) is int and least <= value <= most:
        return value
    is_above = type(value) is int and value > most
    bounds = f"from {least} to {most}" if most != LARGEST or is_above else f"from {least}"
    raise wrong(field, value, config, f"a whole number {bounds}{', or to null for none' if or_null else ''}")


def flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """true or false; null is the default."""
    value = config.get(field, default)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise wrong(field, value, config, "true or false")


def sequence(config: Mapping[str, Any], field: str) -> list[Any] | None:
    """A list; None where the config has none."""
    value = config.get(field)
    if value is None or isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    raise wrong(field, value, config, "a list")


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """A JSON object; an empty one where the config has none."""
    value = config.get(field)
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise wrong(field, value, config, "an object")


def wrong(field: str, value: Any, config: Mapping[str, Any], allowed: str) -> ModelError:
    """The error for a value that the field cannot have."""
    return ModelError(f"{field}={shown(value)} in the {config.get('model_type')} config: set it to {allowed}.")


def shown(value: Any) -> str:
    """A value as Python writes it, shortened."""
    return reprlib.repr(value)


def name(value: Any) -> str:
    """A name as it is; anything else as Python writes it."""
    return value if isinstance(value, str) and value.isprintable() else shown(value)
