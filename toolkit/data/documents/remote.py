"""Texts and shards behind URLs, read in ranges in constant memory; what fails is a DataError or a RunError.

The requests are those of toolkit/remote_files.py.
"""

import errno
import glob
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from toolkit import remote_files
from toolkit.errors import DataError, RunError
from toolkit.files import printable
from toolkit.remote_files import advice_of, ask, is_url, open_ranges, read_range, without_query

_FETCH_BYTES = 4 << 20
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "checksum", "blob_id", "xet_hash", "LastModified")
_TIMES = ("Last-Modified", "updated", "last_modified", "mtime", "created")
"""Facts of file systems that change with a file, the best first."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a source, here or behind a URL."""

    name: str
    relative: str
    """Name of the file below the root of the source."""
    size_bytes: int
    version: str
    """Changes when the file may have changed."""


def find(url: str) -> tuple[list[SourceFile], bool]:
    """List the files that a URL names, or below it, or that match it as a glob, and say whether it is a directory.

    Hidden files are listed only by their URL. Raises DataError if there are none, and RunError if the connection fails.
    """
    files, path = _filesystem(url)
    files.invalidate_cache()
    size.cache_clear()
    is_http = url.startswith("http")
    is_glob = "*" in path or (not is_http and glob.has_magic(path))
    if is_glob:
        root = re.split(r"[*?[]", path)[0].rpartition("/")[0]
        details_by_name = _patiently(url, lambda: files.glob(path, detail=True))
    else:
        info = _patiently(url, lambda: files.info(path))
        if info["type"] != "directory":
            return [_source_file(files, path.rpartition("/")[0], path, info, url)], False
        root = path
        details_by_name = _patiently(url, lambda: files.find(path, detail=True))
    listed = [
        _source_file(files, root, name, info, url) for name, info in details_by_name.items() if info["type"] == "file"
    ]
    listed = [file for file in listed if file.relative and not re.search(r"(^|/)\.|/$", file.relative)]
    if not listed:
        raise DataError.of("data.source", without_query(url), "there is no file", "check the URL")
    return sorted(listed, key=lambda file: file.relative.split("/")), not is_glob


def _source_file(files: Any, root: str, name: str, info: Mapping[str, Any], url: str) -> SourceFile:
    if info.get("size") is None:
        reason = "the server does not say how long it is, and so no part of it can be asked for"
        raise DataError.of("data.source", without_query(url), reason, "download it, and give its path")
    version = next((str(info[key]) for key in (*_VERSIONS, *_TIMES) if info.get(key)), "")
    relative = name.removeprefix(root).lstrip("/")
    whole = name if is_url(name) else files.unstrip_protocol(name)
    return SourceFile(name=whole, relative=relative, size_bytes=int(info["size"]), version=version)


def open_url(url: str, fetch_bytes: int | None = None) -> io.BufferedReader:
    """Open a file for reading and seeking. `fetch_bytes` are asked for at a time. Raises DataError or RunError."""
    return open_ranges(url, size(url), fetch_bytes or _FETCH_BYTES, _read_range)


def _read_range(url: str, start: int, end: int) -> bytes:
    with _as_data_error(url):
        return read_range(url, start, end)


@lru_cache(maxsize=1024)
def size(url: str) -> int:
    """Return the length of a file in bytes. Raises DataError or RunError."""
    files, path = _filesystem(url)
    info = _patiently(url, lambda: files.info(path))
    return int(info["size"] or 0)


def _filesystem(url: str) -> tuple[Any, str]:
    with _as_data_error(url):
        return remote_files.filesystem(url)


def _patiently(url: str, request: Callable[[], T]) -> T:
    """Ask, and ask again if the connection fails. Raises DataError for what will not pass, else RunError."""
    with _as_data_error(url):
        return ask(url, request)


@contextmanager
def _as_data_error(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = printable(error.strerror or error)
        advice = advice_of(error)
        if error.errno == errno.EIO:
            raise RunError(f"{without_query(url)}: {reason}. {advice}.") from None
        raise DataError.of("data.source", without_query(url), reason, advice) from None


def names(url: str) -> list[str]:
    """List what is directly below a URL; nothing if there is no such directory. Raises DataError or RunError."""
    files, path = _filesystem(url)
    files.invalidate_cache()

    def ask() -> list[str]:
        with suppress(FileNotFoundError):
            return [str(name).rstrip("/").rpartition("/")[2] for name in files.ls(path, detail=False)]
        return []

    return _patiently(url, ask)


def upload(folder: Path, url: str, *, last: str) -> None:
    """Copy a directory to a URL, the file `last` after all others. Raises DataError or RunError."""
    files, path = _filesystem(url)
    paths = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: (file.name == last, file))
    for file in paths:
        target = f"{path}/{file.relative_to(folder).as_posix()}"
        _patiently(url, lambda file=file, target=target: files.put_file(str(file), target))  # type: ignore[misc]


def download(url: str, folder: Path) -> None:
    """Copy what is below a URL to a new directory. Raises DataError or RunError."""
    files, path = _filesystem(url)
    for name in _patiently(url, lambda: files.find(path)):
        target = folder / str(name).removeprefix(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        _patiently(url, lambda name=name, target=target: files.get_file(name, str(target)))  # type: ignore[misc]
