"""The token cache equals tokenizing one document after the other, and is built once and atomically."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.documents.part import WHOLE
from toolkit.data.documents.sources import open_source
from toolkit.data.documents.text_chunks import LoadedTexts
from toolkit.data.tokens.build_cache import document_ends
from toolkit.data.tokens.shard import Progress, TokenShard, _Files
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.data.tokens.tokenizer_pool import EncodedChunk, TokenizerJob, TokenizerPool
from toolkit.errors import DataError, RunError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 2000)


@pytest.fixture
def text(tmp_path):
    """120 documents, two of them empty."""
    path = tmp_path / "text.jsonl"
    documents = [f"document {n}: " + f"word{n % 7} ünd {n * n} more\n" * (n % 60) for n in range(118)] + ["", ""]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def section(text: object, **fields: object) -> DataSection:
    defaults = {"tokenizer": "bpe-300", "workers": 1, "cache_dir": str(Path(str(text)).parent / "cache"), "seq_len": 8}
    return DataSection(source=str(text), **{**defaults, **fields})


def built(text: object, **fields: object) -> TokenCorpus:
    return prepare(section(text, **fields), progress=False)


def content(corpus: TokenCorpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.path.rglob("*") if path.is_file()}


def one_by_one(text: object, corpus: TokenCorpus) -> list[list[int]]:
    tokenizer = corpus.tokenizer()
    documents = [json.loads(line)["text"] for line in Path(str(text)).read_text().splitlines()]
    ids = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in documents if document]
    return [[*document, tokenizer.eos_token_id] for document in ids]


def test_the_stream_is_each_document_tokenized_alone_and_its_end_of_text(text):
    corpus = built(text, eval_fraction=0.0)
    assert corpus.tokens("train").tolist() == list(chain.from_iterable(one_by_one(text, corpus)))


def test_document_offsets_split_the_stream_into_its_documents(text):
    corpus = built(text, eval_fraction=0.0)
    offsets = corpus.document_offsets("train")
    stream = corpus.tokens("train").tolist()
    documents = [stream[start:end] for start, end in pairwise(offsets)]
    assert documents == one_by_one(text, corpus)


def test_train_and_held_out_documents_together_are_all_documents(text):
    corpus = built(text, eval_fraction=0.2)
    parts = [
        corpus.tokens(split)[start:end].tolist()
        for split in ("train", "eval")
        for start, end in pairwise(corpus.document_offsets(split))
    ]
    assert sorted(parts) == sorted(one_by_one(text, corpus))


def test_the_number_of_workers_changes_no_byte(text, tmp_path):
    one = built(text, workers=1, cache_dir=str(tmp_path / "1"))
    assert content(one) == content(built(text, workers=3, cache_dir=str(tmp_path / "3")))


def test_a_text_in_parts_has_one_end_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 300)
    (tmp_path / "long.txt").write_text("a line of text\n" * 200)
    corpus = built(tmp_path / "long.txt", eval_fraction=0.0)
    whole = corpus.tokenizer()("a line of text\n" * 200, verbose=False)["input_ids"]
    assert corpus.tokens("train").tolist() == [*whole, corpus.eos_id]
    assert corpus.document_offsets("train").tolist() == [0, len(whole) + 1]


def test_parts_of_documents_are_added_up_across_pieces(tmp_path):
    def chunk(*lengths: int, continues: bool) -> EncodedChunk:
        array = np.array(lengths, dtype=np.int64)
        return EncodedChunk(ids=b"", lengths=array, text_bytes=0, continues=continues, size_bytes=0)

    chunks = [chunk(3, continues=True), chunk(2, continues=True), chunk(4, 5, continues=False), chunk(continues=False)]
    for place in range(len(chunks) + 1):
        shards = [
            made_shard(tmp_path / f"{place}-{n}", part) for n, part in enumerate((chunks[:place], chunks[place:]))
        ]
        assert document_ends(shards).tolist() == [9, 14]


def made_shard(folder: Path, chunks: list[EncodedChunk]) -> TokenShard:
    folder.mkdir()
    done = Progress()
    with _Files(folder, done) as files:
        for chunk in chunks:
            files.add(dataclasses.replace(chunk, lengths=chunk.lengths.copy()))
    (folder / "manifest.json").write_text(
        json.dumps({"part": "1/1", "of": {"encoding": {"dtype": "<u2"}}, "progress": dataclasses.asdict(done)})
    )
    return TokenShard(str(folder), WHOLE)


def test_unigram_entropy_is_that_of_the_training_tokens(text):
    corpus = built(text, eval_fraction=0.3)
    counts = Counter(corpus.tokens("train").tolist())
    direct = -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
    assert corpus.unigram_entropy == pytest.approx(direct, rel=1e-12)


def test_counts_are_those_of_the_files(text):
    corpus = built(text, eval_fraction=0.25)  # enough documents that whole ones are held out
    sizes = [len(corpus.tokens(split)) for split in ("train", "eval")]
    assert [corpus.train_tokens, corpus.eval_tokens] == sizes
    assert corpus.train_documents + corpus.eval_documents == 118
    assert corpus.text_bytes == sum(len(json.loads(line)["text"].encode()) for line in text.read_text().splitlines())


@pytest.mark.parametrize(("last_id", "dtype"), [(65_535, "<u2"), (65_536, "<u4")])
def test_ids_take_two_bytes_if_they_fit(last_id, dtype, text, tmp_path):
    folder = built(text).tokenizer_dir
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": last_id, "content": "<|far|>"})
    spec["model"]["vocab"]["<|far|>"] = last_id
    (tmp_path / "far").mkdir()
    (tmp_path / "far/tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "far/tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    text.write_text(text.read_text() + '{"text": "so <|far|>"}\n')
    corpus = built(text, tokenizer=str(tmp_path / "far"), eval_fraction=0.0)
    assert (corpus.dtype, corpus.tokenizer_vocab_size, corpus.tokens("train")[-2]) == (dtype, last_id + 1, last_id)


def test_seq_len_packing_and_workers_share_a_cache(text):
    assert built(text).path == built(text, seq_len=99, packing="padded", workers=2).path


def test_each_input_of_the_tokens_has_its_own_cache(text, tmp_path):
    built(text).tokenizer().save_pretrained(tmp_path / "saved")
    paths = {built(text).path, built(text, eval_fraction=0.1).path, built(text, tokenizer="bpe-301").path}
    paths.add(built(text, tokenizer=str(tmp_path / "saved")).path)
    text.write_text(text.read_text() * 2)
    paths.add(built(text).path)
    assert len(paths) == 5


def test_the_environment_names_the_cache_directory(text, tmp_path, monkeypatch):
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path / "elsewhere"))
    assert built(text, cache_dir=None).path.parent == tmp_path / "elsewhere"


def test_a_second_call_reads_no_text(text, monkeypatch):
    first = built(text)
    monkeypatch.setattr(sources.FileSource, "chunks", lambda self: pytest.fail("read again"))
    assert built(text) == first


@pytest.fixture
def tokenizer_dir(text, tmp_path):
    """An existing tokenizer, so that building does not begin by reading the text."""
    return str(built(text, cache_dir=str(tmp_path / "other")).tokenizer_dir)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_build_leaves_no_directory(workers, text, tokenizer_dir):
    text.write_text(text.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"text\.jsonl:121: not a JSON object"):
        built(text, tokenizer=tokenizer_dir, workers=workers)
    assert not [path for path in (text.parent / "cache").iterdir() if path.is_dir()]


def test_a_corpus_of_empty_documents_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with refused(DataError, "data.source"):
        built(tmp_path / "a.jsonl")


def test_a_corpus_too_small_to_hold_out_from_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with refused(DataError, "data.eval_fraction", "data.source", remedy=("data.eval_fraction", 0)):
        built(tmp_path / "a.txt")


def test_a_source_that_changes_during_the_build_is_refused(text, monkeypatch):
    prints = iter("abc")
    monkeypatch.setattr(
        "toolkit.data.tokens.token_cache.open_source", lambda section: Changing(open_source(section), next(prints))
    )
    with refused(DataError, "data.source"):
        built(text)


class Changing:
    def __init__(self, source: sources.Source, fingerprint: str) -> None:
        self.chunks, self.size_bytes, self.fingerprint = source.chunks, source.size_bytes, fingerprint
        self.entropy_rate = source.entropy_rate


@pytest.mark.parametrize("name", ["train.bin", "meta.json", "eval_documents.npy"])
def test_a_damaged_cache_says_what_to_delete(name, text):
    folder = built(text).path
    (folder / name).write_bytes((folder / name).read_bytes()[:-2])
    with pytest.raises(DataError, match=f"Delete {folder}"):
        built(text)


def test_a_cache_with_json_nested_too_deeply_says_what_to_delete(text):
    folder = built(text).path
    (folder / "meta.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=f"Delete {folder}"):
        built(text)


def test_a_cache_with_a_pipe_is_not_read(text):
    folder = built(text).path
    (folder / "train.bin").unlink()
    os.mkfifo(folder / "train.bin")
    with pytest.raises(DataError, match=r"train.bin is not a regular file"):
        built(text)


def test_a_cache_with_a_damaged_tokenizer_says_what_to_delete(text):
    corpus = built(text)
    (corpus.tokenizer_dir / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=f"Delete {corpus.path}"):
        corpus.tokenizer()


def test_a_cache_directory_that_cannot_be_written_is_named(text, tmp_path):
    (tmp_path / "file").touch()
    with refused(DataError, "data.cache_dir"):
        built(text, cache_dir=str(tmp_path / "file"))


def test_a_worker_that_dies_is_reported(tmp_path):
    built_corpus = built(write_text(tmp_path))
    job = TokenizerJob(
        tokenizer_dir=str(built_corpus.tokenizer_dir), split_special_tokens=False, eos_id=0, dtype="<u2", vocab_size=300
    )
    with TokenizerPool(job, 2) as pool:
        results = pool.encode(LoadedTexts(texts=("x",), size_bytes=1) for _ in range(99))
        next(results)
        for process in pool._workers.values():
            process.kill()
        with pytest.raises(RunError, match="was killed by signal 9"):
            list(results)


def test_a_worker_that_has_just_started_leaves_signals_to_its_parent(tmp_path):
    built_corpus = built(write_text(tmp_path))
    job = TokenizerJob(
        tokenizer_dir=str(built_corpus.tokenizer_dir), split_special_tokens=False, eos_id=0, dtype="<u2", vocab_size=300
    )
    start = TokenizerPool._start

    class Interrupted(TokenizerPool):
        def _start(self):
            pipe = start(self)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._workers[pipe].send_signal(number)
            return pipe

    with Interrupted(job, 2) as pool:
        assert len(list(pool.encode(LoadedTexts(texts=("x",), size_bytes=1) for _ in range(9)))) == 9
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def write_text(folder: Path) -> Path:
    (folder / "a.txt").write_text("some words here\n" * 3000)
    return folder / "a.txt"


# A process that builds, records that it does, and takes some seconds for each chunk.
BUILDER = """
import sys, time
from pathlib import Path
from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.documents.part import WHOLE
from toolkit.data.tokens import shard, token_cache
sources.text_chunks.CHUNK_BYTES = 2000
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
original = shard.encode_chunks
def slow(chunks, job, workers):
    with (folder / "builds").open("a") as file: file.write("x")
    for encoded in original(chunks, job, workers):
        (folder / "building").touch()
        time.sleep(seconds)
        yield encoded
shard.encode_chunks = slow
section = DataSection(
    source=str(folder / "text.jsonl"), tokenizer=sys.argv[3], seq_len=8, workers=2, cache_dir=str(folder / "cache")
)
print(token_cache.prepare(section, progress=False).path)
"""


def start_builder(folder: Path, seconds: float, tokenizer: str = "bpe-300") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", BUILDER, str(folder), str(seconds), tokenizer]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in 60 s"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_processes_that_start_at_once_build_once(text, tmp_path):
    outputs = [process.communicate() for process in [start_builder(tmp_path, 0.02) for _ in range(3)]]
    assert len({path for path, _ in outputs}) == 1, outputs
    assert (tmp_path / "builds").read_text() == "x"
    assert not list(tmp_path.rglob("*.lock"))


def test_a_build_leaves_no_lock_and_no_old_failure(text):
    cache = built(text).path.parent
    (cache / "old.failed").write_text("a reason")
    (cache / "new.failed").write_text("a reason that a rank may still wait for")
    os.utime(cache / "old.failed", (time.time() - 4000,) * 2)
    path = built(text, tokenizer="bpe-301").path
    assert {entry.name for entry in cache.iterdir() if not entry.is_dir()} == {"new.failed"}
    assert path.parent == cache


def test_a_failed_build_leaves_no_lock(text, tokenizer_dir):
    text.write_text(text.read_text() + "{broken\n")
    with pytest.raises(DataError):
        built(text, tokenizer=tokenizer_dir)
    assert [path.suffix for path in (text.parent / "cache").iterdir()] == [".failed"]


def test_processes_write_nothing_to_stderr(text, tmp_path):
    assert start_builder(tmp_path, 0).communicate()[1] == ""


@pytest.mark.parametrize("skew", [-3600, 0, 3600])
def test_only_a_process_that_waited_for_a_failed_builder_fails_with_it(skew, text, monkeypatch):
    """The builder is on a host whose clock is wrong by `skew` seconds."""

    class HeldLock:
        """A lock that is held by a builder which fails."""

        fails = True

        def __init__(self, path: str, **options: object) -> None:
            self.failure = Path(path).with_suffix(".failed")

        def release(self) -> None: ...

        def acquire(self, timeout: float) -> None:
            if self.fails:
                self.failure.write_text("as before")
                os.utime(self.failure, (time.time() + skew,) * 2)

    monkeypatch.setattr("toolkit.data.tokens.token_cache.FileLock", HeldLock)
    with pytest.raises(DataError, match="as before"):
        built(text)
    HeldLock.fails = False
    built(text)


def test_a_builder_that_fails_leaves_its_reason_for_waiting_processes(text, tokenizer_dir):
    text.write_text(text.read_text() + "{broken\n")
    with pytest.raises(DataError) as caught:
        built(text, tokenizer=tokenizer_dir)
    (failure,) = (text.parent / "cache").glob("*.failed")
    assert failure.read_text() == str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_builder_leaves_no_worker_and_the_next_one_takes_over(text, tmp_path):
    builder = start_builder(tmp_path, 60)
    until((tmp_path / "building").exists)
    workers = children(builder.pid)
    assert workers
    builder.kill()
    builder.communicate()
    until(lambda: not any(map(alive, workers)))
    assert list((tmp_path / "cache").glob(".*.partial"))

    corpus = built(text)
    reference = built(text, cache_dir=str(tmp_path / "reference"))
    assert content(corpus) == content(reference)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [corpus.path.name]


def test_the_import_needs_no_torch():
    modules = "toolkit.data.tokens.token_cache, toolkit.data.tokens.tokenizer_pool"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0
