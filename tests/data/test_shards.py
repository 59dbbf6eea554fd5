"""A corpus that is tokenized in shards, or by processes that are killed, becomes the cache that one process makes."""

import gzip
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from filelock import FileLock
from refusals import refused

from toolkit.cli.main import main
from toolkit.cli.tokenize import command
from toolkit.config import dump_recipe
from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.documents.part import SourcePart
from toolkit.data.tokens import shard as shard_files
from toolkit.data.tokens import token_cache
from toolkit.data.tokens.shard import TokenShard
from toolkit.data.tokens.shards import make_shard, merge_shards
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError, ToolkitError

TEXTS = [f"document {n}: " + f"word{n % 7} ünd {n * n} more\n" * (n % 40) for n in range(150)] + ["", "last"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(sources, "PART_BYTES", 700)
    monkeypatch.setattr(shard_files, "_COMMIT_TOKENS", 300)
    monkeypatch.setattr(shard_files, "BLOCK_TOKENS", 777)


def write_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(LINES.splitlines(True)[:100]))
    (folder / "b.jsonl").write_text("".join(LINES.splitlines(True)[100:]))


def write_compressed(folder: Path) -> None:
    for number, start in enumerate(range(0, len(TEXTS), 40)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[start : start + 40])
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def write_parquet(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet", row_group_size=20)


def write_text(folder: Path) -> None:
    """One document that is longer than most parts, and many short ones."""
    (folder / "long.txt").write_text("a line of text\n" * 2000)
    for number, text in enumerate(TEXTS[:60]):
        (folder / f"{number:03}.md").write_text(text)


KINDS = {"jsonl": write_jsonl, "compressed": write_compressed, "parquet": write_parquet, "text": write_text}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text")
    return tmp_path


def section(folder: Path, cache: str = "cache", **fields: Any) -> DataSection:
    defaults = {"tokenizer": "bpe-300", "workers": 1, "seq_len": 8, "eval_fraction": 0.2}
    return DataSection(source=str(folder / "text"), cache_dir=str(folder / cache), **{**defaults, **fields})


def content(corpus: TokenCorpus) -> dict[str, bytes]:
    found = {
        path.relative_to(corpus.path).as_posix(): path.read_bytes() for path in corpus.path.rglob("*") if path.is_file()
    }
    assert {"train.bin", "eval.bin", "meta.json", "tokenizer/tokenizer.json"} <= set(found)
    return found


def shard(data: DataSection, text: str, place: str | None = None) -> TokenShard | TokenCorpus:
    return make_shard(data, SourcePart.parse(text), folder=place, progress=False)


def reference(folder: Path, **fields: Any) -> TokenCorpus:
    return prepare(section(folder, "reference", **fields), progress=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 7])
def test_the_last_shard_makes_the_cache_of_one_process(kind: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    KINDS[kind](tmp_path / "text")
    parts = [f"{number}/{count}" for number in range(1, count + 1)]
    random.Random(count).shuffle(parts)
    made = [shard(section(tmp_path), part) for part in parts]
    assert [isinstance(one, TokenCorpus) for one in made] == [False] * (count - 1) + [True]
    assert sum(isinstance(one, TokenShard) and one.counts.tokens > 0 for one in made) >= min(count, 4) - 1
    assert content(made[-1]) == content(reference(tmp_path))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [made[-1].path.name]


def test_shards_elsewhere_wait_for_the_merge_and_stay(folder: Path) -> None:
    place = str(folder / "elsewhere")
    made = [shard(section(folder, cache), f"{n}/3", place) for n, cache in ((1, "a"), (2, "b"), (3, "c"))]
    assert all(isinstance(one, TokenShard) for one in made)
    assert content(merge_shards(section(folder), folder=place)) == content(reference(folder))
    assert all(Path(one.place).is_dir() for one in made)


def test_a_shard_that_is_complete_is_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(section(folder), "1/2")
    monkeypatch.setattr(shard_files, "encode_chunks", lambda *_: pytest.fail("tokenized again"))
    assert isinstance(shard(section(folder), "1/2"), TokenShard)


def test_validation_fraction_and_length_of_samples_are_decided_at_the_merge(folder: Path) -> None:
    for number, seq_len in ((1, 8), (2, 16)):
        shard(section(folder, eval_fraction=0.3, seq_len=seq_len), f"{number}/2", str(folder / "s"))
    merged = merge_shards(section(folder, eval_fraction=0.0), folder=str(folder / "s"))
    assert content(merged) == content(reference(folder, eval_fraction=0.0))


def in_a_killed_process(event: int, run: Callable[[], object]) -> bool:
    """Run it in a process that kills itself at some event; return whether it was killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        shard_files._Files.add = counted(shard_files._Files.add)
        os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
        os.truncate = counted(os.truncate)
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(("seed", "count"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.daily), (2, 1), (3, 3)])
def test_processes_that_are_killed_anywhere_lose_nothing(seed: int, count: int, tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "text").mkdir()
    write_text(folder / "text")
    chance = random.Random(seed * 10 + count)

    def build() -> TokenCorpus:
        if count == 1:
            return prepare(section(folder), progress=False)
        made = [shard(section(folder), f"{number}/{count}") for number in range(1, count + 1)]
        assert isinstance(made[-1], TokenCorpus)
        return made[-1]

    kills = sum(in_a_killed_process(chance.randint(1, 90), build) for _ in range(4))
    assert kills
    assert content(build()) == content(reference(folder))
    assert len(list((folder / "cache").iterdir())) == 1


def test_a_shard_that_was_interrupted_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = shard_files.encode_chunks

    def interrupted(chunks: Iterator[Any], *rest: Any) -> Iterator[Any]:
        for number, chunk in enumerate(encode(chunks, *rest)):
            if number == 9:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(shard_files, "encode_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard(section(folder), "2/2")
    (progress,) = (folder / "cache").rglob("progress.json")
    kept = json.loads(progress.read_text())["progress"]["chunks"]
    assert 5 <= kept <= 9
    numbers = []
    monkeypatch.setattr(shard_files, "encode_chunks", lambda *a: (numbers.append(c) or c for c in encode(*a)))
    made = shard(section(folder), "2/2")
    assert isinstance(made, TokenShard)
    assert len(numbers) == made.counts.chunks - kept


def problem(run: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_shards_are_named(folder: Path) -> None:
    assert "there are no shards" in problem(lambda: merge_shards(section(folder), folder=None))
    for number in (1, 4):
        shard(section(folder), f"{number}/4")
    assert "missing: 2/4, 3/4" in problem(lambda: merge_shards(section(folder), folder=None))
    shard(section(folder), "1/2")
    assert "shards of 2 and 4 parts" in problem(lambda: merge_shards(section(folder), folder=None))
    assert not list((folder / "cache").glob("*.lock"))


def test_shards_of_another_state_of_the_source_are_refused(folder: Path) -> None:
    shard(section(folder), "1/2", str(folder / "s"))
    (folder / "text/c.jsonl").write_text(LINES)
    shard(section(folder), "2/2", str(folder / "s"))
    assert "shard 2/2 has another source than" in problem(
        lambda: merge_shards(section(folder), folder=str(folder / "s"))
    )
    shard(section(folder), "1/2", str(folder / "s"))  # replaces the old one
    (folder / "text/c.jsonl").unlink()
    with refused(DataError, "data.source"):
        merge_shards(section(folder), folder=str(folder / "s"))


def test_shards_of_another_tokenizer_are_refused(folder: Path) -> None:
    reference(folder).tokenizer().save_pretrained(folder / "tokenizer")
    data = section(folder, tokenizer=str(folder / "tokenizer"))
    shard(data, "1/2", str(folder / "s"))
    other = reference(folder, tokenizer="bpe-301").tokenizer_dir
    shutil.copytree(other, folder / "tokenizer", dirs_exist_ok=True)
    shard(data, "2/2", str(folder / "s"))
    assert "shard 2/2 has another tokenizer than" in problem(lambda: merge_shards(data, folder=str(folder / "s")))
    shard(data, "1/2", str(folder / "s"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "x"}')
    with refused(DataError, "data.tokenizer"):
        merge_shards(data, folder=str(folder / "s"))


@pytest.mark.parametrize("name", ["ids.bin", "lengths.bin", "manifest.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:40] + b"x" + data[41:]])
def test_a_damaged_shard_is_named_and_leaves_nothing(name: str, damage: Callable[[bytes], bytes], folder: Path) -> None:
    made = [shard(section(folder), f"{number}/2", str(folder / "s")) for number in (1, 2)]
    file = Path(made[0].place) / name
    file.write_bytes(damage(file.read_bytes()))
    assert "00001-of-00002" in problem(lambda: merge_shards(section(folder), folder=str(folder / "s")))
    caches = [path for path in (folder / "cache").iterdir() if not path.name.endswith(".shards")]
    assert not caches


def test_a_shard_whose_text_is_refused_leaves_nothing_half_written(folder: Path) -> None:
    reference(folder).tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "text/b.jsonl").write_text(LINES + "{broken\n")
    data = section(folder, tokenizer=str(folder / "tokenizer"))
    assert "b.jsonl:153: not a JSON object" in problem(lambda: shard(data, "2/2"))
    assert not [path for path in (folder / "cache").rglob("*") if path.is_file()]


def test_a_second_process_waits_for_the_one_that_makes_the_shard(
    folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_SILENT_SECONDS", 0.2)
    data = section(folder)
    place = Path(shard(data, "1/2").place)
    with FileLock(place.parent.with_name(f"{place.parent.name}.{place.name}.lock")):
        waiting = threading.Thread(
            target=make_shard, args=(data, SourcePart.parse("1/2")), kwargs={"folder": None, "progress": True}
        )
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert "00001-of-00002: waiting for it" in capfd.readouterr().err


@pytest.fixture
def recipe(make_recipe: Callable[..., Any], folder: Path) -> str:
    data = {f"data__{key}": value for key, value in section(folder).model_dump().items() if value is not None}
    (folder / "r.yaml").write_text(dump_recipe(make_recipe(**data)))
    return str(folder / "r.yaml")


def test_the_command_makes_shards_and_merges_them(recipe: str, folder: Path) -> None:
    def run(*options: str) -> str:
        result = CliRunner().invoke(command, [recipe, *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    where = ("--shards", str(folder / "s"))
    assert run("--shard", "1/2", *where).startswith("shard 1/2: ")
    assert run("--shard", "2/2", *where).startswith("shard 2/2: ")
    merged = run("--merge", *where)
    assert merged.startswith("151 documents, ")
    assert run() == merged == run("--shard", "1/2") == run("--merge")


@pytest.mark.parametrize(
    "options",
    [
        *(("--shard", text) for text in ("0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2", "1.5/4", "", "1/999999")),
        ("--shard", "1/2", "--merge"),
        ("--shards", "x"),
        ("--merge",),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    options: tuple[str, ...], recipe: str, folder: Path, capfd: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", recipe, *options])
    assert ended.value.code == ToolkitError.exit_code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not (folder / "cache").exists() or not list((folder / "cache").iterdir())
