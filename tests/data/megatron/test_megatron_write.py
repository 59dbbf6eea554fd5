"""`dstk tokenize --format megatron` writes the bytes that megatron-core's own builder writes for the same documents."""

import json
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from refusals import refused
from small_chats import write_tokenizer

from toolkit.cli.tokenize import command
from toolkit.config import dump_recipe
from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.documents.part import SourcePart
from toolkit.data.megatron import write
from toolkit.data.megatron.blend import write_sources
from toolkit.data.megatron.write import MegatronFiles, write_megatron
from toolkit.data.samples.loader import open_samples
from toolkit.data.tokens.shards import make_shard
from toolkit.data.tokens.token_cache import prepare
from toolkit.errors import DataError

TEXTS = [f"hello there {'one two three ' * (number % 9)}{number}" for number in range(200)]


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def get_blend_from_list(words: list[str]) -> tuple[list[str], list[float]]:
    """Read what follows --data-path as Megatron-LM does."""
    from megatron.core.datasets.utils import get_blend_from_list

    return get_blend_from_list(words)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=None)


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 2000)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in [*TEXTS, "", ""]))
    return tmp_path / "text.jsonl"


def section(text: Path, tokenizer: object, **fields: object) -> DataSection:
    defaults = {"workers": 1, "seq_len": 16, "eval_fraction": 0.0, "cache_dir": str(text.parent / "cache")}
    return DataSection(**{"source": str(text), "tokenizer": str(tokenizer), **defaults, **fields})


def written(text: Path, tokenizer: object, **fields: object) -> MegatronFiles:
    return write_megatron(section(text, tokenizer, **fields), str(text.parent / "ours"), progress=False)


@pytest.mark.parametrize(("least", "dtype"), [(65_500, np.uint16), (300, np.int32)])
def test_the_files_are_those_of_their_builder(least, dtype, text, tokenizer, oracle, monkeypatch):
    monkeypatch.setattr(write, "_UINT16_ENTRIES", least)
    files = written(text, tokenizer)
    corpus = prepare(section(text, tokenizer), progress=False)
    builder = oracle.IndexedDatasetBuilder(str(text.parent / "theirs.bin"), dtype=dtype)
    for document in np.split(corpus.tokens("train"), corpus.document_offsets("train")[1:-1]):
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(text.parent / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert Path(f"{files.prefix}{suffix}").read_bytes() == (text.parent / f"theirs{suffix}").read_bytes()
    assert len(oracle.IndexedDataset(str(files.prefix))) == files.documents == len(TEXTS)


def test_16_bits_are_taken_for_the_vocabularies_for_which_megatron_takes_them(oracle):
    for entries in (65_499, 65_500):
        ours = write._UINT16 if entries < write._UINT16_ENTRIES else write._INT32
        assert ours == oracle.DType.code_from_dtype(oracle.DType.optimal_dtype(entries))


def test_a_corpus_and_its_trained_tokenizer_are_read_back_as_the_same_samples(text):
    files = written(text, "bpe-300")
    as_text = section(text, "bpe-300")
    mapped = section(files.prefix, files.tokenizer)
    expected, found = (
        open_samples(prepare(data, progress=False), data, split="train", seed=5, global_batch_size=4)
        for data in (as_text, mapped)
    )
    ours, theirs = (samples.batch(0, range(len(samples))) for samples in (found, expected))
    assert ours.input_ids.equal(theirs.input_ids)
    assert ours.labels.equal(theirs.labels)


def test_nothing_but_the_dataset_is_left(text, tokenizer):
    written(text, tokenizer)
    assert {path.name for path in text.parent.iterdir()} == {
        *("text.jsonl", "ours.bin", "ours.idx", "ours_tokenizer", "cache")
    }
    assert list((text.parent / "cache").iterdir()) == []


def test_shards_make_the_same_dataset(text, tokenizer):
    files = written(text, tokenizer)
    data, place = section(text, tokenizer), str(text.parent / "shards")
    for number in (1, 2, 3):
        make_shard(data, SourcePart(number=number, count=3), folder=place, progress=False)
    merged = write_megatron(data, str(text.parent / "merged"), merge=True, shards=place, progress=False)
    for suffix in (".bin", ".idx"):
        assert Path(f"{merged.prefix}{suffix}").read_bytes() == Path(f"{files.prefix}{suffix}").read_bytes()


def test_an_existing_dataset_is_not_overwritten(text, tokenizer):
    files = written(text, tokenizer)
    before = Path(f"{files.prefix}.bin").read_bytes()
    with refused(DataError, "--output"):
        written(text, tokenizer, separator="none")
    assert Path(f"{files.prefix}.bin").read_bytes() == before


def test_a_write_that_fails_leaves_no_dataset_and_goes_on_with_the_tokens(text, tokenizer, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, refused(DataError, "--output"):
        patch.setattr(write, "_write_index", fail)
        written(text, tokenizer)
    names = [path.name for path in text.parent.iterdir()]
    assert not [name for name in names if name.endswith((".bin", ".idx", ".tmp"))]
    assert [path.suffix for path in (text.parent / "cache").iterdir()] == [".partial"]
    assert written(text, tokenizer).documents == len(TEXTS)


def test_what_the_format_does_not_hold_is_refused(text, tokenizer):
    with refused(DataError, "data.format"):
        written(text, tokenizer, format="prompt_completion")
    rows = text.parent / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    with refused(DataError, "data.source", remedy="leave labels out"):
        written(rows, tokenizer, format="pretokenized")
    files = written(text, tokenizer)
    with refused(DataError, "data.source"):
        write_megatron(section(files.prefix, tokenizer), str(text.parent / "again"), progress=False)


SHARES = [({"weight": 7}, {"weight": 0.5}, [7, 0.5]), ({"epochs": 2}, {"weight": 1}, None)]


@pytest.mark.parametrize(("first", "second", "weights"), SHARES)
def test_a_mixture_becomes_a_dataset_of_each_source_and_their_blend(
    first, second, weights, text, tokenizer, make_recipe, oracle
):
    (text.parent / "b c.jsonl").write_text(text.read_text()[:900].rpartition("\n")[0])
    sources = [{"path": str(text), **first}, {"path": str(text.parent / "b c.jsonl"), **second}]
    recipe = make_recipe(
        data__source="stdlib",
        data__sources=sources,
        data__tokenizer=str(tokenizer),
        data__workers=1,
        train__steps=10**6,
    )
    (text.parent / "r.yaml").write_text(dump_recipe(recipe))
    place = text.parent / "out/mix"
    arguments = [str(text.parent / "r.yaml"), "--format", "megatron", "-o", str(place)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    flag, *words = result.stdout.splitlines()[-1].split()
    prefixes, found = get_blend_from_list(words)
    assert flag == "--data-path"
    assert prefixes == [f"{place}_text.jsonl", f"{place}_b_c.jsonl"]
    counts = [sum(len(one) for one in oracle.IndexedDataset(prefix)) for prefix in prefixes]
    run = recipe.train.steps * recipe.batch.global_batch_size * recipe.data.seq_len
    assert found == (weights or [2 * counts[0], run - 2 * counts[0]])
    alone = write_megatron(section(text, tokenizer), str(text.parent / "alone"), progress=False)
    assert Path(f"{prefixes[0]}.bin").read_bytes() == Path(f"{alone.prefix}.bin").read_bytes()


def test_a_source_that_cannot_be_written_is_refused_before_any_is(text, tokenizer, make_recipe):
    sources = [{"path": str(text), "weight": 1}, {"path": str(text), "name": "b", "weight": 1, "format": "chat"}]
    recipe = make_recipe(data__source="stdlib", data__sources=sources, data__tokenizer=str(tokenizer))
    with refused(DataError, "data.sources[1].format"):
        write_sources(recipe, str(text.parent / "mix"), progress=False)
    assert not list(text.parent.glob("mix*"))


@pytest.mark.parametrize(
    "arguments", [["--format", "megatron"], ["-o", "x"], ["--format", "megatron", "-o", "x", "--shard", "1/2"]]
)
def test_options_that_do_not_go_together_are_refused(arguments):
    assert CliRunner().invoke(command, ["recipe.yaml", *arguments]).exit_code == 2
