"""Pretokenized rows are taken as they are, from every kind of file, and are checked one by one."""

import gzip
import json
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from small_chats import write_tokenizer

from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.data.samples.loader import open_samples
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError

KINDS = ["jsonl", "jsonl.gz", "parquet", "arrow", "saved"]
rng = np.random.default_rng(3)
ROWS = [rng.integers(0, 290, size=size).tolist() for size in rng.integers(1, 70, size=300)]
LABELS = [[-100 if place < len(row) // 2 else token for place, token in enumerate(row)] for row in ROWS]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 2000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=None)


def write(folder: Path, kind: str, rows: list[dict[str, object]]) -> Path:
    import datasets
    import pyarrow

    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=70)
    else:
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return path


def built(source: Path, tokenizer: Path, **fields: object) -> TokenCorpus:
    return prepare(section(source, tokenizer, **fields), progress=False)


def section(source: Path, tokenizer: Path, **fields: object) -> DataSection:
    names = {"source": str(source), "tokenizer": str(tokenizer), "cache_dir": str(source.parent / "cache")}
    defaults = {"format": "pretokenized", "workers": 1, "eval_fraction": 0.0, "seq_len": 16}
    return DataSection(**{**names, **defaults, **fields})


def samples(corpus: TokenCorpus, data: DataSection) -> Samples:
    return open_samples(corpus, data, split="train", seed=5, global_batch_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_every_kind_of_file_are_taken_as_they_are(kind, tmp_path, tokenizer):
    corpus = built(write(tmp_path, kind, [{"id": 1, "input_ids": row} for row in ROWS]), tokenizer)
    stream, offsets = corpus.tokens("train"), corpus.document_offsets("train")
    assert [stream[start:end].tolist() for start, end in pairwise(offsets)] == ROWS
    assert corpus.trained_tokens is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_labels_leave_out_is_no_target(kind, tmp_path, tokenizer):
    rows = [{"input_ids": row, "labels": labels} for row, labels in zip(ROWS, LABELS, strict=True)]
    corpus = built(write(tmp_path, kind, rows), tokenizer)
    stream, mask = corpus.tokens("train"), corpus.trained("train")
    assert np.where(mask > 0, stream.astype(int), -100).tolist() == [*chain.from_iterable(LABELS)]
    assert corpus.trained_tokens == sum(label != -100 for labels in LABELS for label in labels)


def test_rows_with_masked_labels_are_whole_documents(tmp_path, tokenizer):
    path = write(tmp_path, "jsonl", [{"input_ids": list(range(9)), "labels": [-100] * 4 + [4, 5, 6, 7, 8]}] * 7)
    corpus = built(path, tokenizer)
    for data in (section(path, tokenizer, document_masking=True), section(path, tokenizer, packing="padded")):
        found = samples(corpus, data)
        assert isinstance(found, DocumentSamples)
        ids, labels = found.tokens(0)
        assert (ids[:8].tolist(), labels[:8].tolist()) == (list(range(8)), [-100] * 3 + [4, 5, 6, 7, 8])
    masking = ("data.document_masking", True)
    with refused(DataError, "data.format", "data.document_masking", remedy=masking):
        samples(corpus, section(path, tokenizer))


def test_labels_that_leave_nothing_out_change_nothing(tmp_path, tokenizer):
    plain = built(write(tmp_path, "parquet", [{"input_ids": row} for row in ROWS]), tokenizer)
    labeled = built(write(tmp_path, "jsonl", [{"input_ids": row, "labels": row} for row in ROWS]), tokenizer)
    assert (labeled.path / "train.bin").read_bytes() == (plain.path / "train.bin").read_bytes()
    assert labeled.contents == plain.contents


@pytest.mark.parametrize("packing", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_ids_of_text_make_the_samples_of_the_text(packing, tmp_path, tokenizer):
    text = tmp_path / "text.jsonl"
    texts = [f"one two {'three four ' * (number % 9)}{number}" for number in range(300)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in texts))
    as_text = section(text, tokenizer, format="text", eval_fraction=0.3, **packing)
    corpus = prepare(as_text, progress=False)
    loaded = corpus.tokenizer()
    ids = [[*loaded(line, add_special_tokens=False)["input_ids"], loaded.eos_token_id] for line in texts]
    as_ids = section(
        write(tmp_path, "parquet", [{"input_ids": row} for row in ids]), tokenizer, eval_fraction=0.3, **packing
    )
    for split in ("train", "eval"):
        expected, found = (
            open_samples(prepare(data, progress=False), data, split=split, seed=5, global_batch_size=4)
            for data in (as_text, as_ids)
        )
        assert len(found) == len(expected)
        for step in range(len(found) // 4):
            ours, theirs = found.batch(step, range(4)), expected.batch(step, range(4))
            assert ours.input_ids.equal(theirs.input_ids)
            assert ours.labels.equal(theirs.labels)
            assert found.target_count(step, range(4)) == expected.target_count(step, range(4))


GOOD = {"input_ids": [1, 2, 3]}
BAD = {
    "labels that are other ids": ({**GOOD, "labels": [-100, 2, 4]}, "labels[2] is 4, and input_ids[2] is 3"),
    "labels shifted by one": ({**GOOD, "labels": [2, 3, -100]}, "labels[0] is 2, and input_ids[0] is 1"),
    "too few labels": ({**GOOD, "labels": [1, 2]}, "2 labels for 3 input_ids"),
    "an id beyond the vocabulary": ({"input_ids": [1, 999]}, "the id 999 is not one of the tokenizer's"),
    "a negative id": ({"input_ids": [1, -1]}, "the id -1 is not one of the tokenizer's"),
    "a float": ({"input_ids": [1.0, 2.0]}, "input_ids has a float in it"),
    "texts": ({"input_ids": ["1"]}, "input_ids has a str in it"),
    "nested lists": ({"input_ids": [[1, 2], [3]]}, "input_ids has a list in it"),
    "nulls": ({"input_ids": [1, None]}, "input_ids has a NoneType in it"),
    "no list": ({"input_ids": 7}, "input_ids is an int"),
    "float labels": ({**GOOD, "labels": [1.0, 2.0, 3.0]}, "labels has a float in it"),
    "no column": ({"text": "hi"}, "there is no input_ids"),
}
JSON_ONLY = {
    "booleans": ({"input_ids": [True]}, "input_ids has a bool in it"),
    "a number of 70 bits": ({"input_ids": [1 << 70]}, "input_ids has a number of more than 64 bits"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_one_line_that_names_it(kind, case, tmp_path, tokenizer):
    row, reason = BAD[case]
    path = write(tmp_path, kind, [row] if kind != "jsonl" else [GOOD, row])
    with pytest.raises(DataError) as caught:
        built(path, tokenizer)
    place = f"{path}:2: " if kind == "jsonl" else f"{path}: " if case == "no column" else f"{path}, row 0: "
    assert len(caught.value.problems) == 1
    assert str(caught.value).removeprefix("data.source=").startswith(f"{place}{reason}")


@pytest.mark.parametrize("case", JSON_ONLY)
def test_json_has_more_numbers_than_tables(case, tmp_path, tokenizer):
    row, reason = JSON_ONLY[case]
    path = write(tmp_path, "jsonl", [row])
    with pytest.raises(DataError) as caught:
        built(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:1: {reason}")
