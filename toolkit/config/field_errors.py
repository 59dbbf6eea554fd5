"""Refusals for pydantic's errors: what was given for a field, what is allowed, and what to write instead."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from toolkit.config.recipe import Recipe
from toolkit.config.recipe_schema import (
    RENAMED,
    Schema,
    allowed,
    default,
    fields,
    homes,
    is_section,
    lookup,
    replacement_of,
)
from toolkit.config.source_text import Path, dotted, quote, shorten, undotted
from toolkit.config.strict_yaml import WrittenValue
from toolkit.errors import Refusal, closest, nearest
from toolkit.units import LARGEST_COUNT

_COMPLAINTS = {
    "finite_number": "not a finite number",
    "string_too_short": "empty",
    "literal_error": "not a choice",
    "greater_than": "out of range",
    "greater_than_equal": "out of range",
    "less_than": "out of range",
    "less_than_equal": "out of range",
}
"""Complaints about values of the right type, by pydantic's type of error."""
_LARGEST_EXACT = 2**53
"""The largest whole number up to which floating-point numbers hold every whole number."""


def explain(error: ErrorDetails, written: Mapping[Path, WrittenValue]) -> tuple[Path, Refusal]:
    """The field that one of pydantic's errors is about, and our refusal of it, to be rendered by `spell_field`."""
    path: Path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return path, _unknown(path)
    if error["type"] == "missing" and isinstance(path[-1], str):
        return path, _missing(path)
    if error["type"] in ("missing", "too_long"):  # of a list with a fixed number of items
        path = path if error["type"] == "too_long" else path[:-1]
        entries = error["input"]
        return path, Refusal.of(dotted(path), entries, f"a list of {len(entries)} is given; {_allowed(path)}")
    return path, _mistyped(path, error, lookup(path) or {}, written.get(path))


def spell_field(field: str, value: Any) -> str:
    """A setting in a refusal of `explain`: the field alone, because the reason shows the value as it is written."""
    return field


def free_values(value: Any, path: Path, written: Mapping[Path, WrittenValue]) -> Iterator[tuple[Path, Refusal]]:
    """Problems of a free mapping (`model.overrides`), which pydantic does not look into."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if _allows_remote_code(name):
                yield (*path, name), _remote_code((*path, name))
            else:
                yield from free_values(inner, (*path, name), written)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from free_values(inner, (*path, index), written)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, _about(path, "is not a finite number.", "write a finite one")
    elif isinstance(value, int) and abs(value) > LARGEST_COUNT:
        shown = _as_written(value, written.get(path))
        reason = f"{shown} is out of range; whole numbers from -{LARGEST_COUNT} to {LARGEST_COUNT} are allowed"
        advice = f"write {shown}.0 if it counts nothing" if abs(value) <= _LARGEST_EXACT else ""
        yield path, Refusal.of(dotted(path), value, reason, *filter(None, [advice]))


def _as_written(value: Any, written: WrittenValue | None) -> str:
    """A value as the recipe spells it, shortened."""
    return shorten(written.plain if written and written.plain else json.dumps(value))


def kind(value: Any) -> str:
    """'a string', 'a list': what a value is, for a reader who does not know YAML's types."""
    if isinstance(value, bool):
        return "a truth value"
    names: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a mapping")


def _about(path: Path, reason: str, *remedy: str) -> Refusal:
    return Refusal(field=dotted(path), reason=f"{dotted(path)} {reason}", remedy=remedy)


def _allowed(path: Path, *, is_above: bool = False) -> str:
    choices = allowed(lookup(path) or {}, shows_largest=is_above)
    if path == ("parallel",):
        choices = f"auto or {choices}"
    return f"{choices} is allowed"


def _unknown(path: Path) -> Refusal:
    """Refuse a key that is not a field; the remedy is its new name, or the nearest one."""
    if path[0] == "model" and _allows_remote_code(path[-1]):
        return _remote_code(path)
    section = path[:-1]
    name = str(path[-1])
    known = fields(section)
    meant = meant_field(path)
    hint = f"Did you mean {meant[-1]}?" if meant else ""
    if not hint and (elsewhere := homes(name)):
        hint = f"Did you mean {' or '.join(map(dotted, elsewhere))}?"
    if not hint:
        of_section = f" of {'.'.join(map(str, section))}" if section else ""
        hint = f"Fields{of_section}: {', '.join(known)}"
    return _about(path, "is not a field.", hint)


def meant_field(path: Path) -> Path | None:
    """The field of the same section that an unknown key means: under its new name, or the nearest one."""
    section = path[:-1]
    name = str(path[-1])
    if renamed := RENAMED.get(dotted(path)):
        return undotted(renamed)
    names = closest(name, fields(section))
    return (*section, names[0]) if names else None


def _missing(path: Path) -> Refusal:
    schema = lookup(path) or {}
    if is_section(schema):
        advice = f"add it, with {', '.join(schema.get('required', []))}"
        return Refusal(field=dotted(path), reason=f"the section {dotted(path)} is missing.", remedy=(advice,))
    described = str((lookup(path[:-1]) or {})["properties"][path[-1]].get("description", ""))
    return _about(path, f"is missing; {_allowed(path)}.", f"add it: {described.rstrip('.')}")


def _mistyped(path: Path, error: ErrorDetails, schema: Schema, written: WrittenValue | None) -> Refusal:
    value = error["input"]
    if replacement := replacement_of(dotted(path), value):
        return replacement
    shown = quote(value) if isinstance(value, str) else _as_written(value, written)
    if value is None:
        preset = default(path)
        hints = [] if preset is None else [f"write {json.dumps(preset)}", f"leave {path[-1]} out"]
        return _about(path, f"has no value; {_allowed(path)}.", *hints)
    if error["type"] in _COMPLAINTS and (error["type"] != "literal_error" or isinstance(value, str)):
        complaint = f"{shown} is {_COMPLAINTS[error['type']]}"
    elif isinstance(value, list | dict):
        complaint = f"{kind(value)} is given"
    else:
        complaint = f"{shown} is {kind(value)}"
    hint = _hint(path, value, schema, shown)
    choices = _allowed(path, is_above=error["type"] == "less_than_equal")
    hints = [hint] if hint else []
    return Refusal.of(dotted(path), value, f"{complaint}; {choices}", *hints)


def _hint(path: Path, value: Any, schema: Schema, shown: str) -> str:
    """Return what to write instead, where the intention is clear; else an empty text."""
    wanted = schema.get("type")
    if "enum" in schema:
        return nearest(value, map(str, schema["enum"])).strip() if isinstance(value, str) else ""
    if wanted == "string":
        return f"write {quote(shown)}" if isinstance(value, bool | int | float) else ""
    if wanted == "array":
        return f"write [{value}]" if isinstance(value, str) and value.isidentifier() else ""
    if wanted not in ("boolean", "integer", "number") or isinstance(value, bool):
        return ""
    meant = _coerced(path, value)
    return "" if meant is None else f"write {json.dumps(meant)}"


def _coerced(path: Path, value: Any) -> Any:
    """Return the value that pydantic makes of another type within the bounds of a field; None where it makes none."""
    section, *names = map(str, path)
    declared: Any = Recipe.model_fields[section]
    try:
        for name in names:
            declared = getattr(declared.annotation, "model_fields", {}).get(name)
        adapter = TypeAdapter(Annotated[declared.annotation, declared], config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value)
    except (AttributeError, ValidationError):  # an entry of a list is not a field
        return None


def _allows_remote_code(name: str | int) -> bool:
    return str(name).replace("-", "_").lower() == "trust_remote_code"


def _remote_code(path: Path) -> Refusal:
    reason = "a recipe cannot allow a model's own code to run; only the command-line flag --trust-remote-code does"
    return Refusal.of(dotted(path), True, reason, "remove it")
