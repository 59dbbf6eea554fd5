"""Sources return the same documents in the same order from every format; errors are one line."""

import errno
import gzip
import json
import os
import sysconfig
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from refusals import refused

from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources, text_chunks
from toolkit.data.documents.part import SourcePart
from toolkit.data.documents.rows import RowReader
from toolkit.data.documents.sources import open_source
from toolkit.data.documents.text_chunks import JsonlRange, TextRange, line_blocks, split_offsets
from toolkit.errors import DataError

TEXTS = ["first line\nsecond", "", "ünï¢ödé 漢字 \U0001f600", "\r\n tabs\tand spaces  ", "last"] * 40
LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS))


def section(source: object, **fields: object) -> DataSection:
    return DataSection(source=str(source), seq_len=8, **fields)


def read(source: object, **fields: object) -> list[str]:
    return [text for chunk in open_source(section(source, **fields)).chunks() for text in chunk.documents() if text]


def message(source: object, **fields: object) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRITERS = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "a.json-lines": lambda path: path.write_text(LINES),
    "a.json": lambda path: path.write_text(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES.encode())),
    "a.json.gz": lambda path: path.write_bytes(
        gzip.compress(LINES[:999].encode()) + gzip.compress(LINES[999:].encode())
    ),
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=7),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_structured_format_returns_its_documents(name, tmp_path):
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == [text for text in TEXTS if text]


def test_text_files_are_one_document_each_in_sorted_order(tmp_path):
    for name, text in {
        "b.txt": "two",
        "a/z.md": "one",
        "c.py": "three\r\n",
        "skip.bin": "\0",
        ".hidden.txt": "x",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert read(tmp_path) == ["one", "two", "three\r\n"]


def test_a_readme_beside_structured_files_is_not_part_of_the_corpus(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert read(tmp_path) == ["x"]


def test_a_glob_spans_directories(tmp_path):
    for name in ("a/1.txt", "b/c/2.txt", "b/3.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "**/*.txt") == ["a/1.txt", "b/c/2.txt"]


def test_a_saved_dataset_returns_its_rows(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", text_field="body") == [text for text in TEXTS if text]


def test_a_saved_dataset_dict_returns_the_chosen_split(tmp_path):
    import datasets

    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", split="test") == ["test"]


def test_an_unknown_split_of_a_saved_dataset_names_the_splits(tmp_path):
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(tmp_path / "saved")
    with refused(DataError, "data.split", "data.source", remedy=("data.split", "train")):
        read(tmp_path / "saved", split="dev")


def test_a_dataset_name_goes_to_load_dataset_with_subset_and_split(monkeypatch):
    import datasets

    asked = []
    dataset = datasets.Dataset.from_dict({"text": ["x"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or dataset)
    assert read("org/name", subset="en", split="dev") == ["x"]
    assert asked == [(("org/name", "en"), {"split": "dev"})]


def test_the_first_rows_of_a_dataset_are_streamed(monkeypatch):
    import datasets

    read_rows = []

    def rows():
        for number in range(1000):
            read_rows.append(number)
            yield {"text": f"text {number}", "other": 1}

    asked = []
    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or stream)
    texts = [f"text {number}" for number in range(150)]
    assert read("org/name", stream_rows=150) == texts
    assert asked == [(("org/name", None), {"split": "train", "streaming": True})]
    assert max(read_rows) < 160  # what is beyond them is not downloaded
    source = open_source(section("org/name", stream_rows=150))
    monkeypatch.setattr(text_chunks, "CHUNK_BYTES", 500)
    parts = [SourcePart(number=number, count=3) for number in (1, 2, 3)]
    shared = [[text for chunk in source.chunks(part) for text in chunk.documents()] for part in parts]
    assert [text for part in shared for text in part] == texts
    assert all(shared)
    assert source.fingerprint != open_source(section("org/name", stream_rows=151)).fingerprint


def test_a_dataset_that_cannot_be_loaded_is_one_line(monkeypatch):
    import datasets

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with refused(DataError, "data.source"):
        read("org/name")


def test_the_standard_library_is_read_without_installed_packages():
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        Path(path) for chunk in open_source(section("stdlib")).chunks() for path in getattr(chunk, "paths", [chunk])
    ]
    names = [file.relative_to(root).as_posix() for file in files if isinstance(file, Path)]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)


def test_the_fingerprint_follows_size_time_and_name(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    prints = [open_source(section(tmp_path)).fingerprint]
    file.write_text("three")
    prints.append(open_source(section(tmp_path)).fingerprint)
    (tmp_path / "b.txt").touch()
    prints.append(open_source(section(tmp_path)).fingerprint)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    prints.append(open_source(section(tmp_path)).fingerprint)
    assert len(set(prints)) == 4


def test_the_fingerprint_of_unchanged_files_is_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert open_source(section(tmp_path)).fingerprint == open_source(section(tmp_path)).fingerprint


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_json_ranges_of_any_size_return_each_line_once(step, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    starts = range(0, len(LINES), step)
    chunks = [JsonlRange(path=str(path), start=start, size_bytes=step, rows=RowReader()) for start in starts]
    assert [text for chunk in chunks for text in chunk.documents()] == [text for text in TEXTS if text]


@pytest.mark.parametrize("part_bytes", [1, 5, 100, 10_000])
def test_parts_of_a_long_text_join_to_the_text(part_bytes, tmp_path):
    text = "".join(TEXTS)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    ranges = pairwise(split_offsets(str(path), path.stat().st_size, part_bytes))
    parts = [TextRange(path=str(path), start=a, size_bytes=b - a, continues=True) for a, b in ranges]
    assert "".join(part for chunk in parts for part in chunk.documents()) == text


def test_a_long_text_file_is_one_document_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 50)
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    assert [chunk.continues for chunk in open_source(section(tmp_path)).chunks()][-2:] == [True, False]


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_blocks_of_a_compressed_file_count_their_lines(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(text_chunks, "_READ_BYTES", 16)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode()))
    blocks = list(line_blocks(str(path), block_bytes))
    assert [number for number, _, _ in blocks] == [
        1 + b"".join(data for _, data, _ in blocks[:i]).count(b"\n") for i in range(len(blocks))
    ]


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "nowhere.jsonl"])
def test_a_missing_path_is_named(source):
    with refused(DataError, "data.source") as found:
        read(source)
    assert found[0].settings == (("data.source", source),)


def test_a_glob_without_matches_is_named(tmp_path):
    with refused(DataError, "data.source"):
        read(tmp_path / "*.txt")


def test_a_directory_without_text_names_the_accepted_files(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\0")
    with refused(DataError, "data.source") as found:
        read(tmp_path)
    assert ".jsonl[.gz|.zst]" in found[0].remedy[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_missing_text_column_names_the_columns(name, tmp_path):
    WRITERS[name](tmp_path / name)
    with refused(DataError, "data.text_field") as found:
        read(tmp_path / name, text_field="body")
    ((field, columns),) = found[0].remedy
    assert (field, columns.split(" or ")[-1]) == ("data.text_field", "text")


def test_a_missing_column_of_a_saved_dataset_names_the_columns(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"body": ["x"]}).save_to_disk(tmp_path / "saved")
    with refused(DataError, "data.text_field", remedy=("data.text_field", "body")):
        read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "a.jsonl:3: not a JSON object ("),
        (b"[1]", "a.jsonl:3: a JSON list"),
        (b'{"text": 5}', "data.text_field=text: it is an int at "),
        (b'{"text": "\xff"}', "a.jsonl:3: not UTF-8"),
        (b'{"text": "\\ud800"}', "a.jsonl:3: text has half a surrogate pair"),
    ],
)
def test_a_bad_json_line_is_named_by_file_and_line(line, problem, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    assert problem in message(tmp_path / "a.jsonl")


def test_a_bad_line_in_a_late_range_has_its_line_number(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 64)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 500 + "{broken\n")
    assert "a.jsonl:501:" in message(tmp_path / "a.jsonl")


def test_a_bad_line_in_a_compressed_file_has_its_line_number(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 500 + b"{broken\n"))
    assert "a.jsonl.gz:501:" in message(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"no archive" + data])
def test_a_damaged_archive_is_named(name, damage, tmp_path):
    WRITERS[name](tmp_path / name)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    assert f"{name}: damaged or truncated" in message(tmp_path / name)


def test_text_that_is_not_utf8_is_named_by_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine \xff")
    assert "a.txt: byte 5 is not UTF-8" in message(tmp_path / "a.txt")


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "a.parquet: not a readable Parquet file" in message(tmp_path / "a.parquet")


def test_a_compressed_text_file_is_named_with_what_is_read_compressed(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    said = message(tmp_path / "a.txt.gz")
    assert "a.txt.gz: compressed text is read as .jsonl.gz or .jsonl.zst only. Decompress the file" in said


@pytest.mark.parametrize("content", [b"\x7fELF\0\0\0", "ascii".encode("utf-16-le")], ids=["binary", "UTF-16"])
def test_a_text_file_with_many_nul_bytes_is_named(content, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    count = content.count(0)
    said = message(tmp_path / "a.txt")
    assert f"a.txt: {count} of {len(content)} bytes are NUL, as in UTF-16 or a binary file. Convert the file" in said


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\xef\xbb\xbf")
    assert read(tmp_path / "a.txt") == ["one\ufeff"]


def test_a_read_that_the_operating_system_refuses_names_the_file(tmp_path):
    assert "/proc/self/mem: Input/output error. Check data.source" in message("/proc/self/mem")


@pytest.mark.parametrize("source", ["", "*.jsonl"])
def test_a_link_to_nothing_is_refused_and_not_left_out(source, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.jsonl").symlink_to("blobs/gone")
    (tmp_path / "notes.bin").symlink_to("gone")
    assert "b.jsonl: a link to a file that is not there" in message(tmp_path / source)


def test_a_folder_that_cannot_be_read_is_refused_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scandir = os.scandir

    def refuse(folder):
        if os.path.basename(folder) == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "closed: Permission denied. Check data.source and the file's permissions." in message(tmp_path)


def test_links_to_folders_are_followed_once(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("one")
    (tmp_path / "elsewhere" / "loop").symlink_to("..")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "twice").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "corpus") == ["one"]
