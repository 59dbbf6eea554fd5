"""Recipes that are validated and never run, and the one conflict that some of them have."""

import json
from typing import Any

from toolkit.config import recipe_conflicts
from toolkit.config.recipe import Recipe


def recipe(**changes: object) -> Recipe:
    """A recipe on GPT-2 with fields changed: `parallel__tp=2`, `precision="bf16"`."""
    values: dict[str, Any] = {
        "model": {"name_or_path": "gpt2"},
        "data": {"seq_len": 128},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            values.setdefault(section, {})[field] = value
        else:
            values[section] = value
    return Recipe.model_validate_json(json.dumps(values))


def check_conflict(given: Recipe, fields: list[str], remedy: list[object]) -> None:
    """The recipe has one conflict, of these fields, with these remedies."""
    (refusal,) = recipe_conflicts(given)
    assert [field for field, _ in refusal.settings] == fields
    assert list(refusal.remedy) == remedy
