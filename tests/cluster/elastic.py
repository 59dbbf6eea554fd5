"""Elastic jobs on hosts: `torchrun --nnodes MIN:MAX` on each, and its store on a host of its own that stays."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from cluster.hosts import Command, Host, command_environment
from cluster.runs import TRAIN, metrics, write_demo
from toolkit.launch import rendezvous

ENDLESS = 100_000
"""More steps than a run takes that its hosts end."""
STORE_PORT = 29400
STORE = (
    "import time; from torch.distributed import TCPStore; "
    f"store = TCPStore('0.0.0.0', {STORE_PORT}, is_master=True, wait_for_workers=False); time.sleep(10**9)"
)
"""The program that hosts the store of torchrun, as docs/launchers.md has it."""
RENDEZVOUS = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How soon torchrun takes a silent host for lost, and starts again without it: seconds, for tests."""

_AXES = {"dp": "dp", "tp": "tp", "pp": "pp", "z": "zero_stage"}


def write_elastic_demo(folder: Path, *, steps: int = ENDLESS) -> Path:
    """The demo with a planned layout and a learning rate that does not depend on the length of the run.

    With the usual `initializer_range` of 0.02 and 48 channels, some embedding has hardly any variance in some step, and
    its layer norm multiplies the rounding of the gradient: one process with other micro-batches differs by 4e-6 in the
    gradient norm within 600 steps. With 0.1 it differs by 2e-7 in 1,000.
    """
    path = write_demo(folder, train__steps=steps, train__hang_timeout=8, checkpoint__every=10, log__every=1000)
    recipe = yaml.safe_load(path.read_text())
    recipe["parallel"] = "auto"
    recipe["model"]["overrides"]["initializer_range"] = 0.1
    recipe["optimizer"]["lr"] = 1e-4
    recipe["batch"].pop("micro_batch_size")
    recipe["schedule"] = {"name": "constant_with_warmup", "warmup_steps": 2}
    path.write_text(yaml.safe_dump(recipe))
    return path


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
        script: Path = TRAIN,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._cwd = cwd
        self._words: list[str | Path] = ["torchrun", "--nnodes", nodes, "--nproc-per-node", "1"]
        self._words += ["--max-restarts", "1000", "--rdzv-backend", rendezvous.NAME, "--rdzv-id", "job"]
        self._words += ["--rdzv-endpoint", f"{store_host.name}:{STORE_PORT}", "--rdzv-conf", RENDEZVOUS]
        self._words += [script, "--config", recipe, "--resume", "auto", f"run_dir={run_dir}", *overrides]
        self._environment = command_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | dict(variables or {})
        self.commands: dict[str, Command] = {}
        """The last torchrun of each host."""
        store_host.start([sys.executable, "-c", STORE])

    def join(self, host: Host) -> None:
        """Start torchrun on a host."""
        self.commands[host.name] = host.start(self._words, env=self._environment, cwd=self._cwd)

    @property
    def steps(self) -> int:
        """Steps that the run has taken."""
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def has_ended(self) -> bool:
        """Whether the run has taken all its steps: torchrun ends with 0 then, and only then."""
        return any(command.process.poll() == 0 for command in self.commands.values())

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

    @property
    def layout(self) -> str:
        """The layout of the newest start that trains; empty before there is one."""
        path = self.run_dir / "recipe.yaml"
        if not path.exists():
            return ""
        parallel = (yaml.safe_load(path.read_text()) or {}).get("parallel", {})
        return "-".join(f"{short}{parallel.get(name)}" for short, name in _AXES.items())

    @property
    def opened(self) -> int:
        """When the newest start that trains has opened the run directory; grows, and is 0 before there is one."""
        path = self.run_dir / "recipe.yaml"
        return path.stat().st_mtime_ns if path.exists() else 0

    @property
    def starts(self) -> int:
        """How often ranks have begun to train, of the torchruns that were started last."""
        return sum(command.output.count("\n    ranks  ") for command in self.commands.values())

    @property
    def output(self) -> str:
        return "\n".join(f"--- {name}\n{command.output[-5000:]}" for name, command in self.commands.items())
