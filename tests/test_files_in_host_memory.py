"""Files in the memory of hosts: each on two of them, read in parts, gone with the launcher."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from toolkit.errors import RunError
from toolkit.host_memory import filesystem, server, start
from toolkit.host_memory.filesystem import HostMemory, HostServer, Ring, join
from toolkit.host_memory.start import server_of_this_host

connect = socket.create_connection


class Hosts:
    """Servers of as many launchers as there are hosts, all on this machine."""

    def __init__(self, count: int) -> None:
        self.launchers = [subprocess.Popen(["sleep", "1000"]) for _ in range(count)]
        self.servers = tuple(server_of_this_host(launcher.pid, "127.0.0.1") for launcher in self.launchers)

    def on(self, host: int, *, lost: tuple[int, ...] = ()) -> HostMemory:
        """The file system as a rank of that host has it, when some hosts are lost."""
        servers = [server for number, server in enumerate(self.servers) if number not in lost]
        join(Ring(hosts=tuple(servers), here=servers.index(self.servers[host])))
        return fsspec.filesystem("hostmem")

    def end(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(3)
    yield made
    made.end()


def test_a_file_is_on_the_host_that_wrote_it_and_on_the_next_one(hosts: Hosts, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(content)
    hosts.on(1).put_file(str(tmp_path / "file"), "hostmem://run/step-1/file")
    for lost in ((), (0,), (1,), (2,), (0, 1), (0, 2)):
        reader = hosts.on(next(number for number in range(3) if number not in lost), lost=lost)
        assert reader.info("hostmem://run/step-1/file")["size"] == len(content)
        assert reader.cat_file("hostmem://run/step-1/file", 1_000_003, 2_000_001) == content[1_000_003:2_000_001]
        assert reader.cat_file("hostmem://run/step-1/file") == content
    with pytest.raises(FileNotFoundError):
        hosts.on(0, lost=(1, 2)).cat_file("hostmem://run/step-1/file")


def test_directories_are_what_paths_say(hosts: Hosts) -> None:
    files = hosts.on(0)
    files.pipe_file("hostmem://run/a/one", b"1")
    files.pipe_file("hostmem://run/a/b/two", b"22")
    hosts.on(2).pipe_file("hostmem://run/three", b"")
    assert files.ls("hostmem://run", detail=False) == ["run/a", "run/three"]
    assert {name: info["size"] for name, info in files.find("hostmem://run/a", detail=True).items()} == {
        "run/a/one": 1,
        "run/a/b/two": 2,
    }
    assert files.info("hostmem://run/a")["type"] == "directory"
    assert files.cat_file("hostmem://run/three") == b""
    files.rm("hostmem://run/a", recursive=True)
    assert files.find("hostmem://run") == ["run/three"]
    for path in ("hostmem://run/a", "hostmem://ru"):
        with pytest.raises(FileNotFoundError):
            files.ls(path)
    with pytest.raises(FileExistsError):
        files.pipe_file("hostmem://run/three", b"3", mode="create")


def test_other_jobs_and_what_is_no_request_are_refused(hosts: Hosts) -> None:
    own = hosts.servers[0]
    other = HostServer(name="here", address=own.address, port=own.port, secret="guessed")
    with pytest.raises(PermissionError):
        other.request({"request": "list", "path": ""})
    with pytest.raises(OSError, match="not a request") as caught:
        own.request({"request": "list"})
    assert caught.value.errno == errno.EINVAL
    assert own.request({"request": "list", "path": ""})[0] == {"files": []}


def test_a_file_that_has_no_room_is_refused_before_it_is_sent(hosts: Hosts) -> None:
    files = hosts.on(0)
    with pytest.raises(OSError, match="no room") as caught:
        hosts.servers[0].request({"request": "put", "path": "big", "size": 1 << 60, "may_replace": True})
    assert caught.value.errno == errno.ENOSPC
    assert files.find("hostmem://") == []


def test_a_file_that_did_not_arrive_whole_is_not_there(hosts: Hosts) -> None:
    own = hosts.servers[0]
    with socket.create_connection((own.address, own.port)) as connection:
        line = f'{{"request": "put", "path": "part", "size": 10, "may_replace": true, "secret": "{own.secret}"}}\n'
        connection.sendall(line.encode() + b"12345")
    assert hosts.on(0).find("hostmem://") == []


def test_files_of_this_host_are_read_in_the_memory_of_its_server(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    request = HostServer.request
    monkeypatch.setattr(
        HostServer,
        "request",
        lambda server, text, *body: requests.append(text["request"]) or request(server, text, *body),
    )
    files = hosts.on(0)
    content = os.urandom(1_000_000)
    files.pipe_file("hostmem://run/file", content)
    assert files.cat_file("hostmem://run/file", 10, 20) == content[10:20]
    files.pipe_file("hostmem://run/file", content[::-1])
    assert files.cat_file("hostmem://run/file") == content[::-1]
    assert "get" not in requests
    assert hosts.on(2).cat_file("hostmem://run/file") == content[::-1]
    assert requests[-1] == "get"  # from another host
    files = hosts.on(0)
    files.rm("hostmem://run")
    with pytest.raises(FileNotFoundError):
        files.cat_file("hostmem://run/file")


def test_requests_to_a_host_share_a_connection(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(socket, "create_connection", lambda *arguments: opened.append(arguments) or connect(*arguments))
    reader = hosts.on(0)
    for number in range(20):
        reader.pipe_file(f"hostmem://run/{number}", b"content")
        assert reader.cat_file(f"hostmem://run/{number}", 1, 4) == b"ont"
    with pytest.raises(FileNotFoundError):
        reader.cat_file("hostmem://run/nothing")
    assert len(opened) <= 3  # one a host


@pytest.mark.parametrize("size", [7, 3_000_000])
def test_a_connection_that_the_server_has_closed_is_made_again(hosts: Hosts, size: int) -> None:
    content = os.urandom(size)
    writer = hosts.on(0)
    writer.pipe_file("hostmem://run/first", content)
    for host in hosts.servers[:2]:
        for connection in filesystem._connections._idle[host]:
            connection.shutdown(socket.SHUT_RDWR)
    writer.pipe_file("hostmem://run/second", content)
    assert hosts.on(1).cat_file("hostmem://run/second") == content


def test_a_forked_process_has_connections_of_its_own(hosts: Hosts) -> None:
    files = hosts.on(0)
    content = os.urandom(1000)
    files.pipe_file("hostmem://run/file", content)
    child = os.fork()
    if not child:
        os._exit(0 if all(files.cat_file("hostmem://run/file") == content for _ in range(200)) else 1)
    assert all(files.cat_file("hostmem://run/file") == content for _ in range(200))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_server_is_found_again_and_ends_with_its_launcher(hosts: Hosts) -> None:
    launcher = hosts.launchers[0]
    assert server_of_this_host(launcher.pid, "127.0.0.1") == hosts.servers[0]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(server.door_of(launcher.pid))
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    pytest.fail("the server outlives its launcher")


def test_the_server_of_another_user_is_not_taken(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_START_SECONDS", 0.2)
    monkeypatch.setattr(server, "user_of", lambda connection: os.getuid() + 1)
    with pytest.raises(RunError, match="a process of another user has its name"):
        server_of_this_host(hosts.launchers[0].pid, "127.0.0.1")


def test_a_second_server_of_a_launcher_ends_at_once(hosts: Hosts) -> None:
    words = [sys.executable, "-m", server.__name__, str(hosts.launchers[0].pid)]
    assert subprocess.run(words, timeout=60).returncode == 0
