"""Text chunks: what one worker reads and tokenizes at a time, about a mebibyte of text, independent of all others.

A chunk is small enough to be sent to a worker: either a range of a file (the worker reads it) or, where one reader has
to go through a file in order (compressed files, Parquet, datasets), the text itself.
"""

import gzip
import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import BinaryIO

import zstandard
from typing_extensions import override

from toolkit.data.documents import remote
from toolkit.data.documents.rows import Document, RowReader
from toolkit.errors import DataError
from toolkit.remote_files import is_url, without_query
from toolkit.units import plural

CHUNK_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_REST_OF_LINE = 1 << 15
_NEAR_BYTES = 1 << 12
_FEW_NULS = 8
"""Text has at most one NUL in as many bytes; UTF-16 of Latin letters has one in two."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".lz4", ".br")
_VISIBLE_LINE = re.compile(rb"[!-~]\n(?=[!-~])")
_LINE = re.compile(rb"\n(?=.)", re.DOTALL)
# The first byte of a UTF-8 character: any byte that is not a continuation byte.
_CHARACTER = re.compile(rb"(?=[^\x80-\xbf])", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class TextChunk(ABC):
    """One unit of work."""

    size_bytes: int
    """The chunk's share of the source's `size_bytes`, for progress and sampling."""
    continues: bool = False
    """Whether the last document continues in the next chunk."""

    @property
    def is_continued(self) -> bool:
        """Whether the first document began in an earlier chunk."""
        return False

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Read the documents, in order. Raises DataError for text that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextChunk):
    """Whole files, one document each, with their line ends."""

    paths: tuple[str, ...]
    skip_undecodable: bool = False

    @override
    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            try:
                yield _decode(_read(path, 0, None), path=path)
            except DataError:
                if not self.skip_undecodable:
                    raise


@dataclass(frozen=True, kw_only=True)
class TextRange(TextChunk):
    """`size_bytes` of a document that is too long to be read at once, from an offset of `split_offsets`."""

    path: str
    start: int

    @property
    @override
    def is_continued(self) -> bool:
        return self.start > 0

    @override
    def documents(self) -> Iterator[Document]:
        yield _decode(_read(self.path, self.start, self.size_bytes), path=self.path, offset=self.start)


@dataclass(frozen=True, kw_only=True)
class JsonlRange(TextChunk):
    """The lines of an uncompressed JSONL file that begin in the `size_bytes` from `start`."""

    path: str
    start: int
    rows: RowReader

    @override
    def documents(self) -> Iterator[Document]:
        with open_file(self.path, self.size_bytes + _REST_OF_LINE) as file:
            if self.start:
                # The line with the byte before `start` belongs to the previous range.
                file.seek(self.start - 1)
                file.readline()
            position = file.tell()
            while position < self.start + self.size_bytes and (line := file.readline()):
                at = partial(self._line, position)
                text = _json_document(line, self.rows, at=at)
                position += len(line)
                if text:
                    yield from _placed(text, at)

    def _line(self, position: int) -> str:
        if is_url(self.path):  # counting lines would read all that precedes
            return f"{self.path}: line at byte {position}"
        number = 1
        with open_file(self.path) as file:
            while position > 0 and (block := file.read(min(position, CHUNK_BYTES))):
                number += block.count(b"\n")
                position -= len(block)
        return f"{self.path}:{number}"


@dataclass(frozen=True, kw_only=True)
class JsonlBlock(TextChunk):
    """Whole lines of a compressed JSONL file, already decompressed."""

    path: str
    first_line: int
    data: bytes
    rows: RowReader

    @override
    def documents(self) -> Iterator[Document]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            at = partial("{}:{}".format, self.path, number)
            if text := _json_document(line, self.rows, at=at):
                yield from _placed(text, at)


@dataclass(frozen=True, kw_only=True)
class LoadedTexts(TextChunk):
    """Documents that were already read, from Parquet or a dataset."""

    texts: tuple[Document, ...]
    path: str = ""
    rows: tuple[int, ...] = ()
    """The row of each text, if these are rows of `path`."""

    @override
    def documents(self) -> Iterator[Document]:
        if not self.rows:
            yield from self.texts
            return
        for text, row in zip(self.texts, self.rows, strict=True):
            yield from _placed(text, partial(row_of, self.path, row))


def row_of(path: str, row: int) -> str:
    """Say where a row of a table is."""
    return f"{path}, row {row}"


def open_file(path: str, fetch_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading; `fetch_bytes` of a URL are asked for at a time. Raises DataError or RunError."""
    if is_url(path):
        return remote.open_url(path, fetch_bytes)
    try:
        return open(path, "rb")
    except OSError as error:
        raise unreadable(path, error) from None


def file_size(path: str) -> int:
    """Return the bytes of a file. Raises OSError, and of a URL DataError or RunError."""
    return remote.size(path) if is_url(path) else os.stat(path).st_size


def unreadable(path: str | Path, error: OSError) -> DataError:
    """Return the error for a file that the operating system does not let us read."""
    return DataError(f"{path}: {error.strerror}. Check data.source and the file's permissions.")


def _read(path: str, start: int, count: int | None) -> bytes:
    with open_file(path, count) as file:
        try:
            file.seek(start)
            return file.read(-1 if count is None else count)
        except OSError as error:
            if is_url(path):
                raise
            raise unreadable(path, error) from None


def _decode(data: bytes, *, path: str, offset: int = 0) -> str:
    """The text of a file or a part of it, without the byte order mark of editors on Windows.

    Raises DataError where it is not UTF-8, and where NUL bytes are a part of it as large as in UTF-16 or a binary file.
    """
    suffix = PurePath(without_query(path)).suffix.lower()
    if suffix in _COMPRESSED:
        raise DataError(
            f"{path}: compressed text is read as .jsonl.gz or .jsonl.zst only. Decompress the file, or remove it from "
            "data.source."
        )
    nuls = data.count(b"\0")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        reason = f"byte {offset + error.start} is not UTF-8"
    else:
        if nuls * _FEW_NULS <= len(data):
            return text.removeprefix("\ufeff") if offset == 0 else text
        reason = f"{nuls} of {plural(len(data), 'byte')} are NUL, as in UTF-16 or a binary file"
    raise DataError(f"{path}: {reason}. Convert the file to UTF-8 or remove it from data.source.")


def _placed(document: Document, at: Callable[[], str]) -> Iterator[Document]:
    """Yield it. A DataError that is thrown in, because it cannot be encoded, says where it is."""
    try:
        yield document
    except DataError as error:
        raise DataError(f"{at()}: {error}") from None


def _json_document(line: bytes, rows: RowReader, *, at: Callable[[], str]) -> Document | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise DataError(f"{at()}: not UTF-8. Convert the file to UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or a number too long"
        raise DataError(f"{at()}: not a JSON object ({reason}). Each line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise DataError(f"{at()}: a JSON {type(record).__name__}. Each line must be one JSON object.")
    return rows.read(record, at)


def split_offsets(path: str, size_bytes: int, part_bytes: int) -> list[int]:
    """Return offsets that split a long text into parts of about `part_bytes`, after a newline where possible.

    A single newline between visible characters ends a word in the byte-level BPEs in use, so splitting there changes
    no token. Tokenizers that mark the beginning of a text (SentencePiece) treat each part as a new text. The offsets
    depend on the file alone.
    """
    offsets = [0]
    with open_file(path, _NEAR_BYTES) as file:
        while offsets[-1] + part_bytes < size_bytes:
            at = offsets[-1] + part_bytes
            file.seek(at)
            window = file.read(_NEAR_BYTES)
            if not _VISIBLE_LINE.search(window):
                window += file.read(max(0, CHUNK_BYTES - _NEAR_BYTES))
            boundary = _VISIBLE_LINE.search(window) or _LINE.search(window) or _CHARACTER.search(window)
            offsets.append(at + (boundary.end() if boundary else 0))
    if offsets[-1] < size_bytes:
        offsets.append(size_bytes)
    return offsets


def line_blocks(path: str, block_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """Read a .gz or .zst file in blocks. Raises DataError if it is truncated.

    Yields (number of the first line, whole lines of about `block_bytes`, compressed bytes read for them).
    """
    first_line = 1
    pending = bytearray()
    accounted = 0
    try:
        for data, read_bytes in _gzip(path) if without_query(path).lower().endswith(".gz") else _zstandard(path):
            pending += data
            if len(pending) >= block_bytes and (end := pending.rfind(b"\n") + 1):
                block = bytes(pending[:end])
                del pending[:end]
                yield first_line, block, read_bytes - accounted
                first_line = first_line + block.count(b"\n")
                accounted = read_bytes
        if pending:
            yield first_line, bytes(pending), file_size(path) - accounted
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged or truncated ({error}). Copy or compress the file again.") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _gzip(path: str) -> Iterator[tuple[bytes, int]]:
    with open_file(path) as raw, gzip.open(raw) as file:
        while data := file.read(4 * _READ_BYTES):
            yield data, raw.tell()


def _zstandard(path: str) -> Iterator[tuple[bytes, int]]:
    # One decompressor per frame: only then does `eof` distinguish a complete file from a truncated one.
    frame = None
    with open_file(path) as raw:
        while chunk := raw.read(_READ_BYTES):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk), raw.tell()
                chunk = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame is incomplete")
