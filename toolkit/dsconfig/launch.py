"""How a job is started: a shell script for each launcher, with the hostfile where one is needed."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.dsconfig.job import ConfigJob

Launcher = Literal["deepspeed", "accelerate", "torchrun", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and where."""

    job: ConfigJob
    program: Sequence[str]
    """The script and its arguments."""
    name: str = "train"
    hosts: Sequence[str] = field(default=())
    """Names of the nodes; node1, node2, … where none are given."""
    port: int = 29501
    hours: int = 24
    accelerate_config: str | None = None
    """A YAML for accelerate, in place of options."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, one each."""
        return list(self.hosts) or [f"node{number}" for number in range(1, self.job.nodes + 1)]

    def hostfile(self) -> str:
        """DeepSpeed's list of nodes and their GPUs."""
        return "".join(f"{host} slots={self.job.gpus_per_node}\n" for host in self.nodes)

    def script(self, launcher: Launcher) -> str:
        """A shell script that starts the job with `launcher`."""
        writers = {
            "deepspeed": self._deepspeed,
            "accelerate": self._accelerate,
            "torchrun": self._torchrun,
            "slurm": self._slurm,
        }
        return "#!/usr/bin/env bash\n" + writers[launcher]()

    def _deepspeed(self) -> str:
        job = self.job
        if job.nodes == 1:
            return _line("deepspeed", "--num_gpus", job.gpus_per_node, "--master_port", self.port, *self.program)
        write = f"cat > hostfile <<'EOF'\n{self.hostfile()}EOF\n"
        line = _line("deepspeed", "--hostfile", "hostfile", "--master_port", self.port, *self.program)
        return f"# On one node; it logs in to the others by ssh.\n{write}{line}"

    def _accelerate(self) -> str:
        job = self.job
        words: list[str | int] = ["accelerate", "launch"]
        if self.accelerate_config is not None:
            words += ["--config_file", self.accelerate_config]
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
        if job.nodes == 1:
            return _line("torchrun", "--nproc_per_node", job.gpus_per_node, "--master_port", self.port, *self.program)
        words: list[str | int] = [
            "torchrun",
            "--nnodes",
            job.nodes,
            "--nproc_per_node",
            job.gpus_per_node,
            "--rdzv_backend",
            "c10d",
        ]
        return "# On every node.\n" + _line(*words, "--rdzv_endpoint", f"{self.nodes[0]}:{self.port}", *self.program)

    def _slurm(self) -> str:
        """One task a node, in which torchrun starts the ranks: it works whatever the program knows about Slurm."""
        job = self.job
        directives = {
            "job-name": self.name,
            "nodes": job.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": job.gpus_per_node,
            "time": f"{self.hours}:00:00",
        }
        head = "".join(f"#SBATCH --{name}={value}\n" for name, value in directives.items())
        words: list[str | int] = ["srun", "--kill-on-bad-exit=1", "torchrun", "--nnodes", job.nodes, "--nproc_per_node"]
        words += [job.gpus_per_node, "--rdzv_backend", "c10d", "--rdzv_id", _JOB_ID, "--rdzv_endpoint", _MASTER]
        return (
            f"{head}\nset -euo pipefail\n"
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            f"port=$((20000 + SLURM_JOB_ID % 10000))\n{_line(*words, *self.program)}"
        )


_RANK, _JOB_ID, _MASTER = '"$rank"', '"$SLURM_JOB_ID"', '"$master:$port"'
"""Words that the shell fills in."""


def _line(*words: str | int) -> str:
    shell = (_RANK, _JOB_ID, _MASTER)
    quoted = [str(word) if word in shell else shlex.quote(str(word)) for word in words]
    lines, line = [], ""
    for index, word in enumerate(quoted):
        # An option stays with its value.
        fresh = word.startswith("-") or index == 0 or not quoted[index - 1].startswith("-")
        if line and fresh and len(line) + len(word) > 100:
            lines.append(line)
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return " \\\n".join([*lines, line]) + "\n"
