"""Files that someone else wrote: opened only where they are regular, read up to a limit, decoded without trust.

And directories that become visible only when they are complete (`published`).
"""

import atexit
import errno
import json
import os
import shutil
import stat
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from toolkit.remote_files import RemotePath, is_url

MAX_JSON_BYTES = 256 * 2**20
MAX_LOG_BYTES = 2**32
_PART_BYTES = 2**20
_JSON_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}
"""What messages call the values of JSON that are not objects."""


def printable(name: object) -> str:
    """An untrusted name, made safe for one line of a message."""
    text = str(name) if isinstance(name, str | Path) else repr(name)
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:200]}…"


def reason_of(error: BaseException) -> str:
    """Return why a call failed, on one printable line: the reason of an OSError, else the beginning of the message."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()) or type(error).__name__
    return textwrap.shorten(printable(text), 160, placeholder=" …").rstrip(".")


def expanded(name: str) -> Path:
    """A path with `~` as a user's home; that of an unknown user stays as it is, and is found missing."""
    return Path(os.path.expanduser(name))


def place(name: str) -> Path:
    """The directory or file that a user names: a URL, or a path with `~` as a user's home."""
    return RemotePath(name) if is_url(name) else expanded(name)


def is_there(path: Path) -> bool:
    """Whether there is something of this name, which may be a link to nothing."""
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


_TEMPORARY: list[Path] = []


def remove_at_exit(folder: Path) -> None:
    """Remove a folder when this process ends, also where it ends by os._exit in `remove_temporary`'s callers."""
    if not _TEMPORARY:
        atexit.register(remove_temporary)
    _TEMPORARY.append(folder)


def remove_temporary() -> None:
    """Remove the folders that are to be removed."""
    while _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop(), ignore_errors=True)


def cache_folder() -> Path:
    """Return the folder of caches, unless a recipe says otherwise: $DSTK_CACHE or ~/.cache/dstk."""
    return expanded(os.environ.get("DSTK_CACHE") or "~/.cache/dstk")


def open_regular(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a file for reading. Raises OSError for a link (unless `follow`), a FIFO, a device or a directory."""
    if isinstance(path, RemotePath):
        return path.open_binary()
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)  # O_NONBLOCK: opening a FIFO would wait for a writer
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(f"{path.name} is a symbolic link") from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(f"{printable(path.name)} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, max_bytes: int = MAX_JSON_BYTES, follow: bool = False) -> bytes:
    """Read a small file. Raises OSError, also where it exceeds `max_bytes`."""
    content = bytearray()
    with open_regular(path, follow=follow) as file:
        # In parts: Python reserves as many bytes as it is asked for, of a log 4 GiB, which a busy machine refuses.
        while len(content) <= max_bytes and (part := file.read(min(_PART_BYTES, max_bytes + 1 - len(content)))):
            content += part
    if len(content) > max_bytes:
        raise OSError(f"{printable(path.name)} is larger than {max_bytes} bytes")
    return bytes(content)


def read_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES, encoding: str = "utf-8-sig") -> str:
    """Read a small file of UTF-8, without the byte order mark of editors on Windows. Raises OSError or ValueError."""
    try:
        return read_regular(path, max_bytes=max_bytes, follow=True).decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def decode_json(text: str | bytes, **hooks: Any) -> Any:
    """Decode JSON of any depth and with any numbers; `hooks` are those of json.loads. Raises ValueError."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("it is not JSON: not UTF-8") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's limit
            raise ValueError("it has a number of thousands of digits") from None
        raise


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON, as an `object_pairs_hook`. Raises ValueError for a key that is given twice."""
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {printable(key)} is given twice")
        members[key] = value
    return members


def decode_json_object(text: str | bytes, **hooks: Any) -> dict[str, Any]:
    """Decode a JSON object, as `decode_json` does. Raises ValueError for any other content."""
    content = decode_json(text, **hooks)
    if not isinstance(content, dict):
        raise ValueError(f"it is not a JSON object but {_JSON_KINDS[type(content)]}")
    return content


@contextmanager
def published(place: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `place`, on disk, when the block succeeds, and is removed when it fails.

    Raises OSError where there is a directory with content already, unless it `replaces` that.
    """
    place = place.absolute()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same process id
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        move_into_place(temporary, place, replaces=replaces)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_into_place(temporary: Path, place: Path, *, replaces: bool) -> None:
    """Rename a directory; what it `replaces` is moved aside until that has succeeded, to a name that ends in .old."""
    aside = temporary.with_suffix(".old")
    is_replaced = replaces and place.exists()
    if is_replaced:
        place.rename(aside)
    try:
        temporary.rename(place)
    except OSError:
        if is_replaced:
            aside.rename(place)
        raise
    sync(place.parent)
    if is_replaced:
        shutil.rmtree(aside, ignore_errors=True)


def first_problem(error: Any) -> str:
    """Return the first problem of a pydantic.ValidationError, with the field."""
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


def sync(path: Path) -> None:
    """fsync a file's content, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_object(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a JSON object. Raises OSError, and ValueError for any other content."""
    return decode_json_object(read_regular(path, follow=follow))
