"""MegatronIndex: the .idx of a dataset of Megatron-LM, mapped into memory, checked, and read where it is asked.

    bytes   content
    9       MMIDIDX and two zeros
    8       version 1
    1       code of the ids' data type
    8, 8    sequences n, and documents + 1
    4n      the length of each sequence
    8n      where it begins in the .bin, in bytes
    8(d+1)  the sequence that each document begins with, and n
    n       modes, of multimodal datasets alone

All little-endian. Nothing is aligned, which numpy reads, but copies as a whole for a search: `DocumentOffsets` searches
in parts.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.errors import DataError
from toolkit.files import open_regular, reason_of

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_BLOCK = 1 << 20
"""Sequences that are checked at a time."""
_PART = 1 << 10
"""Documents that are searched at a time."""


@dataclass(frozen=True, kw_only=True)
class MegatronIndex:
    """The content of an .idx, which describes its .bin."""

    prefix: str
    dtype: np.dtype[Any]
    tokens: int
    sequence_bytes: NDArray[np.int64]
    """Offset in bytes at which each sequence begins in the .bin."""
    document_sequences: NDArray[np.int64]
    """The sequence that each document begins with, and the number of sequences."""
    may_be_empty: bool
    """Whether documents without a token are possible: some sequence has none, or some document has no sequence."""

    @property
    def documents(self) -> int:
        return len(self.document_sequences) - 1

    def stream(self) -> NDArray[Any]:
        """Map the ids of all documents into memory."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r")

    def offsets(self, documents: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """Return where these documents begin in the stream; after the last one comes the end of the stream."""
        sequences = self.document_sequences[documents]
        last = len(self.sequence_bytes) - 1
        begins = self.sequence_bytes[np.minimum(sequences, last)] // self.dtype.itemsize
        return np.where(sequences > last, self.tokens, begins)


def open_index(prefix: str) -> MegatronIndex:
    """Map an .idx into memory, and check it and the size of its .bin. Raises DataError."""
    path = Path(f"{prefix}.idx")
    head, size = _header(path)
    code, sequences, offsets = head[2:]
    if code in _FLOATS:
        raise _bad(path, f"it is of {_FLOATS[code]}, and ids are integers", "Name a dataset of tokens.")
    if code not in DTYPES:
        raise _bad(path, f"it has the data type {code}, which Megatron-LM does not know")
    lengths_at = HEADER.size
    bytes_at = lengths_at + 4 * sequences
    documents_at = bytes_at + 8 * sequences
    end = documents_at + 8 * offsets
    if sequences and size == end + sequences:
        raise _bad(path, "it has modes, so the dataset is multimodal", "Name a dataset of tokens alone.")
    if size != end:
        reason = f"it has {size:,} bytes, and {end:,} are needed for {sequences:,} sequences and {offsets:,} documents"
        raise _bad(path, reason)
    if not sequences or offsets < 2:
        raise _bad(path, "it has no document", "Name a dataset with some.")
    content = np.memmap(path, dtype=np.uint8, mode="r")
    # Plain views of it: an index into a np.memmap takes microseconds more.
    lengths = np.frombuffer(content, dtype="<i4", offset=lengths_at, count=sequences)
    begins = np.frombuffer(content, dtype="<i8", offset=bytes_at, count=sequences)
    documents = np.frombuffer(content, dtype="<i8", offset=documents_at, count=offsets)
    dtype = np.dtype(DTYPES[code])
    total_bytes, empty_sequence = _check_sequences(path, lengths, begins, dtype.itemsize)
    empty_document = _check_documents(path, documents, sequences)
    _check_bin(Path(f"{prefix}.bin"), total_bytes)
    return MegatronIndex(
        prefix=prefix,
        dtype=dtype,
        tokens=total_bytes // dtype.itemsize,
        sequence_bytes=begins,
        document_sequences=documents,
        may_be_empty=empty_sequence or empty_document,
    )


def _header(path: Path) -> tuple[tuple[Any, ...], int]:
    try:
        with open_regular(path, follow=True) as file:
            head = file.read(HEADER.size)
            size = file.seek(0, 2)
    except OSError as error:
        advice = "Copy the .idx to where the .bin is." if isinstance(error, FileNotFoundError) else "Check data.source."
        raise _bad(path, reason_of(error), advice) from None
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise _bad(path, "it is not the index of a dataset of Megatron-LM", "Name the prefix of an .idx and a .bin.")
    if len(head) < HEADER.size:
        raise _bad(path, f"it is truncated after {len(head)} bytes")
    fields = HEADER.unpack(head)
    if fields[1] != VERSION:
        raise _bad(path, f"it has version {fields[1]}, and Megatron-LM writes {VERSION}")
    return fields, size


def _check_sequences(
    path: Path, lengths: NDArray[np.int32], begins: NDArray[np.int64], itemsize: int
) -> tuple[int, bool]:
    """Raise DataError unless the sequences follow each other from 0 on; return where the last one ends, in bytes, and
    whether some have no token."""
    end = 0
    has_empty = False
    for start in range(0, len(lengths), _BLOCK):
        part = lengths[start : start + _BLOCK].astype(np.int64)
        least = part.min()
        has_empty |= bool(least == 0)
        if least < 0:
            raise _bad(path, f"sequence {start + int(np.argmax(part < 0)):,} has a negative length")
        part *= itemsize
        ends = end + np.cumsum(part)
        wrong = begins[start : start + _BLOCK] != ends - part
        if wrong.any():
            raise _bad(path, f"sequence {start + int(np.argmax(wrong)):,} does not begin where the one before it ends")
        end = int(ends[-1])
    return end, has_empty


def _check_documents(path: Path, documents: NDArray[np.int64], sequences: int) -> bool:
    """Raise DataError unless the documents go from the first sequence to the last one, in order; return whether some
    have no sequence."""
    has_empty = False
    if documents[0] != 0 or documents[-1] != sequences:
        ends = f"they go from {documents[0]} to {documents[-1]}, and there are {sequences:,} sequences"
        raise _bad(path, f"its documents are not all of it: {ends}")
    for start in range(0, len(documents) - 1, _BLOCK):
        steps = np.diff(documents[start : start + _BLOCK + 1])
        least = steps.min()
        has_empty |= bool(least == 0)
        if least < 0:
            raise _bad(path, f"document {start + int(np.argmax(steps < 0)) + 1:,} begins before the one before it")
    return has_empty


def _check_bin(path: Path, needed: int) -> None:
    try:
        with open_regular(path, follow=True) as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise _bad(path, reason_of(error), "Copy the .bin to where the .idx is.") from None
    if size != needed:
        raise _bad(path, f"it has {size:,} bytes, and its .idx says {needed:,}", "Copy both from one dataset.")
    if not needed:
        raise _bad(path, "it has no token", "Name a dataset with some.")


def _bad(path: Path, reason: str, advice: str = "Write it again, or copy it again.") -> DataError:
    return DataError(f"{path}: {reason}. {advice}")


class DocumentOffsets:
    """Offsets of the documents `first` to `last`, counted from the first one, and of the end of the last one.

    Used as an array of int64, it reads what is asked for from the index; only as many numbers stay in memory as it has
    parts, 1/1,024 of them.
    """

    ndim = 1
    dtype = np.dtype(np.int64)

    def __init__(self, index: MegatronIndex, first: int, last: int) -> None:
        self._index = index
        self._first = first
        self.shape = (last - first + 1,)
        self._base = int(index.offsets(np.array([first]))[0])
        self._parts = self[np.arange(0, len(self), _PART)]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._index.offsets(slice(self._first + start, self._first + stop, step)) - self._base
        asked = np.asarray(key, dtype=np.int64)
        if ((asked < -len(self)) | (asked >= len(self))).any():
            raise IndexError(f"document {key} of {len(self)}")
        return self._index.offsets(self._first + asked % len(self)) - self._base

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.int64]:
        content: NDArray[np.int64] = self[:]
        return content if dtype is None else content.astype(dtype, copy=False)

    def searchsorted(self, values: ArrayLike, side: Any = "left", sorter: None = None) -> NDArray[np.int64]:
        """Search as numpy's function does, which calls it: find the part of each value, and search there."""
        wanted = np.asarray(values)
        parts = np.maximum(np.searchsorted(self._parts, wanted, side=side) - 1, 0)
        indices = np.empty(wanted.shape, dtype=np.int64)
        for part in np.unique(parts).tolist():
            here = parts == part
            content = self[part * _PART : (part + 1) * _PART]
            indices[here] = part * _PART + np.searchsorted(content, wanted[here], side=side)
        return indices
