"""Compressed JSONL: whole lines out of .gz and .zst, block by block. A file that ends too early is an error."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from toolkit.errors import DataError

_READ_BYTES = 1 << 18


def line_blocks(path: Path, block_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """(number of the first line, whole lines of about `block_bytes`, compressed bytes read for them)."""
    first_line, pending, accounted = 1, bytearray(), 0
    try:
        for data, read_bytes in _gzip(path) if path.suffix.lower() == ".gz" else _zstandard(path):
            pending += data
            if len(pending) >= block_bytes and (cut := pending.rfind(b"\n") + 1):
                block = bytes(pending[:cut])
                del pending[:cut]
                yield first_line, block, read_bytes - accounted
                first_line, accounted = first_line + block.count(b"\n"), read_bytes
        if pending:
            yield first_line, bytes(pending), path.stat().st_size - accounted
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged or cut short ({error}). Copy or compress the file again.") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Check data.source and the file's permissions.") from None


def _gzip(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as raw, gzip.open(raw) as file:
        while data := file.read(4 * _READ_BYTES):
            yield data, raw.tell()


def _zstandard(path: Path) -> Iterator[tuple[bytes, int]]:
    # One decompressor a frame: only then does `eof` tell a file that ends from one that was cut.
    frame = None
    with path.open("rb") as raw:
        while chunk := raw.read(_READ_BYTES):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk), raw.tell()
                chunk = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame is incomplete")
