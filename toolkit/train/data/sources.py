"""Sources: where documents come from, in an order that never changes, as pieces that workers can take.

data.source                                       what it is
stdlib                                            the running Python's standard library, a document a .py file
markov                                            letters drawn from a Markov chain, whose entropy rate is known
corpus.txt, notes.md, …                           text: one document a file
crawl.jsonl, crawl.jsonl.gz, crawl.jsonl.zst      one JSON object a line, its text under data.text_field
crawl.parquet                                     a row a document
a directory                                       all such files below it (text only where there is no JSONL or Parquet)
crawl/*.jsonl, **/*.txt                           a glob
a directory made by Dataset.save_to_disk          its rows
anything else                                     datasets.load_dataset(source, subset, split=split)
"""

import glob
import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import DataError
from toolkit.recipe import DataSection
from toolkit.train.data import compressed
from toolkit.train.data.markov import EntropyRate, MarkovSource
from toolkit.train.data.pieces import (
    PIECE_BYTES,
    JsonBlock,
    JsonRange,
    Piece,
    TextFiles,
    TextRange,
    Texts,
    check_text,
    no_text_field,
    text_cuts,
)

# A text file above this is tokenized in parts, so that a worker's memory does not depend on the length of a file.
PART_BYTES = 2 << 20

_TEXT = """
.txt .text .md .markdown .rst .tex .html .css .xml .csv .tsv .yaml .yml .toml .ini .cfg
.py .pyi .c .h .cc .cpp .hpp .rs .go .java .js .ts .sh .sql .jl .r .rb .lua .hs .scala .kt .swift
"""
TEXT_SUFFIXES = frozenset(_TEXT.split())
_NOT_FOR_READING = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "__pycache__"),
)
JSON_SUFFIXES = (".jsonl", ".json-lines", ".jsonlines", ".ndjson")
PACKED_JSON_SUFFIXES = tuple(f"{lines}{packed}" for lines in (*JSON_SUFFIXES, ".json") for packed in (".gz", ".zst"))
PARQUET_SUFFIXES = (".parquet", ".pq")


class Source(Protocol):
    """Documents in a fixed order."""

    @property
    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""
        ...

    @property
    def size_bytes(self) -> int:
        """About how much there is, in the unit of `Piece.size_bytes`."""
        ...

    @property
    def entropy_rate(self) -> EntropyRate | None:
        """Of the stream of its tokens, where that is known."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All documents, in order, one piece at a time. Raises DataError for what cannot be read."""
        ...


def open_source(section: DataSection) -> Source:
    """The source that `section.source` names. Raises DataError when there is none or it is empty."""
    name = section.source
    if name == "stdlib":
        return FileSource.stdlib()
    if name == "markov":
        return MarkovSource()
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return DatasetSource.on_disk(path, section)
        return FileSource.directory(path, section)
    if path.exists():
        return FileSource(path.parent, [path], text_field=section.text_field)
    if glob.has_magic(name):
        return FileSource.matching(name, section)
    if name.startswith((".", "/", "~")) or _kind(path) != "other":
        raise DataError(
            f"data.source={name}: no such file or directory. Check the path (it is relative to {os.getcwd()})."
        )
    return DatasetSource.by_name(section)


class FileSource:
    """Files below a root, in sorted order."""

    entropy_rate = None

    def __init__(
        self,
        root: Path,
        paths: list[Path],
        *,
        text_field: str,
        skip_undecodable: bool = False,
        extra_fingerprint: str = "",
    ) -> None:
        self._files: list[tuple[Path, int]] = []
        digest = hashlib.sha256(extra_fingerprint.encode())
        for path in paths:
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}. Check data.source and the file's permissions.") from None
            digest.update(f"{path.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
            self._files.append((path, stat.st_size))
        self.fingerprint = digest.hexdigest()
        self.size_bytes = sum(size for _, size in self._files)
        self._text_field = text_field
        self._skip_undecodable = skip_undecodable

    @classmethod
    def stdlib(cls) -> "FileSource":
        """The .py files of the running Python's standard library: code that people wrote to be read.

        Without its tests (which not every installation has) and without tables that only look like code.
        """
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in _walk(root, skip=_NOT_FOR_READING) if path.suffix == ".py"]
        if not paths:
            raise DataError(f"data.source=stdlib: no .py files under {root}. Set data.source to a file or directory.")
        version = f"{platform.python_implementation()} {platform.python_version()}"
        return cls(root, paths, text_field="", skip_undecodable=True, extra_fingerprint=version)

    @classmethod
    def directory(cls, root: Path, section: DataSection) -> "FileSource":
        """All files below `root`; a README beside JSONL or Parquet is about the corpus, not part of it."""
        paths = [path for path in _walk(root) if _kind(path) != "other" and path.suffix != ".json"]
        structured = [path for path in paths if _kind(path) != "text"]
        if not paths:
            raise DataError(
                f"data.source={section.source}: no text, JSONL or Parquet file below it. "
                "Name files with .txt, .md, .py, .jsonl[.gz|.zst] or .parquet, or name them by a glob."
            )
        return cls(root, structured or paths, text_field=section.text_field)

    @classmethod
    def matching(cls, pattern: str, section: DataSection) -> "FileSource":
        """The files that a glob matches; `**` spans directories."""
        paths = sorted(
            path for name in glob.glob(os.path.expanduser(pattern), recursive=True) if (path := Path(name)).is_file()
        )
        if not paths:
            raise DataError(
                f"data.source={pattern}: no file matches. Check the pattern (it is relative to {os.getcwd()})."
            )
        root = Path(os.path.commonpath([path.parent for path in paths]))
        return cls(root, paths, text_field=section.text_field)

    def pieces(self) -> Iterator[Piece]:
        """Small text files are grouped, long files are cut."""
        group: list[str] = []
        group_bytes = 0
        for path, size in self._files:
            grouped = _kind(path) in ("text", "other") and size <= PART_BYTES
            if group and (not grouped or group_bytes + size > PIECE_BYTES):
                yield self._group(group, group_bytes)
                group, group_bytes = [], 0
            if grouped:
                group.append(str(path))
                group_bytes += size
            else:
                yield from self._long_file(path, size)
        if group:
            yield self._group(group, group_bytes)

    def _group(self, paths: list[str], size_bytes: int) -> Piece:
        return TextFiles(paths=tuple(paths), size_bytes=size_bytes, skip_undecodable=self._skip_undecodable)

    def _long_file(self, path: Path, size: int) -> Iterator[Piece]:
        name, field = str(path), self._text_field
        match _kind(path):
            case "json":
                for start in range(0, size, PIECE_BYTES):
                    yield JsonRange(path=name, start=start, end=min(start + PIECE_BYTES, size), text_field=field)
            case "packed json":
                for first_line, data, read_bytes in compressed.line_blocks(path, PIECE_BYTES):
                    yield JsonBlock(
                        path=name, first_line=first_line, data=data, text_field=field, size_bytes=read_bytes
                    )
            case "parquet":
                yield from _parquet_pieces(path, size, field)
            case _:
                cuts = text_cuts(name, size, PART_BYTES)
                for start, end in itertools.pairwise(cuts):
                    yield TextRange(path=name, start=start, end=end, continues=end != cuts[-1])


class DatasetSource:
    """Rows of a `datasets.Dataset`."""

    entropy_rate = None

    def __init__(self, dataset: Any, section: DataSection) -> None:
        if section.text_field not in dataset.column_names:
            raise DataError(no_text_field(f"data.source={section.source}", section.text_field, dataset.column_names))
        self._dataset = dataset.select_columns([section.text_field])
        self._name = section.source
        self._text_field = section.text_field
        self.fingerprint: str = dataset._fingerprint
        self.size_bytes: int = dataset.data.nbytes

    @classmethod
    def on_disk(cls, path: Path, section: DataSection) -> "DatasetSource":
        """A directory made by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
        import datasets

        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:
            raise DataError(
                f"data.source={section.source}: datasets.load_from_disk failed: {_first_line(error)}"
            ) from None
        if isinstance(loaded, datasets.DatasetDict):
            if section.split not in loaded:
                raise DataError(
                    f"data.split={section.split}: {section.source} has the splits {', '.join(loaded)}. "
                    "Set data.split to one of them."
                )
            loaded = loaded[section.split]
        return cls(loaded, section)

    @classmethod
    def by_name(cls, section: DataSection) -> "DatasetSource":
        """A dataset of the hub, or of a loader that `datasets` knows."""
        import datasets

        try:
            loaded = datasets.load_dataset(section.source, section.subset, split=section.split)
        except Exception as error:
            raise DataError(
                f"data.source={section.source} is neither a path here nor a dataset that could be loaded: "
                f"{_first_line(error)} Give a file, a directory, a glob, stdlib, markov, or the name of a dataset."
            ) from None
        return cls(loaded, section)

    def pieces(self) -> Iterator[Piece]:
        """Rows in order, grouped to about a mebibyte."""
        rows = self._dataset.num_rows
        row_bytes = self.size_bytes / max(rows, 1)
        step = max(1, min(10_000, int(PIECE_BYTES / max(row_bytes, 1))))
        for start in range(0, rows, step):
            column = self._dataset[start : start + step][self._text_field]
            yield _texts(column, self._text_field, int(row_bytes * len(column)), at=self._name, first_row=start)


def _parquet_pieces(path: Path, size: int, text_field: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise DataError(no_text_field(str(path), text_field, file.schema_arrow.names))
            rows, row_bytes = file.metadata.num_rows, size / max(file.metadata.num_rows, 1)
            # Rows a batch from the uncompressed size of the column, so that a batch is about one piece.
            text_bytes = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
            step = max(1, min(10_000, int(PIECE_BYTES * rows / max(text_bytes, 1))))
            first_row = 0
            for batch in file.iter_batches(batch_size=step, columns=[text_field]):
                column = batch.column(0).to_pylist()
                yield _texts(column, text_field, int(row_bytes * len(column)), at=str(path), first_row=first_row)
                first_row += len(column)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {_first_line(error)} Write it again.") from None


def _texts(column: list[Any], text_field: str, size_bytes: int, *, at: str, first_row: int) -> Texts:
    checked = (
        check_text(value, text_field, at=partial("{}, row {}".format, at, row))
        for row, value in enumerate(column, first_row)
    )
    return Texts(texts=tuple(text for text in checked if text), size_bytes=size_bytes)


def _kind(path: Path) -> str:
    name = path.name.lower()
    if name.endswith(PACKED_JSON_SUFFIXES):
        return "packed json"
    if name.endswith((*JSON_SUFFIXES, ".json")):
        return "json"
    if name.endswith(PARQUET_SUFFIXES):
        return "parquet"
    return "text" if path.suffix.lower() in TEXT_SUFFIXES else "other"


def _walk(root: Path, skip: tuple[str, ...] = ()) -> list[Path]:
    """All files below `root`, sorted by relative path; nothing hidden."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _first_line(error: Exception) -> str:
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')}."
