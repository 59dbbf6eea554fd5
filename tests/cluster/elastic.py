"""Elastic jobs on hosts: `torchrun --nnodes MIN:MAX` on each, and its store on a host of its own that stays."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.hosts import Command, Host, command_environment
from cluster.runs import TRAIN, metrics

STORE_PORT = 29400
STORE = (
    "import time; from torch.distributed import TCPStore; "
    f"store = TCPStore('0.0.0.0', {STORE_PORT}, is_master=True, wait_for_workers=False); time.sleep(10**9)"
)
"""The program that hosts the store of torchrun, as docs/launchers.md has it."""
RENDEZVOUS = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How soon torchrun takes a silent host for lost, and starts again without it: seconds, for tests."""


class ElasticJob:
    """A job of as many hosts as there are, `nodes` being a range such as 1:4. `store_host` runs no ranks."""

    def __init__(
        self,
        store_host: Host,
        nodes: str,
        recipe: Path,
        run_dir: Path,
        *,
        overrides: Sequence[str] = (),
        per_host: int = 1,
    ) -> None:
        self.run_dir = run_dir
        self._words: list[str | Path] = ["torchrun", "--nnodes", nodes, "--nproc-per-node", str(per_host)]
        self._words += ["--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        self._words += ["--rdzv-endpoint", f"{store_host.name}:{STORE_PORT}", "--rdzv-conf", RENDEZVOUS]
        self._words += [TRAIN, "--config", recipe, "--resume", "auto", f"run_dir={run_dir}", *overrides]
        self._environment = command_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.commands: dict[str, Command] = {}
        """The last torchrun of each host."""
        store_host.start([sys.executable, "-c", STORE])

    def join(self, host: Host) -> None:
        """Start torchrun on a host."""
        self.commands[host.name] = host.start(self._words, env=self._environment)

    @property
    def steps(self) -> int:
        """Steps that the run has taken."""
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def lines(self) -> list[dict[str, float]]:
        return metrics(self.run_dir)

    def wait(self, until: Callable[[], bool], timeout: float = 240) -> None:
        """Raises AssertionError, with what the hosts printed, after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def wait_for_more_steps(self, count: int = 5) -> None:
        """Wait until `count` more steps were taken, whatever a restart takes back."""
        reached = self.steps
        self.wait(lambda: self.steps >= reached + count)

    def layouts(self) -> list[str]:
        """The layout of each start, as one rank printed it."""
        lines = [line for command in self.commands.values() for line in command.output.splitlines()]
        return [line.split()[4] for line in lines if line.startswith("    ranks  ")]

    @property
    def output(self) -> str:
        return "\n".join(f"--- {name}\n{command.output[-5000:]}" for name, command in self.commands.items())
