"""Datasets of Megatron-LM, as megatron-core writes and reads them."""

import json
import struct
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from refusals import refused
from small_chats import write_tokenizer

from toolkit.config.data_section import DataSection
from toolkit.data.megatron import index as megatron_index
from toolkit.data.megatron.corpus import MegatronCorpus
from toolkit.data.megatron.index import DTYPES, DocumentOffsets, open_index
from toolkit.data.samples.loader import open_samples
from toolkit.data.tokens.token_cache import Split, prepare
from toolkit.errors import DataError

SPLITS: tuple[Split, ...] = ("train", "eval")
rng = np.random.default_rng(5)
DOCUMENTS = [rng.integers(0, 100, size=size) for size in rng.integers(1, 90, size=400)]


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """megatron-core's own reader and builder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=None)


def build(oracle, prefix, documents, dtype=np.uint16, **fields):
    builder = oracle.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **fields)
    for document in documents:
        builder.add_document(torch.from_numpy(np.asarray(document, dtype=np.int64)), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def opened(source: object, tokenizer: Path, **fields: object) -> MegatronCorpus:
    corpus = prepare(section(source, tokenizer, **fields), progress=False)
    assert isinstance(corpus, MegatronCorpus)
    return corpus


def section(source: object, tokenizer: Path, **fields: object) -> DataSection:
    defaults = {"source": str(source), "tokenizer": str(tokenizer), "seq_len": 16, "eval_fraction": 0.2}
    return DataSection(**{**defaults, **fields})


def documents_of(corpus: MegatronCorpus, split: Split) -> list[list[int]]:
    return [part.tolist() for part in np.split(corpus.tokens(split), corpus.document_offsets(split)[1:-1])]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_datasets_of_their_builder_are_read_in_every_dtype(dtype, oracle, tmp_path, tokenizer):
    prefix = build(oracle, tmp_path / "corpus", DOCUMENTS, dtype)
    theirs = oracle.IndexedDataset(str(prefix))
    corpus = opened(prefix, tokenizer)
    found = [*documents_of(corpus, "train"), *documents_of(corpus, "eval")]
    assert found == [theirs[number].tolist() for number in range(len(theirs))]
    assert corpus.tokens("train").dtype == dtype
    assert isinstance(corpus.tokens("eval"), np.memmap)


@pytest.mark.parametrize("name", ["corpus", "corpus.idx", "corpus.bin"])
def test_a_dataset_is_named_by_its_prefix_or_one_of_its_files(name, oracle, tmp_path, tokenizer):
    build(oracle, tmp_path / "corpus", DOCUMENTS)
    assert opened(tmp_path / name, tokenizer).train_documents == 320


def test_the_last_documents_are_held_out_and_nothing_is_copied(oracle, tmp_path, tokenizer):
    corpus = opened(build(oracle, tmp_path / "corpus", DOCUMENTS), tokenizer, eval_fraction=0.25)
    assert (corpus.train_documents, corpus.eval_documents) == (300, 100)
    assert documents_of(corpus, "eval") == [document.tolist() for document in DOCUMENTS[300:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_at_least_a_block_is_held_out(oracle, tmp_path, tokenizer):
    corpus = opened(build(oracle, tmp_path / "corpus", DOCUMENTS), tokenizer, eval_fraction=0.001)
    assert corpus.eval_tokens >= 2048 > corpus.eval_tokens - len(documents_of(corpus, "eval")[0])


@pytest.mark.parametrize("documents", [[[1] * 9000], DOCUMENTS[:9]])
def test_a_dataset_of_which_nothing_would_be_left_is_refused(documents, oracle, tmp_path, tokenizer):
    prefix = build(oracle, tmp_path / "corpus", documents)
    with refused(DataError, "data.eval_fraction", "data.source", remedy=("data.eval_fraction", 0)):
        opened(prefix, tokenizer)
    assert opened(prefix, tokenizer, eval_fraction=0.0).eval_tokens == 0


def test_documents_of_several_sequences_and_empty_ones_are_read(oracle, tmp_path, tokenizer):
    builder = oracle.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32)
    for document in ([[1, 2], [3]], [], [[4]], [[]], [[5, 6, 7]]):
        for sentence in document:
            builder.add_item(torch.tensor(sentence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "corpus.idx"))
    corpus = opened(tmp_path / "corpus", tokenizer, eval_fraction=0.0)
    assert documents_of(corpus, "train") == [[1, 2, 3], [4], [5, 6, 7]]


@pytest.mark.parametrize(("first", "last"), [(0, 400), (37, 301), (399, 400), (400, 400)])
def test_offsets_are_the_array_that_they_stand_for(first, last, oracle, tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_index, "_PART", 16)
    index = open_index(str(build(oracle, tmp_path / "corpus", DOCUMENTS)))
    ends = np.cumsum([0, *map(len, DOCUMENTS)])
    expected = ends[first : last + 1] - ends[first]
    found = DocumentOffsets(index, first, last)
    assert len(found) == len(expected)
    assert np.asarray(found).tolist() == expected.tolist()
    assert (found[-1], found[0]) == (expected[-1], expected[0])
    assert found[2:9].tolist() == expected[2:9].tolist()
    chosen = rng.integers(0, len(expected), size=20)
    assert found[chosen].tolist() == expected[chosen].tolist()
    values = rng.integers(-1, expected[-1] + 2, size=(50, 2))
    for side in ("left", "right"):
        assert np.searchsorted(found, values, side=side).tolist() == np.searchsorted(expected, values, side).tolist()
        assert (
            np.searchsorted(found, expected, side=side).tolist() == np.searchsorted(expected, expected, side).tolist()
        )
    with pytest.raises(IndexError):
        found[len(expected)]


@pytest.mark.parametrize("packing", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_samples_are_those_of_the_same_documents_in_a_cache(packing, oracle, tmp_path, tokenizer):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": document.tolist()}) + "\n" for document in DOCUMENTS))
    cached = {"format": "pretokenized", "cache_dir": str(tmp_path), "workers": 1, "eval_fraction": 0.0, **packing}
    as_rows = section(rows, tokenizer, **cached)
    mapped = section(build(oracle, tmp_path / "corpus", DOCUMENTS), tokenizer, eval_fraction=0.0, **packing)
    expected, found = (
        open_samples(prepare(data, progress=False), data, split="train", seed=5, global_batch_size=4)
        for data in (as_rows, mapped)
    )
    assert len(found) == len(expected)
    for step in range(len(found) // 4):
        ours, theirs = found.batch(step, range(4)), expected.batch(step, range(4))
        assert ours.input_ids.equal(theirs.input_ids)
        assert ours.labels.equal(theirs.labels)
        assert found.target_count(step, range(4)) == expected.target_count(step, range(4))
        assert (ours.position_ids is None) == (theirs.position_ids is None)
        assert ours.position_ids is None or ours.position_ids.equal(theirs.position_ids)


def patched(offset, fmt, value):
    def patch(idx, bin_):
        content = bytearray(idx.read_bytes())
        struct.pack_into(fmt, content, offset, value)
        idx.write_bytes(content)

    return patch


def cut(idx, bin_):
    idx.write_bytes(idx.read_bytes()[:-8])


def cut_header(idx, bin_):
    idx.write_bytes(idx.read_bytes()[:20])


def empty(idx, bin_):
    idx.write_bytes(b"")


def cut_bin(idx, bin_):
    bin_.write_bytes(bin_.read_bytes()[:-2])


def grow_bin(idx, bin_):
    bin_.write_bytes(bin_.read_bytes() + b"\0\0")


def no_bin(idx, bin_):
    bin_.unlink()


def no_idx(idx, bin_):
    idx.unlink()


def folder_for_bin(idx, bin_):
    bin_.unlink()
    bin_.mkdir()


LENGTHS, POINTERS = 34, 34 + 4 * 400
OFFSETS = POINTERS + 8 * 400
DAMAGE = {
    "magic": (patched(0, "<9s", b"TNTIDX\0\0\0"), "idx: it is not the index of a dataset of Megatron-LM"),
    "version": (patched(9, "<Q", 2), "idx: it has version 2"),
    "unknown dtype": (patched(17, "<B", 99), "idx: it has the data type 99"),
    "float32": (patched(17, "<B", 7), "idx: it is of float32"),
    "float64": (patched(17, "<B", 6), "idx: it is of float64"),
    "sequences": (patched(18, "<Q", 1 << 60), "idx: it has 8,042 bytes"),
    "documents": (patched(26, "<Q", 3), "idx: it has 8,042 bytes"),
    "truncated": (cut, "idx: it has 8,034 bytes"),
    "truncated header": (cut_header, "idx: it is truncated after 20 bytes"),
    "empty": (empty, "idx: it is not the index"),
    "negative length": (patched(LENGTHS + 8, "<i", -3), "idx: sequence 2 has a negative length"),
    "pointer": (patched(POINTERS + 24, "<q", 1), "idx: sequence 3 does not begin where"),
    "length": (patched(LENGTHS + 4, "<i", 0), "idx: sequence 2 does not begin where"),
    "first document": (patched(OFFSETS, "<q", 1), "idx: its documents are not all of it"),
    "last document": (patched(OFFSETS + 8 * 400, "<q", 401), "idx: its documents are not all of it"),
    "documents out of order": (patched(OFFSETS + 8 * 5, "<q", 9), "idx: document 6 begins before"),
    "short bin": (cut_bin, "bin: it has "),
    "long bin": (grow_bin, "bin: it has "),
    "no bin": (no_bin, "bin: No such file or directory"),
    "no idx": (no_idx, "idx: No such file or directory"),
    "folder for bin": (folder_for_bin, "bin: Is a directory"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_dataset_is_one_line_that_names_the_file(case, oracle, tmp_path, tokenizer):
    prefix = build(oracle, tmp_path / "corpus", DOCUMENTS)
    damage, reason = DAMAGE[case]
    damage(tmp_path / "corpus.idx", tmp_path / "corpus.bin")
    with pytest.raises(DataError) as caught:
        opened(prefix, tokenizer)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{prefix}.{reason}")


def test_a_remote_dataset_is_refused(tokenizer):
    with refused(DataError, "data.source", remedy="copy its .idx and .bin here"):
        opened("s3://bucket/corpus.idx", tokenizer)


def test_a_multimodal_dataset_is_refused(oracle, tmp_path, tokenizer):
    builder = oracle.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32, multimodal=True)
    builder.add_document(torch.arange(9), [9], [1])
    builder.finalize(str(tmp_path / "corpus.idx"))
    with pytest.raises(DataError, match=r"corpus.idx: it has modes"):
        opened(tmp_path / "corpus", tokenizer)


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 5000), (np.int32, -4)])
def test_ids_that_the_tokenizer_does_not_have_are_refused(dtype, token, oracle, tmp_path, tokenizer, monkeypatch):
    documents = [*DOCUMENTS[:300], [token] * 3, *DOCUMENTS[300:]]
    prefix = build(oracle, tmp_path / "corpus", documents, dtype)
    place = sum(map(len, DOCUMENTS[:300]))
    with pytest.raises(DataError, match=rf"corpus.bin: token {place:,} is {token}"):
        opened(prefix, tokenizer)
    # Of a large dataset only some blocks are read when it is opened; batches are checked as they are read.
    monkeypatch.setattr("toolkit.data.megatron.corpus._COUNTED_AT_ONCE", 8)
    monkeypatch.setattr("toolkit.data.megatron.corpus._COUNTED_TOKENS", 64)
    data = section(prefix, tokenizer)
    samples = open_samples(prepare(data, progress=False), data, split="train", seed=5, global_batch_size=4)
    with pytest.raises(DataError, match="have ids that the tokenizer does not"):
        samples.batch(0, range(len(samples)))


def test_our_codes_are_theirs(oracle):
    theirs = {kind.value: np.dtype(kind.name) for kind in oracle.DType if kind.name not in ("float32", "float64")}
    assert {code: np.dtype(name) for code, name in DTYPES.items()} == theirs
