"""The fields of a recipe: the JSON Schema for editors, the words for what a field allows, and the renamed fields."""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from toolkit.config import data_section, distill_section, objective_section, recipe
from toolkit.config.recipe import Recipe
from toolkit.config.source_text import Path
from toolkit.errors import Refusal
from toolkit.units import LARGEST_COUNT, LARGEST_SEED

Schema = dict[str, Any]

_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

RENAMED = {"batch.global_size": "batch.global_batch_size", "batch.micro_size": "batch.micro_batch_size"}
REPLACED_VALUES: dict[tuple[str, Any], dict[str, Any]] = {
    ("data.packing", "isolated"): {"data.packing": "packed", "data.document_masking": True}
}
"""Values that other fields express now."""
ADDED = {
    "data.document_masking": False,
    "data.format": "text",
    "data.train_on": "assistant",
    "data.dropped_text": "refuse",
    "data.overlong": "truncate",
    "data.bos": "auto",
    "data.separator": "eos",
    "model.load_in_4bit": False,
    "model.float8": None,
    "model.freeze": [],
    "model.train_only": [],
}
"""Fields of the mathematics that are newer than some stored recipes, with the value that those imply."""


@cache
def recipe_json_schema() -> Schema:
    """The JSON Schema of recipes, draft 2020-12; descriptions are the docstrings of the sections.

    The result is cached: do not change it.
    """
    schema = Recipe.model_json_schema()
    descriptions = _descriptions()
    for definition in [schema, *schema["$defs"].values()]:
        described = descriptions[definition["title"]]
        definition["title"] = definition["title"].removesuffix("Section")
        for name, field in definition["properties"].items():
            field.pop("title", None)
            if "$ref" in field:
                field.pop("default", None)  # the section's own fields have their defaults
            field["description"] = described[name]
            if definition is schema and name == "parallel":
                field["anyOf"] = [{"$ref": field.pop("$ref")}, {"const": "auto"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _descriptions() -> dict[str, dict[str, str]]:
    """The docstring of every field, by class: pydantic would parse the source whenever a recipe is imported."""
    by_class: dict[str, dict[str, str]] = {}
    sources = map(inspect.getsource, (data_section, distill_section, objective_section, recipe))
    for node in ast.parse("".join(sources)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        inherited = [by_class.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
        declared = {
            field.target.id: " ".join(text.value.value.split())
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        }
        by_class[node.name] = {name: text for documented in (*inherited, declared) for name, text in documented.items()}
    return by_class


def lookup(path: Path) -> Schema | None:
    """The schema of a field, `{}` inside a free mapping, None for what is not a field."""
    schema: Schema = recipe_json_schema()
    for part in path:
        if isinstance(part, int):
            prefix = schema.get("prefixItems", [])
            inner = prefix[part] if part < len(prefix) else schema.get("items")
        elif schema.get("additionalProperties") is True or not schema:
            return {}
        else:
            inner = schema.get("properties", {}).get(part)
        if not isinstance(inner, dict):
            return None
        schema = _plain(inner)
    return schema


def is_section(schema: Schema) -> bool:
    """Whether the field is a group of named fields."""
    return "properties" in schema


def fields(path: Path) -> list[str]:
    """Names of the fields of the section at `path`; empty where it is not a section."""
    return list((lookup(path) or {}).get("properties", {}))


def homes(name: str) -> list[Path]:
    """Every section's field of that name."""
    return [(section, name) for section in fields(()) if name in fields((section,))]


def default(path: Path) -> Any:
    """The default of a field; None where it has none."""
    *section, name = path
    return ((lookup(tuple(section)) or {}).get("properties", {}).get(name) or {}).get("default")


def allowed(schema: Schema, *, shows_largest: bool = False) -> str:
    """'a whole number ≥ 1', 'one of fp32, bf16, fp16': what a field takes, to be followed by 'is allowed'.

    The limit of all counts is left out, unless `shows_largest`.
    """
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"a {'whole number' if kind == 'integer' else 'number'}{_bounds(schema, shows_largest)}"
    if kind == "array":
        items = schema.get("prefixItems")
        if items:
            return f"a list of {len(items)} {allowed(_plain(items[0])).removeprefix('a ').replace('number', 'numbers')}"
        items = _plain(schema["items"])
        return f"a list of {'section' if is_section(items) else items.get('type', 'value')}s"
    if kind == "object":
        return "a section with fields" if is_section(schema) else "a mapping"
    text = "a string that is not empty" if schema.get("minLength") else "a string"
    return {"boolean": "true or false", "string": text}.get(kind or "", "another value")


def _bounds(schema: Schema, shows_largest: bool) -> str:
    limits = {key: _number(schema[key]) for key in _SIGNS if key in schema}
    if schema.get("maximum") in (LARGEST_COUNT, LARGEST_SEED) and not shows_largest:
        del limits["maximum"]
    if "minimum" in limits and "maximum" in limits:
        return f" from {limits['minimum']} to {limits['maximum']}"
    bounds = [f"{_SIGNS[key]} {limit}" for key, limit in limits.items()]
    return f" {' and '.join(bounds)}" if bounds else ""


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _plain(schema: Schema) -> Schema:
    """Return the schema without the reference or the null of an optional field."""
    if "$ref" in schema:
        definition: Schema = recipe_json_schema()["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
        return definition
    if "anyOf" in schema:
        return _plain(next(choice for choice in schema["anyOf"] if choice.get("type") != "null"))
    return schema


def replacement_of(field: str, value: Any) -> Refusal | None:
    """Refuse a replaced value; None for any other."""
    if isinstance(value, str) and (field, value) in REPLACED_VALUES:
        settings = REPLACED_VALUES[field, value].items()
        now = " with ".join(f"{name}={str(new).lower()}" for name, new in settings)
        return Refusal(field=field, reason=f"{field}={value} was replaced by {now}.")
    return None


def upgrade_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe with today's field names.

    A recipe that a user writes must use them; run directories and checkpoints keep the recipe as it was written.
    """
    flat: dict[str, Any] = {
        name: value for name, value in ADDED.items() if isinstance(values.get(name.split(".")[0]), Mapping)
    }
    upgraded: dict[str, Any] = {}
    for section, fields in values.items():
        if isinstance(fields, Mapping):
            upgraded[section] = {}
            flat |= {RENAMED.get(name := f"{section}.{key}", name): value for key, value in fields.items()}
        else:
            upgraded[section] = fields
    for (name, old), settings in REPLACED_VALUES.items():
        if flat.get(name) == old:
            flat |= settings
    for name, value in flat.items():
        section, _, key = name.partition(".")
        upgraded[section][key] = value
    return upgraded


def flat_fields(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the sections of a recipe into `section.key`. Overrides of the model remain one value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, Mapping) and prefix + key not in ("model.overrides", "layouts")
        flat |= flat_fields(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return flat
