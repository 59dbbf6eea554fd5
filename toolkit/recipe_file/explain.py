"""What is wrong with a field, in our words: what was given, what is allowed, and what to write instead."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from toolkit.errors import nearest
from toolkit.recipe_file.schema import Schema, allowed, default, fields, fits, homes, is_section, lookup
from toolkit.recipe_file.strict_yaml import Path, Written, dotted, quote, resolve, shorten

# What YAML 1.1 and other people's configs call a truth value.
_TRUTH = {
    **dict.fromkeys(("yes", "y", "on", "true", "1"), "true"),
    **dict.fromkeys(("no", "n", "off", "false", "0"), "false"),
}
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def explain(error: ErrorDetails, written: Mapping[Path, Written]) -> tuple[Path, str]:
    """The field that one of pydantic's errors is about, and our message for it."""
    path: Path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return path, unknown(path)
    if error["type"] == "missing" and isinstance(path[-1], str):
        return path, _missing(path)
    if error["type"] in ("missing", "too_long"):  # of a list with a fixed number of items
        path = path if error["type"] == "too_long" else path[:-1]
        schema = lookup(path) or {}
        return path, f"{dotted(path)}: a list of {len(error['input'])} is given; {allowed(schema)} is allowed."
    return path, _mistyped(path, error, lookup(path) or {}, written.get(path))


def unknown(path: Path) -> str:
    """For a key that is no field, with the nearest name."""
    if path[0] == "model" and _allows_remote_code(path[-1]):
        return _remote_code(path)
    section, name = path[:-1], str(path[-1])
    known = fields(section)
    hint = nearest(name, known)
    if not hint and (elsewhere := homes(name)):
        hint = f" Did you mean {' or '.join(map(dotted, elsewhere))}?"
    if not hint:
        hint = f" Fields{' of ' * bool(section) + '.'.join(map(str, section))}: {', '.join(known)}."
    return f"{dotted(path)} is not a field.{hint}"


def free_values(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Problems of a free mapping (`model.overrides`), which pydantic does not look into."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if _allows_remote_code(name):
                yield (*path, name), _remote_code((*path, name))
            else:
                yield from free_values(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from free_values(inner, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{dotted(path)} is not a finite number. Write a finite one."


def kind(value: Any) -> str:
    """'a string', 'a list': what a value is, for a reader who does not know YAML's types."""
    if isinstance(value, bool):
        return "a truth value"
    names: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a mapping")


def _missing(path: Path) -> str:
    schema = lookup(path) or {}
    if is_section(schema):
        needed = ", ".join(schema.get("required", []))
        return f"the section {dotted(path)} is missing. Add it, with {needed}."
    described = str((lookup(path[:-1]) or {})["properties"][path[-1]].get("description", ""))
    return f"{dotted(path)} is missing; {allowed(schema)} is allowed. Add it: {described}"


def _mistyped(path: Path, error: ErrorDetails, schema: Schema, written: Written | None) -> str:
    value = error["input"]
    shown = _shown(value, written)
    if value is None:
        preset = default(path)
        hint = "" if preset is None else f" Write {json.dumps(preset)}, or leave {path[-1]} out."
        return f"{dotted(path)} has no value; {allowed(schema)} is allowed.{hint}"
    if error["type"] in _OUT_OF_RANGE:
        complaint = f"{shown} is out of range"
    elif error["type"] == "finite_number":
        complaint = f"{shown} is not a finite number"
    elif error["type"] == "string_too_short":
        complaint = f"{shown} is empty"
    elif error["type"] == "literal_error" and isinstance(value, str):
        complaint = f"{shown} is not a choice"
    elif isinstance(value, list | dict):
        complaint = f"{kind(value)} is given"
    else:
        complaint = f"{shown} is {kind(value)}"
    return f"{dotted(path)}: {complaint}; {allowed(schema)} is allowed.{_hint(value, schema, shown)}"


def _shown(value: Any, written: Written | None) -> str:
    if isinstance(value, str):
        return quote(value)
    return shorten(written.plain) if written and written.plain else shorten(json.dumps(value))


def _hint(value: Any, schema: Schema, shown: str) -> str:
    """' Write X.' where the intention is plain."""
    wanted = schema.get("type")
    if "enum" in schema:
        return nearest(value, map(str, schema["enum"])) if isinstance(value, str) else ""
    if wanted == "boolean":
        meant = _TRUTH.get(str(value).lower())
        return f" Write {meant}." if meant else ""
    if wanted == "string":
        return f" Write {quote(shown)}." if isinstance(value, bool | int | float) else ""
    if wanted == "array":
        return f" Write [{value}]." if isinstance(value, str) and value.isidentifier() else ""
    if wanted in ("integer", "number") and isinstance(value, str | float):
        return _number_hint(resolve(value.strip()) if isinstance(value, str) else value, schema)
    return ""


def _number_hint(number: Any, schema: Schema) -> str:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return ""
    if schema["type"] == "integer":
        if number != int(number):
            return ""
        number = int(number)
    return f" Write {number}." if fits(number, schema) else ""


def _allows_remote_code(name: str | int) -> bool:
    return str(name).replace("-", "_").lower() == "trust_remote_code"


def _remote_code(path: Path) -> str:
    return (
        f"{dotted(path)}: a recipe cannot allow a model's own code to run; only the command-line flag "
        "--trust-remote-code does. Remove it."
    )
