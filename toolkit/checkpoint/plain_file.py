"""Plain files: what somebody else left is opened only if it is one, so that no link is followed and no FIFO waits."""

import errno
import hashlib
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 256 * 2**20


def open_plain(path: Path, *, follow: bool = False) -> BufferedReader:
    """The file, for reading. Raises OSError for a link (unless `follow`), a FIFO, a device or a directory."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)  # O_NONBLOCK: opening a FIFO would wait for somebody who writes
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path.name} is a symbolic link") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, *, max_bytes: int = MAX_JSON_BYTES, follow: bool = False) -> bytes:
    """The whole of a small file. Raises OSError, also where it is not small."""
    with open_plain(path, follow=follow) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path.name} is larger than {max_bytes} bytes")
    return content


def read_json_object(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """A JSON object. Raises OSError, and ValueError for anything else."""
    try:
        content = json.loads(read_plain(path, follow=follow))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def hash_plain(path: Path) -> str:
    """sha256, in hexadecimal."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file's content, or a directory's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """A new file with this content, on the disk. Raises OSError where there is one already."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: memoryview) -> None:
    """Every byte: one call to write may take fewer."""
    while content:
        content = content[os.write(descriptor, content) :]
