"""The server of one host: files in its memory, for the ranks of all hosts. Imports nothing but the standard library.

    python -m toolkit.host_memory.server PROCESS

It serves those that know its secret until PROCESS, the launcher of the ranks, ends. Files are in memfds: whatever ends
this process, the kernel frees them. A file is visible once all of its bytes are here.

A request is a line of JSON, after which the bytes of a file may follow; so is the answer.
"""

import errno
import hmac
import json
import os
import secrets
import select
import shutil
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

_LONGEST_REQUEST = 1 << 16
_PART_BYTES = 1 << 20
_KEPT_FREE = 0.05
"""Share of the host's memory that files never take."""


@dataclass(frozen=True, kw_only=True)
class _StoredFile:
    file: BinaryIO
    size: int
    created: float


class _Files:
    """The files of this host by path."""

    def __init__(self) -> None:
        self._files: dict[str, _StoredFile] = {}
        self._lock = threading.Lock()

    def receive(self, path: str, size: int, source: BufferedIOBase, *, may_replace: bool) -> None:
        """Take a file of `size` bytes from a connection. Raises OSError, also where there is no room."""
        if size > _free_bytes():
            raise OSError(errno.ENOSPC, "the memory of this host has no room for it")
        file = os.fdopen(os.memfd_create("checkpoint", os.MFD_CLOEXEC), "w+b", buffering=0)
        unread = size
        while unread:
            part = source.read(min(unread, _PART_BYTES))
            if not part:
                raise OSError(errno.EPIPE, "the connection ended within the file")
            file.write(part)
            unread -= len(part)
        with self._lock:
            if path in self._files and not may_replace:
                raise OSError(errno.EEXIST, "it is there already")
            self._files[path] = _StoredFile(file=file, size=size, created=time.time())

    def get(self, path: str) -> _StoredFile:
        """Raises OSError where there is no such file."""
        with self._lock:
            if path not in self._files:
                raise OSError(errno.ENOENT, "there is no such file")
            return self._files[path]

    def listed(self, path: str) -> list[dict[str, Any]]:
        """The file of that path and all below it."""
        with self._lock:
            return [
                {"name": name, "size": stored.size, "created": stored.created}
                for name, stored in self._files.items()
                if _is_within(name, path)
            ]

    def remove(self, path: str) -> int:
        """Remove the file of that path and all below it; how many there were."""
        with self._lock:
            removed = [name for name in self._files if _is_within(name, path)]
            for name in removed:
                del self._files[name]  # a connection that still sends it has a reference
            return len(removed)


def _is_within(name: str, path: str) -> bool:
    return name == path or path == "" or name.startswith(f"{path}/")


def _free_bytes() -> int:
    """The memory that files may still take."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return int(1024 * (kilobytes["MemAvailable"] - _KEPT_FREE * kilobytes["MemTotal"]))


class _Connection(socketserver.StreamRequestHandler):
    """Answers the requests of one connection in their order."""

    server: "_Server"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while line := self.rfile.readline(_LONGEST_REQUEST):
            try:
                request = json.loads(line)
                if not hmac.compare_digest(str(request["secret"]), self.server.secret):
                    raise PermissionError(errno.EACCES, "another job's files")
                self._answer(request)
            except OSError as error:
                self._send({"errno": error.errno or errno.EIO, "reason": error.strerror or str(error)})
                return  # bytes of the file may still be on their way
            except (ValueError, KeyError, TypeError) as error:
                self._send({"errno": errno.EINVAL, "reason": f"not a request ({type(error).__name__})"})
                return

    def _answer(self, request: Mapping[str, Any]) -> None:
        files = self.server.files
        path = str(request["path"])
        kind = request["request"]
        if kind == "put":
            files.receive(path, int(request["size"]), self.rfile, may_replace=bool(request["may_replace"]))
            self._send({})
        elif kind == "get":
            stored = files.get(path)
            start = min(int(request["start"]), stored.size)
            end = stored.size if request["end"] is None else min(int(request["end"]), stored.size)
            self._send({"size": max(0, end - start)})
            if end > start:
                self._send_part(stored.file, start, end)
        elif kind == "where":
            stored = files.get(path)
            inode = os.fstat(stored.file.fileno()).st_ino
            self._send({"process": os.getpid(), "descriptor": stored.file.fileno(), "inode": inode})
        elif kind == "list":
            self._send({"files": files.listed(path)})
        elif kind == "remove":
            self._send({"removed": files.remove(path)})
        else:
            raise ValueError(kind)

    def _send(self, answer: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _send_part(self, file: BinaryIO, start: int, end: int) -> None:
        while start < end:
            start += os.sendfile(self.connection.fileno(), file.fileno(), start, end - start)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.files = _Files()
        super().__init__(("", 0), _Connection)


def main(launcher: int) -> None:
    """Serve until the process `launcher` ends; return at once where another server of this host does."""
    handle = os.pidfd_open(launcher)
    try:
        door = socket.create_server(door_of(launcher), family=socket.AF_UNIX)
    except OSError:
        return
    server = _Server(secrets.token_hex(16))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=_admit, args=(door, server), daemon=True).start()
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    shutil.rmtree(staging_directory(launcher), ignore_errors=True)


def staging_directory(launcher: int) -> Path:
    """The directory in this host's memory in which its ranks write files before they put them here."""
    return Path(f"/dev/shm/dstk-memory-{os.getuid()}-{launcher}")


def door_of(launcher: int) -> str:
    """The name of the Unix socket at which ranks of this host ask for port and secret: an abstract one, no file."""
    return f"\0dstk-memory-{os.getuid()}-{launcher}"


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket: unix(7), SO_PEERCRED."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _process, user, _group = struct.unpack("3i", credentials)
    return int(user)


def _admit(door: socket.socket, server: _Server) -> None:
    """Tell port and secret to processes of the same user."""
    while True:
        visitor, _ = door.accept()
        with visitor:
            if user_of(visitor) == os.getuid():
                visitor.sendall(json.dumps({"port": server.server_address[1], "secret": server.secret}).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
