"""The JSON Schema that editors check recipes with."""

from pathlib import Path

import pytest
from nonempty import nonempty

from toolkit.cli.validate import schema_text
from toolkit.config.recipe import Recipe
from toolkit.config.recipe_schema import lookup, recipe_json_schema
from toolkit.config.section import Section

COMMITTED = Path(__file__).parents[2] / "recipes" / "recipe.schema.json"


def test_the_committed_schema_is_up_to_date() -> None:
    assert COMMITTED.read_text() == schema_text(), "run: dstk schema > recipes/recipe.schema.json"


def test_it_names_the_draft_that_editors_know() -> None:
    assert recipe_json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_section_refuses_unknown_fields() -> None:
    assert all(
        section["additionalProperties"] is False
        for section in nonempty([recipe_json_schema(), *recipe_json_schema()["$defs"].values()])
    )


def test_every_whole_number_has_bounds() -> None:
    numbers: list[dict[str, object]] = []
    pending: list[object] = [recipe_json_schema()]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            numbers += [value] if value.get("type") == "integer" else []
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    assert len(numbers) > 25
    assert all({"minimum", "maximum"} <= number.keys() for number in numbers)


def test_every_field_has_a_description_on_one_line() -> None:
    sections = [recipe_json_schema(), *recipe_json_schema()["$defs"].values()]
    descriptions = [field["description"] for section in sections for field in section["properties"].values()]
    assert len(descriptions) > 60
    assert all(text and "\n" not in text for text in descriptions)


def test_every_field_of_the_recipe_is_in_the_schema() -> None:
    assert len(Recipe.model_fields) > 10
    for name, field in Recipe.model_fields.items():
        inner = field.annotation
        names = inner.model_fields if isinstance(inner, type) and issubclass(inner, Section) else {}
        assert all(lookup((name, *rest)) is not None for rest in [(), *((field,) for field in names)])


@pytest.mark.parametrize("path", [("batch", "size"), ("nope",), ("precision", "x"), ("optimizer", "betas", 2)])
def test_what_is_not_a_field_is_not_found(path: tuple[str | int, ...]) -> None:
    assert lookup(path) is None


def test_what_lies_in_a_free_mapping_is_free() -> None:
    assert lookup(("model", "overrides", "a", "b")) == {}
