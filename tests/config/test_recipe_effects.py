"""Fields of `data` that a source ignores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.config import dump_recipe, load_recipe, recipe_conflicts, recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError

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
        assert all(refusal.settings[1] == ("data.source", source) for refusal in found)
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


@pytest.mark.parametrize(
    ("overrides", "subset", "split"),
    [
        (["data.source=crawl.jsonl"], None, "train"),
        (["data.source=stdlib"], None, "train"),
        (["data.source=org/other"], "en", "test"),
        ([], "en", "test"),
        (["data.source=org/other", "data.split=dev"], "en", "dev"),
    ],
)
def test_another_source_on_the_command_line_leaves_what_belongs_to_the_first(
    overrides: list[str],
    subset: str | None,
    split: str,
    make_recipe: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("crawl.jsonl").touch()
    Path("r.yaml").write_text(dump_recipe(make_recipe(data__source="org/data", data__subset="en", data__split="test")))
    data = load_recipe("r.yaml", overrides).data
    assert (data.subset, data.split) == (subset, split)


def test_what_has_no_effect_beside_another_source_is_refused_where_it_is_an_override(
    make_recipe: Make, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(dump_recipe(make_recipe(data__source="org/data")))
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml", ["data.source=stdlib", "data.subset=en"])
    assert [refusal.field for refusal in caught.value.refusals] == ["data.subset"]


def test_defaults_are_never_reported(make_recipe: Make) -> None:
    assert recipe_problems(make_recipe(data__subset=None, data__split="train", data__text_field="text")) == []


def test_document_masking_has_no_effect_on_padded_samples(make_recipe: Make) -> None:
    [refusal] = recipe_conflicts(make_recipe(data__packing="padded", data__document_masking=True))
    assert refusal.settings == (("data.document_masking", True), ("data.packing", "padded"))
