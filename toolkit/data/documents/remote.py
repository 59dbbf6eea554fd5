"""Files behind URLs: s3://, gs://, hf://, https:// and whatever else fsspec knows, read in ranges in constant memory.

Credentials, endpoints and regions come from where each protocol looks for them, such as AWS_PROFILE.
fsspec and the package of a protocol are imported when the first URL is opened.
"""

import glob
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from toolkit.errors import DataError, RunError, ToolkitError
from toolkit.files import reason_of

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FETCH_BYTES = 4 << 20
_ATTEMPTS = 4
_FIRST_WAIT_SECONDS = 0.5
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "checksum", "blob_id", "xet_hash", "LastModified")
_TIMES = ("Last-Modified", "updated", "last_modified", "mtime", "created")
"""Facts of file systems that change with a file, the best first."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_MAY_PASS = (408, 425, 429)
"""HTTP statuses below 500 after which the same request may succeed."""
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


def is_url(name: str) -> bool:
    """Whether it is a URL, and not a path."""
    return _URL.match(name) is not None


def without_query(name: str) -> str:
    """A name without what may be a key: the query of a URL."""
    return name.partition("?")[0] if is_url(name) else name


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


def open_url(url: str, fetch_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading and seeking. `fetch_bytes` are asked for at a time. Raises DataError or RunError."""
    from fsspec.spec import AbstractBufferedFile

    size_bytes = size(url)

    class Ranges(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            return _read_range(url, start, min(end, size_bytes))

    files, path = _filesystem(url)
    # BufferedReader is the cache: those of fsspec also ask for `fetch_bytes` beyond what is read, up to twice the file.
    ranges = Ranges(files, path, cache_type="none", size=size_bytes)
    return io.BufferedReader(ranges, buffer_size=fetch_bytes or _FETCH_BYTES)


def _read_range(url: str, start: int, end: int) -> bytes:
    files, path = _filesystem(url)
    # huggingface_hub would read 5 MB beyond the end of each range.
    options = {"cache_type": "none"} if files.protocol == "hf" else {}
    data: bytes = _patiently(url, lambda: files.cat_file(path, start=start, end=end, **options))
    if len(data) > end - start:
        raise DataError(f"{without_query(url)}: the server sends no parts of files. Download it, and give its path.")
    if len(data) < end - start:
        raise DataError(f"{without_query(url)}: it became shorter while it was read. Run again when it is complete.")
    return data


@lru_cache(maxsize=1024)
def size(url: str) -> int:
    """Return the length of a file in bytes. Raises DataError or RunError."""
    files, path = _filesystem(url)
    info = _patiently(url, lambda: files.info(path))
    return int(info["size"] or 0)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec.core

    protocol = url.partition("://")[0].lower()
    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):
            import aiohttp

            waits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
            options["client_kwargs"] = {"timeout": waits}
        elif _PACKAGES.get(protocol) == "s3fs" and "AWS_MAX_ATTEMPTS" not in os.environ:
            # Attempts are counted here: those of botocore, s3fs and this module would multiply.
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"run pip install {package}" if package else reason_of(error)
        reason = f"{package or 'a package'} is not installed, which reads {protocol}://"
        raise DataError.of("data.source", without_query(url), reason, advice) from None
    except ValueError as error:
        known = "s3://, gs://, hf://, https:// or another protocol of fsspec"
        raise DataError.of("data.source", without_query(url), reason_of(error), f"use {known}") from None
    if hasattr(files, "retries"):
        files.retries = 1
    return files, str(path)


def _patiently(url: str, ask: Callable[[], T]) -> T:
    """Ask, and ask again if the connection fails. Raises DataError for what will not pass, else RunError."""
    # Not left to fsspec, which retries over some protocols and never over https://. tenacity would save no line.
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        try:
            return ask()
        except ToolkitError:
            raise
        except Exception as error:
            last = error
            if (refusal := _refusal(url, error)) is not None:
                raise refusal from None
    reason = f"the connection failed {_ATTEMPTS} times ({type(last).__name__}: {reason_of(last)})"
    raise RunError(f"{without_query(url)}: {reason}. Run it again: it goes on where it was.")


def _refusal(url: str, error: BaseException) -> DataError | None:
    """Return the refusal for which no other attempt can succeed; None where one may succeed."""
    chain = [error, error.__cause__, error.__context__]
    status = next((cause.status for cause in chain if isinstance(getattr(cause, "status", None), int)), 0)  # type: ignore[union-attr]
    name = without_query(url)
    if type(error).__name__ in _NO_CREDENTIALS:
        advice = "set AWS_PROFILE or what its protocol needs; for public data on S3 FSSPEC_S3_ANON=true"
        return DataError.of("data.source", name, f"there are no credentials ({reason_of(error)})", advice)
    if isinstance(error, PermissionError) or status in (401, 403):
        return DataError.of("data.source", name, "access is denied", "check the credentials in the environment")
    if isinstance(error, FileNotFoundError) and status < 500 and status not in _MAY_PASS:
        missing = "bucket" if "bucket does not exist" in str(error) else "file or directory"
        return DataError.of("data.source", name, f"there is no such {missing}", "check the URL")
    is_wrong = isinstance(error, ValueError | TypeError | NotImplementedError) or "Validation" in type(error).__name__
    if is_wrong or (400 <= status < 500 and status not in _MAY_PASS):
        return DataError.of("data.source", name, f"it cannot be read ({reason_of(error)})", "check the URL")
    return None


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
