"""Fields of `data` that a source ignores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.config import recipe_conflicts, recipe_problems
from toolkit.config.recipe import Recipe

Make = Callable[..., Recipe]
ALL = {"data__subset": "en", "data__split": "test", "data__text_field": "body"}


@pytest.fixture
def ignored(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The fields that are reported as having no effect when all three are set."""
    monkeypatch.chdir(tmp_path)

    def fields(source: str, *files: str) -> list[str]:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("text")
        found = recipe_conflicts(make_recipe(**ALL, data__source=source))
        assert all(refusal.given[1] == ("data.source", source) for refusal in found)
        return [refusal.field.removeprefix("data.") for refusal in found]

    return fields


@pytest.mark.parametrize(
    ("source", "files", "fields"),
    [
        ("notes.txt", ["notes.txt"], ["subset", "split", "text_field"]),
        ("notes", ["notes"], ["subset", "split", "text_field"]),
        ("*.md", ["a.md"], ["subset", "split", "text_field"]),
        ("crawl.jsonl", ["crawl.jsonl"], ["subset", "split"]),
        ("crawl.JSONL.gz", ["crawl.JSONL.gz"], ["subset", "split"]),
        ("crawl.parquet", ["crawl.parquet"], ["subset", "split"]),
        ("crawl/*.jsonl.zst", ["crawl/a.jsonl.zst"], ["subset", "split"]),
        ("crawl/*", ["crawl/a.jsonl"], ["subset", "split"]),
        ("crawl", ["crawl/a.jsonl"], ["subset", "split"]),
        ("saved", ["saved/state.json"], ["subset", "split"]),
        ("saved", ["saved/dataset_dict.json"], ["subset"]),
        ("org/data", [], []),
        ("./gone.txt", [], []),
    ],
)
def test_what_a_source_ignores_is_reported(
    ignored: Callable[..., list[str]], source: str, files: list[str], fields: list[str]
) -> None:
    assert ignored(source, *files) == fields


def test_defaults_are_never_reported(make_recipe: Make) -> None:
    assert recipe_problems(make_recipe(data__subset=None, data__split="train", data__text_field="text")) == []


def test_document_masking_has_no_effect_on_padded_samples(make_recipe: Make) -> None:
    [refusal] = recipe_conflicts(make_recipe(data__packing="padded", data__document_masking=True))
    assert refusal.given == (("data.document_masking", True), ("data.packing", "padded"))
