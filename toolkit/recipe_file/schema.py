"""The JSON Schema of a recipe, for editors, and the words for what a field allows, for error messages."""

from functools import cache
from typing import Any

from toolkit.recipe import Recipe
from toolkit.recipe_file.strict_yaml import Path

Schema = dict[str, Any]


@cache
def json_schema() -> Schema:
    """Draft 2020-12; descriptions are the docstrings of `toolkit.recipe`. Cached: do not change the result."""
    schema = Recipe.model_json_schema()
    for definition in [schema, *schema["$defs"].values()]:
        definition["title"] = definition["title"].removesuffix("Section")
        for field in definition["properties"].values():
            field.pop("title", None)
            if "$ref" in field:
                field.pop("default", None)  # the section's own fields say their defaults
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def lookup(path: Path) -> Schema | None:
    """The schema of a field, `{}` for what lies inside a free mapping, None for what is not a field."""
    schema: Schema = json_schema()
    for part in path:
        if isinstance(part, int):
            prefix = schema.get("prefixItems", [])
            found = prefix[part] if part < len(prefix) else schema.get("items")
        elif schema.get("additionalProperties") is True or not schema:
            return {}
        else:
            found = schema.get("properties", {}).get(part)
        if not isinstance(found, dict):
            return None
        schema = _plain(found)
    return schema


def is_section(schema: Schema) -> bool:
    """Whether the field is a group of named fields."""
    return "properties" in schema


def fields(path: Path) -> list[str]:
    """Names of the fields of the section at `path`; empty where it is no section."""
    return list((lookup(path) or {}).get("properties", {}))


def homes(name: str) -> list[Path]:
    """Every section's field of that name."""
    return [(section, name) for section in fields(()) if name in fields((section,))]


def default(path: Path) -> Any:
    """The default of a field; None where it has none."""
    *section, name = path
    return ((lookup(tuple(section)) or {}).get("properties", {}).get(name) or {}).get("default")


def allowed(schema: Schema) -> str:
    """'a whole number ≥ 1', 'one of fp32, bf16, fp16': what a field takes, to be followed by 'is allowed'."""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"a {'whole number' if kind == 'integer' else 'number'}{_bounds(schema)}"
    if kind == "array":
        items = schema.get("prefixItems")
        if items:
            return f"a list of {len(items)} {allowed(_plain(items[0])).removeprefix('a ').replace('number', 'numbers')}"
        return f"a list of {_plain(schema['items']).get('type', 'value')}s"
    if kind == "object":
        return "a section with fields" if is_section(schema) else "a mapping"
    return {"boolean": "true or false", "string": _string(schema)}.get(kind or "", "another value")


def fits(value: Any, schema: Schema) -> bool:
    """Whether a number is within the bounds, for hints."""
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and (value > schema["exclusiveMinimum"] if "exclusiveMinimum" in schema else True)
        and (value < schema["exclusiveMaximum"] if "exclusiveMaximum" in schema else True)
    )


def _string(schema: Schema) -> str:
    return "a string that is not empty" if schema.get("minLength") else "a string"


def _bounds(schema: Schema) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " " * bool(bounds) + " and ".join(bounds)


def _plain(schema: Schema) -> Schema:
    """Without the reference or the null of an optional field."""
    if "$ref" in schema:
        found: Schema = json_schema()["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
        return found
    if "anyOf" in schema:
        return _plain(next(choice for choice in schema["anyOf"] if choice.get("type") != "null"))
    return schema
