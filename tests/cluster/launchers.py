"""Every launcher on two hosts, with the scripts that `dstk config` writes, unedited, or the commands of the docs."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Command, Host, command_environment
from cluster.runs import TRAIN


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a recipe in a layout on two hosts. `slurm`: the environment of Slurm's commands, if it runs."""

    nodes: Sequence[Host]
    folder: Path
    """A new directory, for scripts and for the run."""
    recipe: Path
    layout: str
    per_node: int = 2
    port: int = 29501
    slurm: dict[str, str] | None = None
    overrides: Sequence[str] = ()

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def arguments(self) -> list[str]:
        return ["--config", str(self.recipe), "--layout", self.layout, *self.overrides, f"run_dir={self.run_dir}"]

    def script(self, launcher: str) -> Path:
        """Write the launch script with `dstk config`; return its directory."""
        words = [sys.executable, "-m", "toolkit", "config", self.recipe, *self.overrides, f"run_dir={self.run_dir}"]
        words += ["--layout", self.layout, "--nodes", str(len(self.nodes)), "--gpus-per-node", str(self.per_node)]
        words += ["--device", "cpu", "--port", str(self.port), "--launcher", launcher]
        words += [word for node in self.nodes for word in ("--host", node.name)]
        words += ["--output", self.folder / "job"]
        environment = command_environment()
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return self.folder / "job"


def _deepspeed_over_pdsh(start: Start) -> list[Command]:
    return [start.nodes[0].start([start.script("deepspeed") / "launch.sh"], cwd=start.folder)]


def _deepspeed_on_each_host(start: Start) -> list[Command]:
    """`deepspeed --no_ssh` on every host, to which the first host logs in with ssh."""
    hostfile = start.folder / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots={start.per_node}\n" for node in start.nodes))
    environment = command_environment()
    passed_on = [f"{name}={environment[name]}" for name in ("PATH", "PYTHONPATH", "DS_ACCELERATOR", "OMP_NUM_THREADS")]
    commands = []
    for number, node in enumerate(start.nodes):
        options = ["--hostfile", hostfile, "--no_ssh", "--node_rank", number]
        options += ["--master_addr", start.nodes[0].name, "--master_port", start.port]
        words = ["env", f"--chdir={start.folder}", *passed_on, "deepspeed", *options, TRAIN, *start.arguments]
        commands.append(start.nodes[0].start(["ssh", node.name, *map(str, words)]))
    return commands


def _torchrun(start: Start) -> list[Command]:
    script = start.script("torchrun") / "launch.sh"
    return [node.start([script], cwd=start.folder) for node in start.nodes]


def _accelerate(start: Start) -> list[Command]:
    script = start.script("accelerate") / "launch.sh"
    return [node.start([script, str(number)], cwd=start.folder) for number, node in enumerate(start.nodes)]


def _mpirun(start: Start) -> list[Command]:
    slots = ",".join(f"{node.name}:{start.per_node}" for node in start.nodes)
    words = ["mpirun", "--allow-run-as-root", "--host", slots]
    words += ["-x", f"MASTER_ADDR={start.nodes[0].name}", "-x", f"MASTER_PORT={start.port}"]
    for name in ("PATH", "PYTHONPATH", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        words += ["-x", name]
    return [start.nodes[0].start([*words, "python", str(TRAIN), *start.arguments], cwd=start.folder)]


def _sbatch(start: Start) -> list[Command]:
    words = ["sbatch", "--wait", start.script("slurm") / "job.sbatch"]
    return [start.nodes[0].start(words, cwd=start.folder, env=start.slurm)]


LAUNCHERS: dict[str, Callable[[Start], list[Command]]] = {
    "torchrun": _torchrun,
    "deepspeed": _deepspeed_over_pdsh,
    "deepspeed --no_ssh": _deepspeed_on_each_host,
    "accelerate": _accelerate,
    "mpirun": _mpirun,
    "sbatch": _sbatch,
}
"""What each launcher starts: the commands whose ends are that of the run."""
WITH_SLURM = ("sbatch",)
WITH_SSH = ("deepspeed", "deepspeed --no_ssh", "mpirun")
PACKAGES = {"deepspeed": ("pdsh", "pdsh"), "mpirun": ("mpirun", "openmpi-bin")}
"""Commands that launchers need beside ssh and Slurm, with their Debian packages."""


def missing_command(launcher: str) -> str:
    """Why a launcher cannot start here; empty if it can."""
    command, package = PACKAGES.get(launcher, ("", ""))
    return f"{command} is not installed (Debian: {package})" if command and shutil.which(command) is None else ""
