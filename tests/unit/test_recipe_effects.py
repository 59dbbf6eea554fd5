"""Fields of `data` that a source ignores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.recipe import Recipe
from toolkit.recipe_file import problems
from toolkit.recipe_file.effects import RECORD_SUFFIXES

Make = Callable[..., Recipe]
ALL = {"data__subset": "en", "data__split": "test", "data__text_field": "body"}


@pytest.fixture
def ignored(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The fields that are told to have no effect when all three are set."""
    monkeypatch.chdir(tmp_path)

    def fields(source: str, *files: str) -> list[str]:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("text")
        found = problems(make_recipe(**ALL, data__source=source))
        assert all(f" has no effect with data.source={source}. Remove it, or name " in line for line in found)
        return [line.split(" ")[0].removeprefix("data.") for line in found]

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
        ("x" * 5000, [], []),
    ],
)
def test_what_a_source_ignores_is_told(
    ignored: Callable[..., list[str]], source: str, files: list[str], fields: list[str]
) -> None:
    assert ignored(source, *files) == fields


def test_defaults_are_never_told(make_recipe: Make) -> None:
    assert problems(make_recipe(data__subset=None, data__split="train", data__text_field="text")) == []


def test_files_of_records_are_those_that_the_sources_read_as_such() -> None:
    from toolkit.train.data.sources import JSON_SUFFIXES, PARQUET_SUFFIXES

    assert set(RECORD_SUFFIXES) == {*JSON_SUFFIXES, *PARQUET_SUFFIXES, ".json"}
