"""Hosts of a test are apart from each other and from this machine, and nothing is left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.hosts import hosts, require_hosts

require_hosts()
HOLD = """
import sys, time
from pathlib import Path
from cluster.hosts import hosts
with hosts(2, Path(sys.argv[1])) as made:
    command = made[0].start(["sleep", "1000"])
    print(*(host.pid for host in made), made[0].switch.pid, command.process.pid, flush=True)
    time.sleep(1000)
"""


def mounts_and_links() -> list[str]:
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return [Path("/proc/self/mountinfo").read_text(), links]


def test_hosts_reach_each_other_by_name_and_have_names_of_their_own(tmp_path: Path) -> None:
    with hosts(3, tmp_path) as made:
        said = [host.run(["sh", "-c", "hostname; hostname -I"]).split() for host in made]
        assert said == [["node1", "10.77.0.1"], ["node2", "10.77.0.2"], ["node3", "10.77.0.3"]]
        server = made[1].start([sys.executable, "-c", SERVE])
        assert made[0].run([sys.executable, "-c", ASK.format(host="node2")], timeout=60).strip() == "node2"
        assert server.wait(30) == 0


SERVE = "import socket; s = socket.create_server(('', 5000)); s.accept()[0].send(socket.gethostname().encode())"
ASK = """
import socket, time
while True:
    try:
        print(socket.create_connection(("{host}", 5000), timeout=2).recv(9).decode())
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
"""


def test_a_cut_host_is_unreachable_until_it_is_connected_again(tmp_path: Path) -> None:
    listen = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept(); s.accept()"
    ask = "import socket; socket.create_connection(('node2', 5000), timeout=2)"
    with hosts(2, tmp_path) as (first, second):
        server = second.start([sys.executable, "-c", listen])
        deadline = time.monotonic() + 60
        while "up" not in server.output and time.monotonic() < deadline:
            time.sleep(0.05)
        first.run([sys.executable, "-c", ask])
        second.cut()
        assert first.start([sys.executable, "-c", ask]).wait(30) == 1
        second.connect()
        first.run([sys.executable, "-c", ask])


def test_processes_of_a_host_cannot_be_seen_from_another_one(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (first, second):
        first.start(["sleep", "1234"])
        assert "1234" not in second.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])


def test_nothing_is_left_after_a_failure(tmp_path: Path) -> None:
    before = mounts_and_links()
    pids = []

    def fail() -> None:
        with hosts(2, tmp_path) as made:
            made[0].start(["sleep", "1000"])
            pids.extend([made[0].switch.pid, *(host.pid for host in made)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(pids) == 3
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert mounts_and_links() == before


def test_nothing_is_left_after_the_test_was_killed(tmp_path: Path) -> None:
    before = mounts_and_links()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, env=env) as test:
        assert test.stdout is not None
        pids = [int(word) for word in test.stdout.readline().split()]
        test.send_signal(signal.SIGKILL)
    assert len(pids) == 4
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert mounts_and_links() == before
