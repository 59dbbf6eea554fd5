"""Pieces: what one worker reads and tokenizes at a time, about a mebibyte of text, independent of all the others.

A piece is small enough to be sent to a worker: either a place on disk (the worker reads it) or, where one reader has to
go through a file in order (compressed files, Parquet, datasets), the text itself.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol

from toolkit.errors import DataError

PIECE_BYTES = 1 << 20


class Piece(Protocol):
    """One unit of work. `size_bytes` is what it takes of its source, for progress and sampling."""

    @property
    def size_bytes(self) -> int:
        """Share of the source's `size_bytes`."""
        ...

    @property
    def continues(self) -> bool:
        """True when the last document of this piece goes on in the next one."""
        ...

    def documents(self) -> Iterator[str]:
        """The documents, in order. Raises DataError for text that cannot be read."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Whole files, one document each."""

    paths: tuple[str, ...]
    size_bytes: int
    skip_undecodable: bool = False
    continues: bool = False

    def documents(self) -> Iterator[str]:
        """The text of each file, line ends untouched."""
        for path in self.paths:
            try:
                yield _decode(_read(path, 0, None), path=path)
            except DataError:
                if not self.skip_undecodable:
                    raise


@dataclass(frozen=True, kw_only=True)
class TextRange:
    """A part of a document too long to be held whole, cut where `text_cuts` says."""

    path: str
    start: int
    end: int
    continues: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.start

    def documents(self) -> Iterator[str]:
        """The text between the two cuts."""
        yield _decode(_read(self.path, self.start, self.end - self.start), path=self.path, offset=self.start)


@dataclass(frozen=True, kw_only=True)
class JsonRange:
    """The lines of an uncompressed JSONL file that begin in [start, end)."""

    path: str
    start: int
    end: int
    text_field: str
    continues: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.start

    def documents(self) -> Iterator[str]:
        """The texts of those lines."""
        with _open(self.path) as file:
            if self.start:
                # The line that holds the byte before `start` began earlier and belongs to the previous range.
                file.seek(self.start - 1)
                file.readline()
            position = file.tell()
            while position < self.end and (line := file.readline()):
                text = _json_text(line, self.text_field, at=partial(self._line, position))
                position += len(line)
                if text:
                    yield text

    def _line(self, position: int) -> str:
        number = 1
        with _open(self.path) as file:
            while position > 0 and (block := file.read(min(position, PIECE_BYTES))):
                number += block.count(b"\n")
                position -= len(block)
        return f"{self.path}:{number}"


@dataclass(frozen=True, kw_only=True)
class JsonBlock:
    """Whole lines of a compressed JSONL file, already decompressed."""

    path: str
    first_line: int
    data: bytes
    text_field: str
    size_bytes: int
    continues: bool = False

    def documents(self) -> Iterator[str]:
        """The texts of those lines."""
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if text := _json_text(line, self.text_field, at=partial("{}:{}".format, self.path, number)):
                yield text


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Documents that were already read, from Parquet or a dataset."""

    texts: tuple[str, ...]
    size_bytes: int
    continues: bool = False

    def documents(self) -> Iterator[str]:
        """The documents."""
        yield from self.texts


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Check data.source and the file's permissions.") from None


def _read(path: str, start: int, count: int | None) -> bytes:
    with _open(path) as file:
        file.seek(start)
        return file.read(-1 if count is None else count)


def _decode(data: bytes, *, path: str, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{path}: byte {at} is not UTF-8. Convert the file to UTF-8 or take it out of data.source."
        ) from None


def _json_text(line: bytes, text_field: str, *, at: Callable[[], str]) -> str | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise DataError(f"{at()}: not UTF-8. Convert the file to UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{at()}: not a JSON object ({error.msg}). Each line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise DataError(f"{at()}: a JSON {type(record).__name__}. Each line must be one JSON object.")
    if text_field not in record:
        raise DataError(no_text_field(at(), text_field, record))
    return check_text(record[text_field], text_field, at=at)


def check_text(value: object, text_field: str, *, at: Callable[[], str]) -> str | None:
    """`value` if it can be tokenized; null counts as an empty document. Raises DataError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(
            f"{at()}: {text_field} is a {type(value).__name__}, not a text. Set data.text_field to a column of texts."
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{at()}: {text_field} holds half a surrogate pair, which is no text. Repair that line."
            ) from None
    return value


def no_text_field(at: str, text_field: str, columns: Iterable[str]) -> str:
    """The message for a missing text column."""
    there = ", ".join(map(str, columns)) or "nothing"
    return f"{at}: no {text_field!r}; there is {there}. Set data.text_field to one of them."


def text_cuts(path: str, size_bytes: int, part_bytes: int) -> list[int]:
    """Offsets that cut a long text into parts of about `part_bytes`: after a newline where possible.

    A single newline between visible characters ends a word for the byte-level BPEs in use, so cutting there changes no
    token. Tokenizers that mark the beginning of a text (SentencePiece) see each part as a new text. The cuts depend on
    the file alone.
    """
    cuts = [0]
    with _open(path) as file:
        while cuts[-1] + part_bytes < size_bytes:
            at = cuts[-1] + part_bytes
            file.seek(at)
            window = file.read(PIECE_BYTES)
            found = _VISIBLE_LINE.search(window) or _LINE.search(window) or _CHARACTER.search(window)
            cuts.append(at + (found.end() if found else 0))
    if cuts[-1] < size_bytes:
        cuts.append(size_bytes)
    return cuts


_VISIBLE_LINE = re.compile(rb"[!-~]\n(?=[!-~])")
_LINE = re.compile(rb"\n(?=.)", re.DOTALL)
# Where a UTF-8 character begins: any byte that is not a continuation byte.
_CHARACTER = re.compile(rb"(?=[^\x80-\xbf])", re.DOTALL)
