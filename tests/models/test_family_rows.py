"""Rows of families.json: the types and words that FamilySpec declares, and what `like` takes from another row."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from toolkit.models.families.registry import FAMILIES, PATH
from toolkit.models.families.spec import FamilySpec

ROWS: dict[str, dict[str, Any]] = {
    name: row
    for group in json.loads(PATH.read_text(encoding="utf-8"))["families"].values()
    for name, row in group.items()
}


def declared(spec: FamilySpec) -> None:
    """Raise ValidationError for a value of a type, or a word, that its field does not declare."""
    for part in (spec, spec.config, spec.tensor_plan):
        if part is not None:
            TypeAdapter(type(part)).validate_python(dict(vars(part)))


@pytest.mark.parametrize("name", ROWS)
def test_every_value_of_a_row_is_of_the_type_that_its_field_declares(name: str) -> None:
    declared(FAMILIES[name])


def test_a_word_that_no_field_declares_is_found() -> None:
    vars(spec := FamilySpec())["attention"] = "owm"
    with pytest.raises(ValidationError, match="attention"):
        declared(spec)


def test_a_row_like_another_has_the_fields_of_both_in_each_section() -> None:
    base, own = FAMILIES["gpt2"], FAMILIES["gpt_bigcode"]
    assert (ROWS["gpt_bigcode"]["like"], ROWS["gpt_bigcode"]["config"]) == ("gpt2", {"multi_query": True})
    assert base.config is not None
    assert own.config is not None
    assert base.tensor_plan is not None
    assert own.tensor_plan is not None
    assert (base.config.multi_query, own.config.multi_query) == (False, True)
    assert own.config.fields == base.config.fields
    assert own.tensor_plan.styles == base.tensor_plan.styles


def test_that_ulysses_was_verified_is_not_taken_from_another_row() -> None:
    alike = [name for name, row in ROWS.items() if "like" in row and FAMILIES[row["like"]].ulysses_verified]
    assert len(alike) > 10
    assert all(FAMILIES[name].ulysses_verified == ROWS[name].get("ulysses_verified", False) for name in alike)
