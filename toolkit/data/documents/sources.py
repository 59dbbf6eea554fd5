"""Sources: where documents come from, in a fixed order, as chunks for tokenizer workers.

data.source                                       meaning
stdlib                                            the running Python's standard library, one document per .py file
markov                                            a Markov chain over letters, whose entropy rate is known
corpus.txt, notes.md, …                           text: one document per file
crawl.jsonl, crawl.jsonl.gz, crawl.jsonl.zst      one JSON object per line, its text in data.text_field
crawl.parquet, crawl.arrow                        one document per row
a directory                                       all such files below it, also behind links to directories (text only
                                                  if there is no JSONL or Parquet)
crawl/*.jsonl, **/*.txt                           a glob
s3://bucket/crawl/*.jsonl.zst, https://…          the same behind a URL
a directory of Dataset.save_to_disk              its rows
(the prefix of a dataset of Megatron-LM is opened by toolkit.data.megatron)
anything else                                     datasets.load_dataset(source, subset, split=split), or with
                                                  data.stream_rows its first rows in streaming mode
"""

import glob
import hashlib
import itertools
import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol

from toolkit.config.data_section import DataSection
from toolkit.config.recipe_rules import JSON_SUFFIXES, PARQUET_SUFFIXES
from toolkit.data.documents import remote, text_chunks
from toolkit.data.documents.markov import EntropyRate, MarkovSource
from toolkit.data.documents.part import WHOLE, SourcePart
from toolkit.data.documents.remote import SourceFile
from toolkit.data.documents.rows import Document, RowReader
from toolkit.data.documents.text_chunks import open_file
from toolkit.errors import DataError
from toolkit.files import expanded, reason_of
from toolkit.remote_files import is_url, without_query

_SOURCE = "data.source"
# Longer text files are tokenized in parts, so that a worker's memory does not depend on the length of a file.
PART_BYTES = 2 << 20

_TEXT = """
.txt .text .md .markdown .rst .tex .html .css .xml .csv .tsv .yaml .yml .toml .ini .cfg
.py .pyi .c .h .cc .cpp .hpp .rs .go .java .js .ts .sh .sql .jl .r .rb .lua .hs .scala .kt .swift
"""
TEXT_SUFFIXES = frozenset(_TEXT.split())
_SKIPPED_FOLDERS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "__pycache__"),
)


class Source(Protocol):
    """Documents in a fixed order."""

    fingerprint: str
    """Changes when the documents may have changed."""
    size_bytes: int
    """The approximate size, in the unit of `TextChunk.size_bytes`."""
    entropy_rate: EntropyRate | None
    """The entropy rate of the tokens, if known."""

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[text_chunks.TextChunk]:
        """Yield the documents of a part, in order. Raises DataError for what cannot be read.

        The parts together have the chunks of the whole; a long text may begin in one part and end in another.
        """


def open_source(section: DataSection) -> Source:
    """Open the source that `section.source` names. Raises DataError if there is none or it is empty."""
    name = section.source
    if name == "stdlib":
        return FileSource.stdlib()
    if name == "markov":
        return MarkovSource()
    if is_url(name):
        return FileSource.behind(name, section)
    path = expanded(name)
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return DatasetSource.on_disk(path, section)
        return FileSource.directory(path, section)
    if path.exists():
        return FileSource(_local(path.parent, [path]), rows=RowReader.of(section))
    if glob.has_magic(name):
        return FileSource.matching(name, section)
    if name.startswith((".", "/", "~")) or _kind(path) != "other":
        advice = f"check the path (it is relative to {os.getcwd()})"
        raise DataError.of(_SOURCE, name, "there is no such file or directory", advice)
    return DatasetSource.by_name(section) if section.stream_rows is None else StreamedSource.by_name(section)


class FileSource:
    """Files below a root, in sorted order."""

    entropy_rate: EntropyRate | None = None

    def __init__(
        self, files: list[SourceFile], *, rows: RowReader, skip_undecodable: bool = False, version: str = ""
    ) -> None:
        digest = hashlib.sha256(version.encode())
        for file in files:
            if rows.format != "text" and _kind(file.name) in ("text", "other"):
                reason = f"{file.relative} is text, and data.format={rows.format} needs rows with fields"
                raise DataError.of(_SOURCE, file.name, reason, (_SOURCE, "JSONL, Parquet or a dataset"))
            digest.update(f"{file.relative}\0{file.size_bytes}\0{file.version}\n".encode())
        self._files = files
        self.fingerprint = digest.hexdigest()
        self.size_bytes = sum(file.size_bytes for file in files)
        self._rows = rows
        self._skip_undecodable = skip_undecodable

    @classmethod
    def stdlib(cls) -> "FileSource":
        """The .py files of the running Python's standard library.

        Without its tests (which not every installation has) and without generated tables.
        """
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
            paths += [Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(".")]
        paths = sorted(path for path in paths if path.is_file())
        if not paths:
            remedy = (_SOURCE, "a file or directory")
            raise DataError.of(_SOURCE, "stdlib", f"there are no .py files under {root}", remedy)
        version = f"{platform.python_implementation()} {platform.python_version()}"
        return cls(_local(root, paths), rows=RowReader(), skip_undecodable=True, version=version)

    @classmethod
    def directory(cls, root: Path, section: DataSection) -> "FileSource":
        """All files below `root`."""
        return cls(_local(root, _corpus_files(_walk(root), section.source)), rows=RowReader.of(section))

    @classmethod
    def behind(cls, url: str, section: DataSection) -> "FileSource":
        """The file of a URL, all files below it as of a directory, or those that it matches as a glob."""
        files, is_directory = remote.find(url)
        if is_directory:
            wanted = set(_corpus_files([Path(file.relative) for file in files], section.source))
            files = [file for file in files if Path(file.relative) in wanted]
        return cls(files, rows=RowReader.of(section))

    @classmethod
    def matching(cls, pattern: str, section: DataSection) -> "FileSource":
        """The files that a glob matches; `**` spans directories."""
        matches = map(Path, glob.glob(os.path.expanduser(pattern), recursive=True))
        paths = sorted(path for path in matches if _is_file(path))
        if not paths:
            advice = f"check the pattern (it is relative to {os.getcwd()})"
            raise DataError.of(_SOURCE, pattern, "no file matches", advice)
        root = Path(os.path.commonpath([path.parent for path in paths]))
        return cls(_local(root, paths), rows=RowReader.of(section))

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[text_chunks.TextChunk]:
        """Group small text files, split long files."""
        group: list[str] = []
        group_bytes = position = 0
        files = partial(text_chunks.TextFiles, skip_undecodable=self._skip_undecodable)
        for file in self._files:
            name = file.name
            size = file.size_bytes
            grouped = _kind(name) in ("text", "other") and size <= PART_BYTES
            if group and (not grouped or group_bytes + size > text_chunks.CHUNK_BYTES):
                if self._has(part, position - group_bytes):
                    yield files(paths=tuple(group), size_bytes=group_bytes)
                group = []
                group_bytes = 0
            if grouped:
                group.append(name)
                group_bytes += size
            elif part.overlaps(position, position + size, self.size_bytes):
                yield from self._long_file(name, size, partial(self._has, part, position))
            position += size
        if group and self._has(part, position - group_bytes):
            yield files(paths=tuple(group), size_bytes=group_bytes)

    def _has(self, part: SourcePart, position: int, offset: int = 0) -> bool:
        return part.has(position + offset, self.size_bytes)

    def _long_file(self, name: str, size: int, wants: Callable[[int], bool]) -> Iterator[text_chunks.TextChunk]:
        """Yield what begins at an offset that a part `wants`: of a compressed file all or nothing."""
        rows = self._rows
        match _kind(name):
            case "json":
                for start in filter(wants, range(0, size, text_chunks.CHUNK_BYTES)):
                    length = min(text_chunks.CHUNK_BYTES, size - start)
                    yield text_chunks.JsonlRange(path=name, start=start, size_bytes=length, rows=rows)
            case "compressed json":
                blocks = text_chunks.line_blocks(name, text_chunks.CHUNK_BYTES) if wants(0) else ()
                for first_line, data, read_bytes in blocks:
                    yield text_chunks.JsonlBlock(
                        path=name, first_line=first_line, data=data, rows=rows, size_bytes=read_bytes
                    )
            case "parquet":
                yield from _parquet_chunks(name, size, rows, wants)
            case _:
                offsets = text_chunks.split_offsets(name, size, PART_BYTES)
                for start, end in itertools.pairwise(offsets):
                    if wants(start):
                        more = end != offsets[-1]
                        yield text_chunks.TextRange(path=name, start=start, size_bytes=end - start, continues=more)


class DatasetSource:
    """Rows of a `datasets.Dataset`."""

    entropy_rate: EntropyRate | None = None

    def __init__(self, dataset: Any, section: DataSection) -> None:
        self._rows = RowReader.of(section)
        columns = self._rows.columns(dataset.column_names, f"data.source={section.source}")
        self._dataset = dataset.select_columns(columns)
        self._name = section.source
        self.fingerprint: str = dataset._fingerprint
        self.size_bytes: int = dataset.data.nbytes
        self.splits: tuple[str, ...] = tuple(dataset.info.splits or ())
        """All splits of a dataset that was loaded by its name."""

    @classmethod
    def on_disk(cls, path: Path, section: DataSection) -> "DatasetSource":
        """Open a directory of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
        import datasets

        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:
            reason = f"datasets.load_from_disk failed: {reason_of(error)}"
            raise DataError.of(_SOURCE, section.source, reason) from None
        if isinstance(loaded, datasets.DatasetDict):
            if section.split not in loaded:
                settings = (("data.split", section.split), (_SOURCE, section.source))
                raise DataError.between(settings, "there is no such split", ("data.split", " or ".join(loaded)))
            loaded = loaded[section.split]
        return cls(loaded, section)

    @classmethod
    def by_name(cls, section: DataSection) -> "DatasetSource":
        """Load a dataset from the hub, or with a loader of `datasets`."""
        return cls(_loaded(section), section)

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[text_chunks.TextChunk]:
        """Yield rows in order, grouped to about a mebibyte."""
        rows = self._dataset.num_rows
        row_bytes = self.size_bytes / max(rows, 1)
        step = max(1, min(10_000, int(text_chunks.CHUNK_BYTES / max(row_bytes, 1))))
        for start in range(0, rows, step):
            if not part.has(int(start * row_bytes), self.size_bytes):
                continue
            if self._rows.format == "pretokenized":
                records = self._rows.rows(self._dataset.with_format("arrow")[start : start + step])
            else:
                columns = self._dataset[start : start + step]
                records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            yield _documents(records, self._rows, int(row_bytes * len(records)), at=self._name, first_row=start)


class StreamedSource:
    """The first rows of a `datasets.IterableDataset`: each row is downloaded when it is tokenized, and not stored."""

    entropy_rate: EntropyRate | None = None

    def __init__(self, dataset: Any, section: DataSection, rows: int) -> None:
        first = list(dataset.take(min(rows, _SAMPLED_ROWS)))
        if not first:
            raise DataError.of(_SOURCE, section.source, "the stream has no rows", "name another split or dataset")
        self._rows = RowReader.of(section)
        self._columns = self._rows.columns(first[0], f"data.source={section.source}")
        self._dataset = dataset
        self._name = section.source
        self._count = rows
        texts = [json.dumps({name: row[name] for name in self._columns}, default=str) for row in first]
        self._row_bytes = max(1.0, sum(map(len, texts)) / len(texts))
        self.size_bytes = int(self._row_bytes * rows)
        info = dataset.info
        version = (section.source, section.subset, section.split, rows, str(info.version), info.dataset_size, texts)
        self.fingerprint = hashlib.sha256(repr(version).encode()).hexdigest()
        self.splits: tuple[str, ...] = tuple(info.splits or ())
        """All splits of the dataset."""

    @classmethod
    def by_name(cls, section: DataSection) -> "StreamedSource":
        """Open a dataset of the hub, or one with a loader of `datasets`, in streaming mode."""
        assert section.stream_rows is not None
        return cls(_loaded(section, streaming=True), section, section.stream_rows)

    def chunks(self, part: SourcePart = WHOLE) -> Iterator[text_chunks.TextChunk]:
        """Yield rows in order, grouped to about a mebibyte; the rows before a part are skipped."""
        step = max(1, min(10_000, int(text_chunks.CHUNK_BYTES / self._row_bytes)))
        starts = range(0, self._count, step)
        wanted = [start for start in starts if part.has(int(start * self._row_bytes), self.size_bytes)]
        if not wanted:
            return
        end = min(wanted[-1] + step, self._count)
        rows = iter(self._dataset.skip(wanted[0]).take(end - wanted[0]))
        for start in wanted:
            records = [{name: row[name] for name in self._columns} for row in itertools.islice(rows, step)]
            if not records:
                return
            if self._rows.format == "pretokenized":
                import pyarrow

                records = self._rows.rows(pyarrow.Table.from_pylist(records))
            size = int(self._row_bytes * len(records))
            yield _documents(records, self._rows, size, at=self._name, first_row=start)


_SAMPLED_ROWS = 64
"""Rows of a stream by which the size of all is estimated."""


def _loaded(section: DataSection, **how: Any) -> Any:
    """Load the dataset of this name. Raises DataError where `datasets` does not."""
    import datasets

    try:
        return datasets.load_dataset(section.source, section.subset, split=section.split, **how)
    except Exception as error:
        reason = f"it is neither a path here nor a dataset that could be loaded ({reason_of(error)})"
        advice = "give a file, a directory, a glob, stdlib, markov, or the name of a dataset"
        raise DataError.of(_SOURCE, section.source, reason, advice) from None


def _parquet_chunks(
    path: str, size: int, reader: RowReader, wants: Callable[[int], bool]
) -> Iterator[text_chunks.TextChunk]:
    """Yield the row groups that begin at an offset that a part `wants`, if each had its share of the file."""
    import pyarrow
    import pyarrow.parquet

    is_arrow = without_query(path).lower().endswith(".arrow")
    try:
        if is_arrow:
            yield from _arrow_chunks(path, size, reader) if wants(0) else ()
            return
        with pyarrow.parquet.ParquetFile(open_file(path) if is_url(path) else path) as file:
            columns = reader.columns(file.schema_arrow.names, str(path))
            rows = file.metadata.num_rows
            row_bytes = size / max(file.metadata.num_rows, 1)
            # Rows per batch from the uncompressed size of the column, so that a batch is about one chunk.
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            text_bytes = sum(group.total_byte_size for group in groups)
            step = max(1, min(10_000, int(text_chunks.CHUNK_BYTES * rows / max(text_bytes, 1))))
            before = list(itertools.accumulate((group.total_byte_size for group in groups), initial=0))
            wanted = [number for number in range(len(groups)) if wants(size * before[number] // max(text_bytes, 1))]
            first_row = sum(group.num_rows for group in groups[: wanted[0]]) if wanted else 0
            for batch in file.iter_batches(batch_size=step, columns=columns, row_groups=wanted):
                records = reader.rows(batch)
                yield _documents(records, reader, int(row_bytes * len(records)), at=str(path), first_row=first_row)
                first_row += len(records)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "Arrow" if is_arrow else "Parquet"
        raise DataError(f"{path}: not a readable {kind} file: {reason_of(error)}. Write it again.") from None


def _arrow_chunks(path: str, size: int, reader: RowReader) -> Iterator[text_chunks.TextChunk]:
    """Read an Arrow IPC file, or the stream that `datasets` writes."""
    import pyarrow

    with pyarrow.PythonFile(open_file(path)) if is_url(path) else pyarrow.memory_map(path) as file:
        try:
            opened = pyarrow.ipc.open_file(file)
            batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:
            file.seek(0)
            opened = batches = pyarrow.ipc.open_stream(file)
        columns = reader.columns(opened.schema.names, str(path))
        first_row = 0
        for batch in batches:
            step = max(1, text_chunks.CHUNK_BYTES * batch.num_rows // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, step):
                records = reader.rows(batch.slice(start, step).select(columns))
                row_bytes = batch.nbytes / batch.num_rows
                yield _documents(records, reader, int(row_bytes * len(records)), at=str(path), first_row=first_row)
                first_row += len(records)


def _documents(
    records: list[dict[str, Any]], reader: RowReader, size_bytes: int, *, at: str, first_row: int
) -> text_chunks.LoadedTexts:
    texts: list[Document] = []
    rows: list[int] = []
    for row, record in enumerate(records, first_row):
        text = reader.read(record, partial(text_chunks.row_of, at, row))
        if text:
            texts.append(text)
            rows.append(row)
    return text_chunks.LoadedTexts(texts=tuple(texts), path=at, rows=tuple(rows), size_bytes=size_bytes)


def _kind(path: str | Path) -> str:
    name = without_query(str(path)).lower()
    plain = re.sub(r"\.(gz|zst)$", "", name)
    if plain.endswith(JSON_SUFFIXES):
        return "json" if plain == name else "compressed json"
    if name.endswith(PARQUET_SUFFIXES):
        return "parquet"
    return "text" if PurePath(name).suffix in TEXT_SUFFIXES else "other"


def _local(root: Path, paths: list[Path]) -> list[SourceFile]:
    """Look at files below `root`."""
    files = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError as error:
            raise text_chunks.unreadable(path, error) from None
        if not stat.S_ISREG(facts.st_mode):
            raise DataError.of(_SOURCE, str(path), "it is not a regular file", "name a file, a directory or a glob")
        relative = path.relative_to(root).as_posix()
        version = str(facts.st_mtime_ns)
        files.append(SourceFile(name=str(path), relative=relative, size_bytes=facts.st_size, version=version))
    return files


def _corpus_files(paths: list[Path], name: str) -> list[Path]:
    """Choose the files of a directory; text files beside JSONL or Parquet (a README) are not part of the corpus."""
    paths = [path for path in paths if _kind(path) != "other" and path.suffix != ".json"]
    structured = [path for path in paths if _kind(path) != "text"]
    if not paths:
        advice = "name files with .txt, .md, .py, .jsonl[.gz|.zst] or .parquet, or name them by a glob"
        raise DataError.of(_SOURCE, name, "there is no text, JSONL or Parquet file below it", advice)
    return structured or paths


def _walk(root: Path) -> list[Path]:
    """List all files below `root` that are not hidden, sorted by relative path.

    Links to directories are followed, and a directory that two paths lead to is listed once. Raises DataError for a
    directory that cannot be read and for a link to nothing: without them the corpus would be another.
    """

    def refuse(error: OSError) -> None:
        raise text_chunks.unreadable(str(error.filename), error)

    paths = []
    visited = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        facts = os.stat(folder)
        identity = (facts.st_dev, facts.st_ino)
        if identity in visited:
            folders.clear()
            continue
        visited.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(path for path in paths if _is_file(path))


def _is_file(path: Path) -> bool:
    """Whether a path leads to a regular file. Raises DataError for a link to nothing that has the name of a text."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        if _kind(path) == "other":
            return False
        raise DataError(f"{path}: a link to a file that is not there. Restore that file, or remove the link.") from None
    except OSError as error:
        if _kind(path) == "other":
            return False
        raise text_chunks.unreadable(path, error) from None
