"""Files behind URLs: s3://, gs://, hf://, https:// and whatever else fsspec knows. Every failure is an OSError.

    ask          a request, repeated while the connection fails
    open_ranges  a file for reading and seeking, fetched in parts
    RemotePath   a directory or a file, with the part of pathlib that checkpoints need

An error has a URL as its filename, a reason as its strerror, the errno of the same failure of a disk, and as its note
(PEP 678) what to do. Credentials, endpoints and regions come from where each protocol looks for them, such as
AWS_PROFILE. fsspec and the package of a protocol are imported when the first URL is used.
"""

import errno
import io
import os
import re
import stat as modes
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PosixPath
from typing import Any, Self, TypeVar

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ATTEMPTS = 4
_FIRST_WAIT_SECONDS = 0.5
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_FETCH_BYTES = 1 << 20
"""Bytes of a checkpoint that are asked for at least: small tensors lie beside each other."""
_UPLOAD_PART_BYTES = 8 << 20
_UPLOAD_PARTS = 4
"""Parts of a file that are sent to S3 at once."""
_PART_ATTEMPTS = 4
"""Attempts to send a part, of which a file may have thousands, in one attempt to send the file."""
_MOST_UPLOAD_PARTS = 10_000
"""Parts of one object, at most: docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_FULL = ("EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507")
"""Error codes of S3, and of other servers that speak its protocol, where there is no room."""
_MAY_PASS = (408, 425, 429)
"""HTTP statuses below 500 after which the same request may succeed."""
_CONNECTED: dict[tuple[int, Any, str], Any] = {}
"""File systems that all threads of a process may use, by process, kind and settings."""
T = TypeVar("T")


def is_url(name: str) -> bool:
    """Whether it is a URL, and not a path."""
    return _URL.match(name) is not None


def without_query(name: str) -> str:
    """A name without what may be a key: the query of a URL."""
    return name.partition("?")[0] if is_url(name) else name


def advice_of(error: BaseException) -> str:
    """What to do about an error of this module; empty for any other error."""
    return next(iter(getattr(error, "__notes__", ())), "")


def raise_unreachable(error: BaseException) -> None:
    """Raise an error that says nothing about a file behind a URL: the connection failed, or access is denied."""
    if isinstance(error, OSError) and advice_of(error) and error.errno not in (errno.ENOENT, errno.EINVAL):
        raise error


def filesystem(url: str, *, uploads: bool = False) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. `uploads`: one that repeats parts of a file by itself."""
    import fsspec.core

    protocol = url.partition("://")[0].lower()
    is_s3 = _PACKAGES.get(protocol) == "s3fs"
    options: dict[str, Any] = {}
    try:
        if protocol in ("http", "https"):
            import aiohttp

            waits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
            options["client_kwargs"] = {"timeout": waits}
        elif protocol in ("file", "local"):
            options["auto_mkdir"] = True
        elif is_s3 and "AWS_MAX_ATTEMPTS" not in os.environ:
            # Attempts are counted here: those of botocore, s3fs and this module would multiply.
            retries = {"total_max_attempts": 1}
            seconds = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
            options["config_kwargs"] = {"retries": retries, **seconds}
        if is_s3 and uploads:
            options["max_concurrency"] = _UPLOAD_PARTS
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"run pip install {package}" if package else _reason(error)
        reason = f"{package or 'a package'} is not installed, which reads {protocol}://"
        raise _failure(errno.ENOPKG, url, reason, advice) from None
    except ValueError as error:
        known = "s3://, gs://, hf://, https:// or another protocol of fsspec"
        raise _failure(errno.EINVAL, url, _reason(error), f"use {known}") from None
    if files.async_impl:
        # fsspec has one for each thread, and each would find credentials and connect anew.
        settings = os.getpid(), type(files), repr(sorted(files.storage_options.items()))
        files = _CONNECTED.setdefault(settings, files)
    if hasattr(files, "retries"):
        files.retries = _PART_ATTEMPTS if uploads else 1
    return files, str(path)


def forget_connections() -> None:
    """Have the next request look for credentials and endpoints again."""
    for settings in list(_CONNECTED):
        settings[1].clear_instance_cache()
        del _CONNECTED[settings]


def ask(url: str, request: Callable[[], T], *, verb: str = "read") -> T:
    """Make a request, and make it again where the connection fails. Raises OSError. `verb`: what it does to files."""
    # Not left to fsspec, which retries over some protocols and never over https://. tenacity would save no line.
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        try:
            return request()
        except Exception as error:
            last = error
            if (refusal := _refusal(url, error, verb)) is not None:
                raise refusal from None
    reason = f"the connection failed {_ATTEMPTS} times ({type(last).__name__}: {_reason(last)})"
    raise _failure(errno.EIO, url, reason, "Run it again: it goes on where it was")


def _refusal(url: str, error: BaseException, verb: str) -> OSError | None:
    """Return the error for which no other attempt can succeed; None where one may succeed."""
    chain = [error, error.__cause__, error.__context__]
    status = next((cause.status for cause in chain if isinstance(getattr(cause, "status", None), int)), 0)  # type: ignore[union-attr]
    codes = [getattr(cause, "response", None) for cause in chain]
    code = next((reply.get("Error", {}).get("Code", "") for reply in codes if isinstance(reply, dict)), "")
    if isinstance(error, OSError) and advice_of(error):
        return error
    if isinstance(error, FileExistsError):
        return _failure(errno.EEXIST, url, "it is there already", "use another name")
    if type(error).__name__ in _NO_CREDENTIALS:
        advice = "set AWS_PROFILE or what its protocol needs; for public data on S3 FSSPEC_S3_ANON=true"
        return _failure(errno.EACCES, url, f"there are no credentials ({_reason(error)})", advice)
    if isinstance(error, PermissionError) or status in (401, 403):
        return _failure(errno.EACCES, url, "access is denied", "check the credentials in the environment")
    if code in _FULL or status == 507:
        return _failure(errno.ENOSPC, url, f"there is no room ({_reason(error)})", "make room there")
    if isinstance(error, FileNotFoundError) and status < 500 and status not in _MAY_PASS:
        missing = "bucket" if "bucket does not exist" in str(error) else "file or directory"
        return _failure(errno.ENOENT, url, f"there is no such {missing}", "check the URL")
    is_wrong = isinstance(error, ValueError | TypeError | NotImplementedError) or "Validation" in type(error).__name__
    if is_wrong or (400 <= status < 500 and status not in _MAY_PASS):
        participle = {"read": "read", "write": "written", "delete": "deleted"}[verb]
        return _failure(errno.EINVAL, url, f"it cannot be {participle} ({_reason(error)})", "check the URL")
    return None


def _failure(number: int, url: str, reason: str, advice: str) -> OSError:
    error = OSError(number, reason, without_query(url))  # a PermissionError, a FileNotFoundError, …
    error.add_note(advice)
    return error


def _reason(error: BaseException) -> str:
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()) or type(error).__name__
    return f"{text[:158]} …" if len(text) > 160 else text.rstrip(".")


def read_range(url: str, start: int, end: int) -> bytes:
    """Read bytes [start, end) of a file. Raises OSError, also where the server sends more or fewer."""
    files, path = filesystem(url)
    # huggingface_hub would read 5 MB beyond the end of each range.
    options = {"cache_type": "none"} if files.protocol == "hf" else {}
    data: bytes = ask(url, lambda: files.cat_file(path, start=start, end=end, **options))
    if len(data) > end - start:
        raise _failure(errno.EINVAL, url, "the server sends no parts of files", "Download it, and give its path")
    if len(data) < end - start:
        raise _failure(errno.EINVAL, url, "it became shorter while it was read", "Run again when it is complete")
    return data


def open_ranges(
    url: str, size: int, fetch_bytes: int, read: Callable[[str, int, int], bytes] = read_range
) -> io.BufferedReader:
    """Open a file of `size` bytes for reading and seeking; `fetch_bytes` are asked for at a time, or more at once."""
    from fsspec.spec import AbstractBufferedFile

    class Ranges(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            return read(url, start, min(end, size))

    files, path = filesystem(url)
    # BufferedReader is the cache: those of fsspec also ask for `fetch_bytes` beyond what is read, up to twice the file.
    return io.BufferedReader(Ranges(files, path, cache_type="none", size=size), buffer_size=fetch_bytes)


class RemotePath(PosixPath):
    """A directory or file behind a URL. What this class does not define is not for it."""

    # All of it is in its parts (`s3:`, bucket, …), so that what pathlib derives from one is one too.

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{rest}"

    def resolve(self, strict: bool = False) -> Self:
        return self

    def absolute(self) -> Self:
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Kind, size and time of change, where the server says that. Raises OSError."""
        files, path = self._files()
        info = ask(str(self), lambda: files.info(path))
        mode = modes.S_IFDIR if info["type"] == "directory" else modes.S_IFREG
        changed = next((info[key] for key in ("LastModified", "mtime", "updated", "created") if info.get(key)), 0.0)
        if isinstance(changed, str):
            changed = datetime.fromisoformat(changed)
        seconds = changed.timestamp() if isinstance(changed, datetime) else float(changed)
        return os.stat_result((mode, 0, 0, 1, 0, 0, int(info.get("size") or 0), seconds, seconds, seconds))

    def lstat(self) -> os.stat_result:
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._mode() != 0

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return modes.S_ISDIR(self._mode())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return modes.S_ISREG(self._mode())

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Generator[Self, None, None]:
        """What is directly in this directory; nothing if there is none. Raises OSError."""
        files, path = self._files()

        def paths() -> list[str]:
            try:
                return [str(entry).rstrip("/") for entry in files.ls(path, detail=False)]
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise
                return []

        entries = set(ask(str(self), paths)) - {path.rstrip("/")}
        return (self / name.rpartition("/")[2] for name in sorted(entries))

    def sizes(self) -> dict[str, int]:
        """The size of every file in this directory and below, by its path inside it. Raises OSError."""
        files, path = self._files()
        entries = ask(str(self), lambda: files.find(path, detail=True))
        return {str(name).removeprefix(path).lstrip("/"): int(info["size"]) for name, info in entries.items()}

    def open_binary(self, fetch_bytes: int = _FETCH_BYTES) -> io.BufferedReader:
        """Open this file for reading and seeking; so many bytes are asked for at least. Raises OSError."""
        return open_ranges(str(self), self._size(), fetch_bytes)

    def create(self, content: bytes) -> bool:
        """Write a small file unless one is there; whether it was written. Raises OSError."""
        try:
            self._write(content, mode="create")
        except FileExistsError:
            with self.open_binary() as file:  # an attempt may have succeeded, and its answer was lost
                return file.read(len(content) + 1) == content
        return True

    def write_bytes(self, content: Any) -> int:
        """Write a small file, or replace it. Raises OSError."""
        self._write(content, mode="overwrite")
        return len(content)

    def upload(self, source: Path, progress: Callable[[], None]) -> None:
        """Copy a file here, in parts; `progress` is called when one has arrived. Raises OSError.

        Nothing else may write here: after a failed attempt, a file of the same size has arrived.
        """
        from fsspec.callbacks import Callback

        files, path = self._files(uploads=True)
        size = source.stat().st_size
        options: dict[str, Any] = {"callback": Callback(hooks={"progress": lambda *_, **__: progress()})}
        if hasattr(files, "max_concurrency"):
            options["chunksize"] = max(_UPLOAD_PART_BYTES, -(-size // _MOST_UPLOAD_PARTS))
        attempts: list[int] = []

        def send() -> None:
            with suppress(FileNotFoundError):
                if attempts and self._size() == size:
                    return
            attempts.append(size)
            files.put_file(str(source), path, **options)

        ask(str(self), send, verb="write")

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file. Raises OSError."""
        files, path = self._files()
        try:
            ask(str(self), lambda: files.rm_file(path), verb="delete")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_files(self) -> None:
        """Remove all files in this directory and below. Raises OSError."""
        files, path = self._files()
        with suppress(FileNotFoundError):
            ask(str(self), lambda: files.rm(path, recursive=True), verb="delete")

    def _files(self, *, uploads: bool = False) -> tuple[Any, str]:
        files, path = filesystem(str(self), uploads=uploads)
        files.invalidate_cache()
        return files, path

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError as error:
            if "bucket" in str(error.strerror):
                raise
            return 0

    def _size(self) -> int:
        status = self.stat()
        if not modes.S_ISREG(status.st_mode):
            raise _failure(errno.EISDIR, str(self), "it is a directory", "name a file")
        return status.st_size

    def _write(self, content: bytes, *, mode: str) -> None:
        files, path = self._files()
        ask(str(self), lambda: files.pipe_file(path, content, mode=mode), verb="write")
