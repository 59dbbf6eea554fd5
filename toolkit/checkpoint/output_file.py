"""A new file that is hashed on its way to the disk, and written past the page cache where the file system can.

What a checkpoint writes is not read again soon. Through the page cache it would be copied once more by the kernel, push
out what is useful there, and still have to reach the disk before `fsync` returns.
"""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

from toolkit.checkpoint.host_memory import PAGE_BYTES
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.plain_file import write_all


class OutputFile:
    """`path` names it in the checkpoint's `folder`. Contents are given in order, each to `hash`, then to `write`."""

    def __init__(self, folder: Path, path: str) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self._size = 0
        self._descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_direct = self._set_direct(True)

    def hash(self, content: memoryview) -> None:
        """Let the digest take it in."""
        self._hash.update(content)

    def write(self, content: memoryview) -> None:
        """Append it. All but the last must begin at a page of memory and be whole pages, or they go the slow way."""
        self._size += len(content)
        if self._is_direct:
            content = self._write_direct(content)
        if content:
            write_all(self._descriptor, content)

    def finish(self) -> FileRecord:
        """Have everything on the disk."""
        try:
            os.fsync(self._descriptor)
        finally:
            self.abandon()
        return FileRecord(path=self.path, size=self._size, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        """Close without a promise; whoever made the folder removes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_direct(self, content: memoryview) -> memoryview:
        """Write the whole pages of it; what is left."""
        whole = len(content) // PAGE_BYTES * PAGE_BYTES
        start = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            write_all(self._descriptor, content[:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Not as this file system wants it.
            self._set_direct(False)
            return content[os.lseek(self._descriptor, 0, os.SEEK_CUR) - start :]
        if whole < len(content):
            self._set_direct(False)
        return content[whole:]

    def _set_direct(self, wanted: bool) -> bool:
        """Whether writes go past the page cache from now on."""
        self._is_direct = False
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:  # it cannot (a file system in memory, for one)
            return False
        self._is_direct = wanted and bool(flag)
        return self._is_direct
