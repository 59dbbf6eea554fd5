"""Launch scripts: a shell script for each launcher, with the hostfile or the YAML that it needs.

A script runs from any directory: `$here` is the one that it lies in, and every file that is written with it is named
by that. The program is a module of the installed toolkit, or a script by its absolute path.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from toolkit.dsconfig.build import ConfigJob
from toolkit.errors import ConfigError

Launcher = Literal["deepspeed", "accelerate", "torchrun", "slurm"]
LaunchFile = Literal[Launcher, "hostfile", "k8s", "skypilot"]
"""What `dstk config` writes: scripts, a list of nodes, and jobs in containers."""
SRUN_OPTIONS = ("--kill-on-bad-exit=0", "--wait=60")
"""Options by which, if a task has failed or saved, the others have a minute to end by themselves: see
docs/checkpoints.md."""
TRAIN = ("-m", "toolkit.training")
"""recipes/train.py of the installed toolkit, as every launcher can start it."""

_RESTARTS = 100
"""Failures after which torchrun gives up; nodes that come, and starts after them, do not count."""
_RENDEZVOUS = "dstk"
"""The backend of toolkit/launch/rendezvous.py, in which spare nodes of an elastic job wait without disturbing it."""
_ELASTIC = """\
# On every node, at any time: when nodes go or come, all ranks start again from the newest checkpoint, in a layout
# planned for the nodes that are there. The first node has torchrun's store, and must stay.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else ranks of two starts would meet in one store
"""


class ShellWord(str):
    """A word as the shell reads it; all others are quoted."""


def beside(name: str) -> ShellWord:
    """Return the word for a file in the script's own directory."""
    return ShellWord(f'"$here"/{shlex.quote(name)}')


_RANK = ShellWord('"$rank"')
_JOB_ID = ShellWord('"$SLURM_JOB_ID"')
_MASTER = ShellWord('"$master:$port"')
_CPUS = ShellWord('--cpus-per-task="$SLURM_CPUS_PER_TASK"')  # since 22.05 srun does not inherit it


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The program of a job, and the nodes it runs on."""

    job: ConfigJob
    program: Sequence[str]
    """A script or `-m` and a module, and its arguments."""
    folder: str = "."
    """Directory in which the script is written."""
    name: str = "train"
    hosts: Sequence[str] = field(default=())
    """Names of the nodes; node1, node2, … if none are given."""
    port: int = 29501
    min_nodes: int | None = None
    """Where nodes may go and come, the fewest with which the job goes on."""
    hours: int = 24
    cpus_per_gpu: int = 8
    activate: str | None = None
    """The `activate` of a virtual environment, for Slurm."""
    accelerate_files: tuple[str, str] | None = None
    """A YAML for accelerate and the JSON that it names, instead of command-line options."""

    @property
    def nodes(self) -> list[str]:
        return list(self.hosts) or [f"node{number}" for number in range(1, self.job.nodes + 1)]

    def hostfile(self) -> str:
        """Return DeepSpeed's list of nodes and their GPUs."""
        return "".join(f"{host} slots={self.job.gpus_per_node}\n" for host in self.nodes)

    def script(self, launcher: Launcher) -> str:
        """Return a shell script that starts the job with `launcher`."""
        if launcher == "slurm":
            return f"#!/usr/bin/env bash\n{self._slurm()}"
        writers = {"deepspeed": self._deepspeed, "accelerate": self._accelerate, "torchrun": self._torchrun}
        here = 'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)\n'
        return f"#!/usr/bin/env bash\nset -euo pipefail\n{here}{writers[launcher]()}"

    def _deepspeed(self) -> str:
        job = self.job
        program = ["--module" if word == "-m" else word for word in self.program]
        if job.nodes == 1:
            return _line("exec", "deepspeed", "--num_gpus", job.gpus_per_node, "--master_port", self.port, *program)
        hosts = beside("hostfile")
        write = f"[ -e {hosts} ] || cat > {hosts} <<'EOF'\n{self.hostfile()}EOF\n"
        line = _line("exec", "deepspeed", "--hostfile", hosts, "--master_port", self.port, *program)
        return f"# On one node; it logs in to the others by ssh.\n{write}{line}"

    def _accelerate(self) -> str:
        job = self.job
        words: list[str | int] = ["exec", "accelerate", "launch"]
        if self.accelerate_files is not None:
            config, json = self.accelerate_files
            words += ["--config_file", beside(config), "--deepspeed_config_file", beside(json)]
        else:
            words += ["--use_deepspeed", "--num_processes", job.layout.world_size]
            if job.nodes > 1:
                words += ["--deepspeed_multinode_launcher", "standard", "--num_machines", job.nodes]
                words += ["--main_process_ip", self.nodes[0]]
            words += ["--main_process_port", self.port]
        if job.nodes == 1:
            return _line(*words, *self.program)
        head = f"# On every node, with its number from 0 to {job.nodes - 1} as the argument.\n"
        return head + 'rank="${1:?node number}"\n' + _line(*words, "--machine_rank", _RANK, *self.program)

    def _torchrun(self) -> str:
        job = self.job
        words: list[str | int] = ["exec", "torchrun", "--nproc_per_node", job.gpus_per_node]
        endpoint = f"{self.nodes[0]}:{self.port}"
        if self.min_nodes is not None:
            words += ["--nnodes", f"{self.min_nodes}:{job.nodes}", "--max_restarts", _RESTARTS]
            words += ["--rdzv_backend", _RENDEZVOUS, "--rdzv_id", self.name, "--rdzv_endpoint", endpoint]
            return f"{_ELASTIC}{_line(*words, *self.program)}"
        if job.nodes == 1:
            return _line(*words, "--master_port", self.port, *self.program)
        backend = _RENDEZVOUS if self._trains else "c10d"
        words += ["--nnodes", job.nodes, "--rdzv_backend", backend, "--rdzv_endpoint", endpoint]
        return "# On every node.\n" + _line(*words, *self.program)

    @property
    def _trains(self) -> bool:
        """Whether the program is this toolkit's training, for which it is installed on every node."""
        return tuple(self.program[:2]) == TRAIN

    def _slurm(self) -> str:
        """One task a rank for this toolkit's program, which resumes; for others one a node, where torchrun starts."""
        job = self.job
        tasks = job.gpus_per_node if self._trains else 1
        cores = self.cpus_per_gpu * job.gpus_per_node // tasks
        directives: dict[str, object] = {
            "job-name": self.name,
            "nodes": job.nodes,
            "ntasks-per-node": tasks,
            "gpus-per-node": job.gpus_per_node,
            "cpus-per-task": cores,
            "mem": 0,  # all memory of a node
            "time": f"{self.hours}:00:00",
            "output": f"{self.folder}/%x-%j.log",
        }
        if self._trains:
            directives |= {"signal": "USR1@300", "open-mode": "append"}
        head = "".join(f"#SBATCH --{name}={shlex.quote(str(value))}\n" for name, value in directives.items())
        activate = f"source {shlex.quote(self.activate)}" if self.activate else "# Activate the environment here."
        requeue = "#SBATCH --requeue" if self._trains else ""
        return (
            f"{head}#SBATCH --exclusive\n{requeue}\n\n{activate}\nset -euo pipefail\n"
            "# Slurm runs a copy of this script: this is where it was written.\n"
            f"here={shlex.quote(self.folder)}\n{self._requeued() if self._trains else self._torchrun_in_slurm()}"
        )

    def _requeued(self) -> str:
        run = [] if self.job.recipe.run_dir else [ShellWord('run_dir=runs/"$SLURM_JOB_ID"')]
        words = [*self.program, *run, "--resume", "auto", ShellWord("|| code=$?")]
        return (
            "# Ranks that Slurm signals, five minutes before the limit, save and exit with 75: then it queues again.\n"
            f"code=0\n{_line('srun', *SRUN_OPTIONS, _CPUS, 'python', *words)}"
            '[ "$code" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"\nexit "$code"\n'
        )

    def _torchrun_in_slurm(self) -> str:
        words: list[str | int] = ["exec", "srun", *SRUN_OPTIONS, _CPUS, "torchrun", "--nnodes", self.job.nodes]
        words += ["--nproc_per_node", self.job.gpus_per_node, "--rdzv_backend", "c10d", "--rdzv_id", _JOB_ID]
        return (
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            f"port=$((20000 + SLURM_JOB_ID % 10000))\n{_line(*words, '--rdzv_endpoint', _MASTER, *self.program)}"
        )

    def accelerate_yaml(self, config_file: str) -> str:
        """Return the YAML of the first node. Raises ConfigError for a layout that accelerate cannot run.

        With `deepspeed_config_file`, accelerate takes stage, offload, clipping and precision from the JSON and rejects
        them here.
        """
        job = self.job
        if job.layout.pp > 1:
            reason = "accelerate has no pipeline parallelism"
            raise ConfigError.of("parallel.pp", job.layout.pp, reason, ("parallel.pp", 1), "start recipes/train.py")
        config: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "deepspeed_config": {
                "deepspeed_config_file": config_file,
                # Every node runs the same line; pdsh would need a hostfile and ssh.
                "deepspeed_multinode_launcher": "standard",
                # Weights are built as shards, so that a model larger than a GPU can be loaded.
                "zero3_init_flag": job.layout.zero_stage == 3,
            },
            "distributed_type": "DEEPSPEED",
            "machine_rank": 0,
            "main_process_port": self.port,
            "num_machines": job.nodes,
            "num_processes": job.layout.world_size,
            "rdzv_backend": "static",
            "same_network": True,
            "use_cpu": False,
        }
        if job.nodes > 1:
            config["main_process_ip"] = self.nodes[0]
        text: str = yaml.safe_dump(config, sort_keys=False)
        return text


def _line(*words: str | int) -> str:
    quoted = [word if isinstance(word, ShellWord) else shlex.quote(str(word)) for word in words]
    lines = []
    line = ""
    for index, word in enumerate(quoted):
        # An option stays with its value.
        fresh = word.startswith("-") or index == 0 or not quoted[index - 1].startswith("-")
        if line and fresh and len(line) + len(word) > 100:
            lines.append(line)
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return " \\\n".join([*lines, line]) + "\n"
