"""Hosts in one machine: two to four, each with an address, a name, mounts and processes of its own, joined by a bridge.

    with hosts(2, folder) as (node1, node2):
        node1.run(["ping", "-c1", "node2"])

A host is a process with network, host name, mount, IPC and process namespaces, as a container has; one more process
holds the bridge. These namespaces have no names, so tests in parallel cannot collide. The kernel ends a host, with
its processes, mounts and links, when this process ends, also when it is killed.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TOOLS = ("ip", "nsenter", "unshare", "setpriv")
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
_START_SECONDS = 60
_SET_UP = """
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind {hosts} /etc/hosts
ip link set lo up
echo up
exec env --ignore-signal=CHLD sleep infinity
"""
"""The first process of a host; with SIGCHLD ignored, the kernel reaps what its children leave."""


@cache
def missing() -> str:
    """Why no hosts can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts in network namespaces need {', '.join(absent)} (Debian: iproute2, util-linux)"
    script = (
        "ip link add name bridge0 type bridge && ip link add name a type veth peer name c && mount -t tmpfs tmpfs /run"
    )
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", script], capture_output=True, text=True
    )
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def require_hosts() -> None:
    """Skip the test module that calls this, as one skipped test, where no hosts can be made."""
    if reason := missing():
        pytest.skip(reason, allow_module_level=True)


class Command:
    """A command that runs on a host. Its output is in `log`: no pipe, which a child of it could keep open."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def last_error(self) -> str:
        """The last line that begins with `error: `, also behind the prefix of a launcher; empty without one."""
        lines = [line[line.index("error: ") :] for line in self.output.splitlines() if "error: " in line]
        return lines[-1] if lines else ""

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises AssertionError, with the output, after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output[-6000:]}") from None


@dataclass(kw_only=True)
class Host:
    """One host, which `power_on` starts."""

    name: str
    address: str
    switch: "Process"
    folder: Path
    known: Path
    """The names and addresses of all hosts."""
    _process: "Process | None" = field(default=None, init=False)
    _commands: int = field(default=0, init=False)

    @property
    def pid(self) -> int:
        """The first process of this host, as this machine counts."""
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> str:
        """The end of its cable at the bridge."""
        return f"to-{self.name}"

    def power_on(self) -> None:
        """Start this host, with nothing that an earlier start had in memory."""
        process = _first_process(self.name, self.known)
        self._process = process
        peer = ("peer", "name", "eth0", "netns", str(process.pid))
        self.switch.run("ip", "link", "add", "name", self.port, "type", "veth", *peer)
        self.switch.run("ip", "link", "set", self.port, "master", "bridge0", "up")
        process.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        process.run("ip", "link", "set", "eth0", "up")

    def end(self) -> None:
        """End all that runs on this host."""
        if self._process is not None:
            self._process.end()
            # The kernel removes the cable with the host's network, but later.
            words = ["nsenter", f"--target={self.switch.pid}", "--net", "ip", "link", "delete", self.port]
            subprocess.run(words, capture_output=True, timeout=30)

    def processes(self) -> dict[int, str]:
        """The processes of this host as this machine counts them, with their command lines."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.readlink(path / "ns" / "pid") == namespace:
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
        return found

    def start(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Command:
        """Start a command on this host, in the shared folder or in `cwd`."""
        self._commands += 1
        log = self.folder / f"{self.name}-{self._commands}.log"
        words = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "env", f"--chdir={cwd or self.folder}", *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in words],
                env=env if env is not None else command_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Command(process, log)

    def run(self, command: Sequence[str | Path], *, timeout: float = 30, cwd: Path | None = None) -> str:
        """Run a command on this host to its end; return its output. Raises AssertionError if it fails."""
        started = self.start(command, cwd=cwd)
        code = started.wait(timeout)
        assert code == 0, f"{shlex.join(map(str, command))} on {self.name} ended with {code}:\n{started.output}"
        return started.output

    def cut(self) -> None:
        """Pull the cable: packets are lost without a word, and this host does not notice."""
        self.switch.run("ip", "link", "set", self.port, "nomaster")

    def connect(self) -> None:
        """Plug the cable in again."""
        self.switch.run("ip", "link", "set", self.port, "master", "bridge0")

    def disturb(self, *, loss_percent: float = 0.0, delay_ms: float = 0.0) -> str:
        """Lose or delay packets that this host sends (netem) or, without netem, that it gets (nft, which only loses).

        Returns why that is not possible here; empty if it is done.
        """
        netem = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem"]
        netem += ["delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
        if self.start(netem).wait(30) == 0:
            return ""
        if delay_ms or shutil.which("nft") is None:
            return "the kernel has no netem (CONFIG_NET_SCH_NETEM)"
        rule = f"iif eth0 numgen random mod 1000 < {round(10 * loss_percent)} drop"
        table = self.folder / f"{self.name}.nft"
        table.write_text(f"table inet loss {{\nchain in {{\ntype filter hook input priority 0;\n{rule}\n}}\n}}\n")
        return "" if self.start(["nft", "-f", table]).wait(30) == 0 else "neither netem nor nft can lose packets here"

    def kill_processes(self) -> None:
        """Kill all that runs on this host but for its first process, whose kernel closes their connections."""
        self.start(["sh", "-c", "kill -KILL -1"]).process.wait(30)

    def lose(self) -> None:
        """Take the power away: no connection is closed, and nothing runs any more. `power_on` starts it again."""
        self.cut()
        self.end()


@dataclass(kw_only=True)
class Process:
    """The first process of namespaces; `parent` has made them and ends with it."""

    parent: subprocess.Popen[bytes]
    pid: int

    def run(self, *command: str) -> None:
        """Run a command in its network namespace."""
        words = ["nsenter", f"--target={self.pid}", "--net", *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"

    def end(self) -> None:
        self.parent.kill()
        self.parent.wait()
        deadline = time.monotonic() + 30
        while _exists(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Make hosts node1, node2, … that share `folder` and all else of this machine's disk but /run and /dev/shm."""
    names = [f"node{number}" for number in range(1, count + 1)]
    addresses = [f"10.77.0.{number}" for number in range(1, count + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "hosts"
    lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    known.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    with ExitStack() as stack:
        switch = _first_process("switch", known)
        stack.callback(switch.end)
        switch.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
        switch.run("ip", "link", "set", "bridge0", "up")
        made = []
        for name, address in zip(names, addresses, strict=True):
            host = Host(name=name, address=address, switch=switch, folder=folder, known=known)
            stack.callback(host.end)
            host.power_on()
            made.append(host)
        yield made


def command_environment() -> dict[str, str]:
    """The environment of commands on hosts: this Python's commands first, this checkout's toolkit, CPU ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return env | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _first_process(name: str, known: Path) -> Process:
    """Make namespaces. The kernel ends them with this thread, or with the process that is returned."""
    script = _SET_UP.format(name=name, hosts=shlex.quote(str(known)))
    die = ["setpriv", "--pdeathsig", "KILL"]
    words = [*die, "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    parent = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert parent.stdout is not None
    with parent.stdout as output:
        said = output.readline().decode()
        if said != "up\n":
            parent.kill()
            raise AssertionError(f"{name} did not start: {said}{output.read().decode()}")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    return Process(parent=parent, pid=int(children[0]))


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
