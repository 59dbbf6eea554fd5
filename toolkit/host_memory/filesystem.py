"""A file system in the memory of all hosts of a job: what a rank writes is on its own host and on the next one.

    join(Ring(hosts=..., here=1))
    fsspec.url_to_fs("hostmem://run/step-00000010/model.safetensors")

So no single host takes a file with it. Any rank reads any part of any file, from a host that has it; where that is its
own, it reads the server's memory.
"""

import errno
import io
import json
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import fsspec
from fsspec.callbacks import Callback, NoOpCallback
from fsspec.spec import AbstractFileSystem

PROTOCOL = "hostmem"
RUN_URL = f"{PROTOCOL}://run"
"""The directory of the checkpoints of a launch, which has one run."""
_CONNECT_SECONDS = 10.0
_RESPONSE_SECONDS = 60.0
_REQUESTS_AT_ONCE = 32
_NO_CALLBACK = NoOpCallback()


class _NoAnswerError(OSError):
    """A connection has ended before the answer to a request."""


@dataclass(frozen=True, kw_only=True)
class HostServer:
    """The server of one host: the address at which it listens, and the secret that it asks for."""

    name: str
    """The host's name, for people."""
    address: str
    port: int
    secret: str

    def request(self, request: dict[str, Any], body: BinaryIO | None = None) -> tuple[dict[str, Any], bytes]:
        """Make a request, with the bytes of a file if it writes one; the answer, and the bytes that came with it.

        Raises OSError, with the errno that the server says.
        """
        line = json.dumps(request | {"secret": self.secret}).encode() + b"\n"
        position = 0 if body is None else body.tell()
        idle = _connections.take(self)
        if idle is not None:
            try:
                return self._answer(idle, line, body)
            except _NoAnswerError:  # the server has closed it since
                if body is not None:
                    body.seek(position)
        return self._answer(self._connect(), line, body)

    def _answer(self, connection: socket.socket, line: bytes, body: BinaryIO | None) -> tuple[dict[str, Any], bytes]:
        """Make a request on a connection, which waits for the next one or, after an error, is closed."""
        try:
            answer, content = self._exchange(connection, line, body)
            if "errno" in answer:
                raise OSError(answer["errno"], f"{answer['reason']} (memory of {self.name})")
            if len(content) != answer.get("size", 0):
                raise OSError(errno.EIO, f"the memory of {self.name} sent a part of what it has")
        except OSError:
            connection.close()
            raise
        _connections.put_back(self, connection)
        return answer, content

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self.address, self.port), _CONNECT_SECONDS)
        connection.settimeout(_RESPONSE_SECONDS)
        # A host that was lost since answers nothing: an idle connection to it ends as soon as a new one would.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _CONNECT_SECONDS))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _exchange(self, connection: socket.socket, line: bytes, body: BinaryIO | None) -> tuple[dict[str, Any], bytes]:
        """Send a request, and read its answer. Raises _NoAnswerError where the connection ends before there is one."""
        try:
            connection.sendall(line)
            if body is not None:
                self._send_body(connection, body)
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline())
                content = answers.read(answer["size"]) if "size" in answer else b""
        except (OSError, ValueError):
            raise _NoAnswerError(errno.EIO, f"the memory of {self.name} gave no answer") from None
        return answer, content

    def _send_body(self, connection: socket.socket, body: BinaryIO) -> None:
        try:
            connection.sendfile(body)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server has refused it, and its answer says why


class _Connections:
    """Connections to servers that no request uses at the moment, since a restart makes many small requests."""

    def __init__(self) -> None:
        self._idle: dict[HostServer, list[socket.socket]] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def take(self, host: HostServer) -> socket.socket | None:
        """An idle connection to a host; None where there is none."""
        with self._lock:
            idle = self._idle.get(host)
            return idle.pop() if idle else None

    def put_back(self, host: HostServer, connection: socket.socket) -> None:
        """Let a later request use a connection, all of whose answer has been read."""
        with self._lock:
            self._idle.setdefault(host, []).append(connection)

    def _forget(self) -> None:
        """Close what a forked process has inherited: answers would reach the one or the other process."""
        self._lock = threading.Lock()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle = {}


_connections = _Connections()


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The hosts of a job in the order of their ranks, and the number of this one."""

    hosts: tuple[HostServer, ...]
    here: int

    @property
    def copies(self) -> tuple[HostServer, ...]:
        """Hosts that get a copy of what is written here: this one, and the next one if there is another."""
        following = self.hosts[(self.here + 1) % len(self.hosts)]
        this = self.hosts[self.here]
        return (this,) if following is this else (this, following)


def join(ring: Ring) -> None:
    """Make `hostmem://` the memory of these hosts, for this process."""
    fsspec.register_implementation(PROTOCOL, HostMemory, clobber=True)
    HostMemory.ring = ring
    HostMemory.locations = {}


def _read_on_this_host(host: HostServer, name: str, start: int, end: int | None) -> bytes | None:
    """Bytes [start, end) of a file in the memory of this host's server; None where the system does not allow it.

    Raises OSError where the server does not answer, or has no such file.
    """
    answer, _ = host.request({"request": "where", "path": name})
    try:
        with open(f"/proc/{answer['process']}/fd/{answer['descriptor']}", "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != answer["inode"]:  # it was removed meanwhile, and another one is there
                return None
            stop = status.st_size if end is None else min(status.st_size, end)
            parts = []
            while start < stop:
                part = os.pread(file.fileno(), stop - start, start)  # at most 2 GiB
                parts.append(part)
                start += len(part)
            return b"".join(parts)
    except OSError:
        return None


class HostMemory(AbstractFileSystem):  # type: ignore[misc]
    """The files of all hosts. Directories are what paths say. Every failure is an OSError."""

    protocol = PROTOCOL
    ring: ClassVar[Ring]
    locations: ClassVar[dict[str, tuple[HostServer, ...]]]
    """Hosts that had each file when it was last listed."""

    def put_file(self, lpath: str, rpath: str, callback: Callback = _NO_CALLBACK, **_: Any) -> None:
        """Copy a file of this host's disk to the hosts of its copies."""
        with open(lpath, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            callback.set_size(size * len(self.ring.copies))
            for host in self.ring.copies:
                file.seek(0)
                self._put(host, rpath, size, file, may_replace=True)
                callback.relative_update(size)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a small file. With the mode `create`, FileExistsError where there is one on a host of its copies."""
        for host in self.ring.copies:
            request = {"size": len(value), "may_replace": mode == "overwrite"}
            host.request({"request": "put", "path": self._strip_protocol(path), **request}, io.BytesIO(value))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes [start, end) of a file, from the first of its hosts that answers."""
        name = self._strip_protocol(path)
        request = {"request": "get", "path": name, "start": start or 0, "end": end}
        last: OSError = FileNotFoundError(errno.ENOENT, "there is no such file", path)
        this_host = self.ring.hosts[self.ring.here]
        hosts = self.locations.get(name) or self._locate(name)
        for host in sorted(hosts, key=lambda host: host != this_host):
            try:
                content = _read_on_this_host(host, name, start or 0, end) if host == this_host else None
                return host.request(request)[1] if content is None else content
            except OSError as error:
                last = error
                self.locations.pop(name, None)
        raise last

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """All files in a directory and below, or the file of that path."""
        assert maxdepth is None
        assert not withdirs
        files = {info["name"]: info for info in self._listed(self._strip_protocol(path))}
        return files if detail else sorted(files)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        """What is directly in a directory. Raises FileNotFoundError where that is nothing."""
        directory = self._strip_protocol(path)
        entries = {}
        for info in self._listed(directory):
            inside = info["name"].removeprefix(directory).lstrip("/")
            first, is_below, _rest = inside.partition("/")
            name = f"{directory}/{first}".strip("/")
            entries[name] = {"name": name, "size": 0, "type": "directory"} if is_below else info
        if not entries:
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", path)
        return [entries[name] for name in sorted(entries)] if detail else sorted(entries)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Kind, size and time of writing of a file; or that it is a directory. Raises FileNotFoundError."""
        name = self._strip_protocol(path)
        listed = self._listed(name)
        if not listed:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
        itself = [info for info in listed if info["name"] == name]
        return itself[0] if itself else {"name": name, "size": 0, "type": "directory"}

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove a file, or a directory with all in it, from every host. Raises FileNotFoundError."""
        name = self._strip_protocol(path)
        self.locations.clear()
        answers = self._ask_all({"request": "remove", "path": name})
        if not any(answer["removed"] for answer in answers):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path)

    def _put(self, host: HostServer, path: str, size: int, file: BinaryIO, *, may_replace: bool) -> None:
        request = {"request": "put", "path": self._strip_protocol(path), "size": size, "may_replace": may_replace}
        host.request(request, file)

    def _locate(self, name: str) -> Sequence[HostServer]:
        self._listed(name.rpartition("/")[0])
        return self.locations.get(name, ())

    def _listed(self, path: str) -> list[dict[str, Any]]:
        """The files of that path and below on any host."""
        found: dict[str, dict[str, Any]] = {}
        hosts_of: dict[str, list[HostServer]] = {}
        answers = self._ask_all({"request": "list", "path": path})
        for host, answer in zip(self.ring.hosts, answers, strict=True):
            for info in answer["files"]:
                found[info["name"]] = {**info, "type": "file"}
                hosts_of.setdefault(info["name"], []).append(host)
        self.locations.update({name: tuple(hosts) for name, hosts in hosts_of.items()})
        return [found[name] for name in sorted(found)]

    def _ask_all(self, request: dict[str, Any]) -> Iterable[dict[str, Any]]:
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return [answer for answer, _ in pool.map(lambda host: host.request(request), self.ring.hosts)]
