"""The token caches of a mixture: each source keeps the one that it has alone, and all have one tokenizer."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from refusals import refused
from small_chats import write_tokenizer

from toolkit.config.data_section import DataSection, SourceSection, ValidationSection
from toolkit.data.tokens import corpora, token_cache
from toolkit.data.tokens.corpora import Corpora, prepare_all
from toolkit.data.tokens.token_cache import prepare
from toolkit.errors import DataError


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    """Three texts without a word in common."""
    paths = {name: tmp_path / f"{name}.txt" for name in ("red", "green", "blue")}
    for name, path in paths.items():
        path.write_text(f"{name} {name * 2} {name[::-1]}\n" * 300)
    return paths


def section(folder: Path, **fields: Any) -> DataSection:
    defaults: dict[str, Any] = {"seq_len": 16, "workers": 1, "cache_dir": str(folder / "cache"), "eval_fraction": 0.0}
    return DataSection(**{**defaults, "tokenizer": "bpe-257", **fields})


def mixture(folder: Path, *paths: Path, **fields: Any) -> DataSection:
    return section(folder, sources=tuple(SourceSection(path=str(path), weight=1.0) for path in paths), **fields)


def opened(data: DataSection, **options: bool) -> Corpora:
    return prepare_all(data, progress=False, **options)


def test_another_source_tokenizes_none_of_the_others_again(
    tmp_path: Path, texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = str(prepare(section(tmp_path, source=str(texts["red"])), progress=False).tokenizer_dir)
    alone = prepare(section(tmp_path, source=str(texts["green"]), tokenizer=tokenizer), progress=False)
    two = opened(mixture(tmp_path, texts["red"], texts["green"], tokenizer=tokenizer))
    assert two.sources["green.txt"].corpus.path == alone.path
    built: list[str] = []
    tokenize = token_cache.Corpus.tokenize

    def watched(corpus: token_cache.Corpus, *arguments: Any, **options: Any) -> None:
        built.append(corpus.section.source)
        tokenize(corpus, *arguments, **options)

    monkeypatch.setattr(token_cache.Corpus, "tokenize", watched)
    three = opened(mixture(tmp_path, texts["blue"], texts["red"], texts["green"], tokenizer=tokenizer))
    assert built == [str(texts["blue"])]
    assert {name: text.corpus.path for name, text in two.sources.items()}.items() <= {
        name: text.corpus.path for name, text in three.sources.items()
    }.items()


def test_a_bpe_is_trained_on_all_sources(tmp_path: Path, texts: dict[str, Path]) -> None:
    data = mixture(tmp_path, texts["red"], texts["green"], tokenizer="bpe-300")
    corpora = opened(data)
    vocabularies = [text.corpus.tokenizer().get_vocab() for text in corpora.sources.values()]
    assert vocabularies[0] == vocabularies[1]
    assert {"Ġredred", "Ġgreengreen"} <= vocabularies[0].keys()
    assert [text.corpus.path for text in opened(data).sources.values()] == [
        text.corpus.path for text in corpora.sources.values()
    ]
    other = opened(mixture(tmp_path, texts["red"], texts["blue"], tokenizer="bpe-300"))
    assert "Ġgreengreen" not in other.tokenizer().get_vocab()
    assert other.contents != corpora.contents


def test_validation_sets_have_the_tokenizer_of_the_training_text(tmp_path: Path, texts: dict[str, Path]) -> None:
    sets = (ValidationSection(path=str(texts["green"]), name="other"), ValidationSection(path=str(texts["blue"])))
    data = section(tmp_path, source=str(texts["red"]), tokenizer="bpe-280", validation=sets, eval_fraction=0.3)
    corpora = opened(data)
    assert [*corpora.validation] == ["other", "blue.txt"]
    vocabulary = corpora.tokenizer().get_vocab()
    assert "Ġgreengreen" not in vocabulary
    assert all(text.corpus.tokenizer().get_vocab() == vocabulary for text in corpora.validation.values())
    assert corpora.first.eval_tokens == 0
    assert [*opened(data, validates=False).validation] == []


def save(folder: Path, *splits: str) -> Path:
    rows = {
        split: datasets.Dataset.from_dict({"text": [f"{split} text {n} " * 40 for n in range(9)]}) for split in splits
    }
    datasets.DatasetDict(rows).save_to_disk(str(folder))
    return folder


def test_the_validation_split_of_a_dataset_is_found_and_nothing_else_is_held_out(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", "train", "validation", "test")
    corpora = opened(section(tmp_path, source=str(saved), eval_fraction=0.3))
    assert corpora.finds_validation
    assert corpora.first.eval_tokens == 0
    (found,) = corpora.validation.values()
    assert (found.section.split, found.split) == ("validation", "train")
    ids = found.corpus.tokens("train")[:20]
    assert found.corpus.tokenizer().decode(ids.tolist()).startswith("validation text 0")


def test_a_test_split_is_never_used(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", "train", "test")
    corpora = opened(section(tmp_path, source=str(saved), eval_fraction=0.5))
    assert not corpora.finds_validation
    assert [(name, text.split) for name, text in corpora.validation.items()] == [("", "eval")]


def test_a_mixture_holds_out_of_each_source_what_that_one_has(tmp_path: Path, texts: dict[str, Path]) -> None:
    saved = save(tmp_path / "saved", "train", "validation")
    corpora = opened(mixture(tmp_path, texts["red"], saved, eval_fraction=0.3))
    assert {name: text.split for name, text in corpora.validation.items()} == {"red.txt": "eval", "saved": "train"}


def test_errors_name_the_source_or_the_validation_set(tmp_path: Path, texts: dict[str, Path]) -> None:
    gone = tmp_path / "gone.txt"
    with refused(DataError, "data.sources[1].path"):
        opened(mixture(tmp_path, texts["red"], gone))
    with refused(DataError, "data.sources[1].path"):
        opened(mixture(tmp_path, texts["red"], gone, tokenizer="bpe-300"))
    saved = save(tmp_path / "saved", "train", "test")
    sets = (ValidationSection(path=str(saved)),)
    with refused(DataError, "data.validation[0].split", "data.validation[0].path"):
        opened(section(tmp_path, source=str(texts["red"]), validation=sets))


BAD_TEXTS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    ("", {}),
    ('{"text": "a"}\n', {"format": "chat"}),
    ('{"text": "a"}\n', {"text_field": "content"}),
]
"""What is in a file (None: there is none), and what the recipe says of it."""


@pytest.mark.parametrize(("text", "options"), BAD_TEXTS)
@pytest.mark.parametrize("field", ["sources[1]", "validation[0]"])
@pytest.mark.parametrize("tokenizer", ["bpe-280", "other"])
def test_what_is_wrong_with_a_later_text_is_found_before_the_first_is_tokenized(
    tmp_path: Path,
    texts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: str,
    field: str,
    text: str | None,
    options: dict[str, Any],
) -> None:
    if tokenizer == "other":
        tokenizer = str(write_tokenizer(tmp_path / "other", template=None))
    path = tmp_path / "later.jsonl"
    if text is not None:
        path.write_text(text)
    first, later = SourceSection(path=str(texts["red"]), weight=1.0), {"path": str(path), **options}
    if field == "sources[1]":
        fields: dict[str, Any] = {"sources": (first, SourceSection(weight=1.0, **later))}
    else:
        fields = {"sources": (first,), "validation": (ValidationSection(**later),)}
    begun: list[str] = []
    monkeypatch.setattr(token_cache.Corpus, "save_tokenizer", lambda *_: begun.append("tokenizes"))
    monkeypatch.setattr(corpora, "_train_for_all", lambda *_, **__: begun.append("trains a tokenizer"))
    with pytest.raises(DataError, match=rf"later\.jsonl|data\.{re.escape(field)}\.format=chat"):
        opened(section(tmp_path, tokenizer=tokenizer, **fields))
    assert begun == []


def test_an_empty_source_is_named_by_its_field(tmp_path: Path, texts: dict[str, Path]) -> None:
    """Also one of which only the whole shows that it has no text."""
    for name, text in (("none.jsonl", ""), ("nulls.jsonl", '{"text": null}\n' * 3), ("none.txt", "")):
        path = tmp_path / name
        path.write_text(text)
        with refused(DataError, "data.sources[1].path", remedy=("data.sources[1].path", "a text that is not empty")):
            opened(mixture(tmp_path, texts["red"], path))
