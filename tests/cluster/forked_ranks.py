"""Ranks on hosts, forked from a process that has imported everything: for what a launcher has no part in.

They run recipes/train.py as `srun` or `mpirun` would start them: real rendezvous, real exit codes, output in a file.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cluster.hosts import Host
from cluster.runs import TRAIN

PORT = 29501
_NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedRanks:
    """The ranks of one job: `per_host` on each host. A context manager, in which they run.

    With `launcher_store`, a process of the first host has the store, as the agent of torchrun does.
    """

    def __init__(
        self,
        nodes: Sequence[Host],
        arguments: Sequence[str | Path],
        *,
        per_host: int = 2,
        launcher_store: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = nodes
        self.world_size = per_host * len(nodes)
        self._per_host = per_host
        self._arguments = [str(argument) for argument in arguments]
        self._launcher_store = launcher_store
        self._variables = variables or {}
        self._running: dict[int, int] = {}
        self._launcher = 0
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended; 128 + n for signal n."""

    def __enter__(self) -> "ForkedRanks":
        if self._launcher_store:
            self._launcher = _fork_on(self.nodes[0], self._host_store, self.log(self.nodes[0]))
        for rank in range(self.world_size):
            node = self.nodes[rank // self._per_host]
            pid = _fork_on(node, lambda rank=rank: self._train(rank), self.log(node))
            self._running[pid] = rank
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self._running, *([self._launcher] if self._launcher else [])]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def log(self, node: Host) -> Path:
        """What the ranks of a host print."""
        return node.folder / f"{node.name}.ranks"

    def errors(self, node: Host) -> list[str]:
        """The error lines that a user sees of a host."""
        lines = self.log(node).read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("error: ")]

    def wait(self, timeout: float = 500, *, until: Callable[[], bool] | None = None) -> None:
        """Wait for the end of all ranks, or `until` something is true. Raises AssertionError after `timeout` s."""
        deadline = time.monotonic() + timeout
        while self._running and not (until is not None and until()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {node.name}\n{self.log(node).read_text()[-5000:]}" for node in self.nodes)
                raise AssertionError(f"ranks {sorted(self._running.values())} still run after {timeout} s:\n{logs}")
            for pid in list(self._running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[self._running.pop(pid)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)

    def _variables_of(self, rank: int) -> dict[str, str]:
        values = {"RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": rank % self._per_host}
        values |= {"LOCAL_WORLD_SIZE": self._per_host, "MASTER_ADDR": self.nodes[0].name, "MASTER_PORT": PORT}
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if self._launcher_store else {}
        return {name: str(value) for name, value in values.items()} | store | dict(self._variables)

    def _train(self, rank: int) -> None:
        import torch

        from toolkit.launch.output import reported_errors

        torch.set_num_threads(1)
        os.environ.update(self._variables_of(rank))
        with reported_errors():
            runpy.run_path(str(TRAIN))["main"](self._arguments)

    def _host_store(self) -> None:
        from torch.distributed import TCPStore

        store = TCPStore(self.nodes[0].name, PORT, is_master=True, wait_for_workers=False)
        while store:
            time.sleep(1000)


def _fork_on(host: Host, function: Callable[[], None], log: Path) -> int:
    """Call `function` in a new process of a host; return the process here that ends as it does."""
    namespaces = [os.open(f"/proc/{host.pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    pid = os.fork()
    if pid:
        for namespace in namespaces:
            os.close(namespace)
        return pid
    try:
        for namespace in namespaces:
            if _libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), "setns")
        child = os.fork()  # the process namespace is that of children
        if not child:
            _become(function, host, log)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    finally:
        os._exit(99)


def _become(function: Callable[[], None], host: Host, log: Path) -> NoReturn:
    try:
        from toolkit.parent_process import end_with

        end_with(os.getppid())
        os.chdir(host.folder)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(file=2)  # the test runner redirected it
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        function()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(99)
    sys.stdout.flush()
    os._exit(0)
