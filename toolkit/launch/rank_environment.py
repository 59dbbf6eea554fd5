"""RankEnvironment: the rank of this process and where the ranks meet, whichever launcher started it.

Understands `deepspeed`, `torchrun` and `accelerate launch` (RANK, WORLD_SIZE, LOCAL_RANK), `srun` (SLURM_PROCID, …),
`mpirun` (OMPI_COMM_WORLD_RANK, …) and plain `python` (one rank). Only `pick_device` imports torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from toolkit.errors import RunError

if TYPE_CHECKING:
    import torch

_DEFAULT_PORT = "29500"


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """One process of a job. `master_port` 0 means any free port."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the environment variables that a launcher sets. Raises RunError if they are contradictory."""
        default_addr = "127.0.0.1"
        default_port = _DEFAULT_PORT
        if "RANK" in env and "WORLD_SIZE" in env:
            rank = "RANK"
            world_size = "WORLD_SIZE"
            local_rank = "LOCAL_RANK"
            env = {"LOCAL_RANK": "0", **env}
        elif (tasks := _slurm_tasks(env)) is not None:
            rank = "SLURM_PROCID"
            world_size = tasks
            local_rank = "SLURM_LOCALID"
            default_addr = _first_host(env.get("SLURM_STEP_NODELIST", default_addr))
            # Every task of the job must derive the same port, and jobs on one node different ones.
            default_port = str(15000 + int(env.get("SLURM_JOB_ID", "0")) % 20000)
        elif "OMPI_COMM_WORLD_RANK" in env:
            rank = "OMPI_COMM_WORLD_RANK"
            world_size = "OMPI_COMM_WORLD_SIZE"
            local_rank = "OMPI_COMM_WORLD_LOCAL_RANK"
            _check_mpi_address(env)
        else:
            return cls()
        environment = cls(
            rank=read_integer(env, rank),
            world_size=read_integer(env, world_size),
            local_rank=read_integer(env, local_rank),
            master_addr=env.get("MASTER_ADDR") or default_addr,
            master_port=read_integer(env, "MASTER_PORT", default_port),
        )
        if not 0 <= environment.rank < environment.world_size:
            raise RunError(
                f"rank {environment.rank} of {environment.world_size} ranks: ranks count from 0. "
                "Check RANK and WORLD_SIZE in the environment, or start through `deepspeed` or `torchrun`."
            )
        return environment

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def pick_device(environment: RankEnvironment) -> "torch.device":
    """Return the CUDA device of this local rank, or the CPU without CUDA or with DS_ACCELERATOR=cpu."""
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        # DeepSpeed guesses its accelerator from what is installed; ranks must not guess differently.
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if environment.local_rank >= devices:
        raise RunError(
            f"local rank {environment.local_rank} on a machine with {devices} GPUs: one rank uses one GPU. "
            f"Start at most {devices} ranks on this machine.",
            scope="rank",
        )
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)


def read_integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Read a whole number from the environment. Raises RunError if it is not one, or missing without a default."""
    text = env.get(name, default)
    if text is None or not re.fullmatch(r"[0-9]{1,40}", text):
        raise RunError(
            f"{name}={text!r} in the environment: a whole number is needed. Check how the ranks are started."
        )
    return int(text)


def _slurm_tasks(env: Mapping[str, str]) -> str | None:
    """The variable with the number of tasks, if srun started several.

    A bare `python` inside an sbatch script has SLURM_NTASKS but runs alone: only tasks of srun have a step id.
    """
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return name if read_integer(env, name) > 1 else None


def _check_mpi_address(env: Mapping[str, str]) -> None:
    """Raise RunError if mpirun started ranks on several machines and nothing says on which one they meet."""
    here = read_integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "0")
    ranks = read_integer(env, "OMPI_COMM_WORLD_SIZE")
    if 0 < here < ranks and not env.get("MASTER_ADDR"):
        raise RunError(
            f"mpirun started {here} of {ranks} ranks on this machine, and MASTER_ADDR is not set: ranks meet on the "
            "machine of rank 0. Name it: mpirun -x MASTER_ADDR=HOST.",
            scope="job",
        )


def _first_host(nodelist: str) -> str:
    """'node[03-05,09],gpu1' -> 'node03': the first host of a Slurm list, without calling scontrol."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    return (match[1] + (match[2] or "")) if match else nodelist
