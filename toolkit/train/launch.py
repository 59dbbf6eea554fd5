"""Launch: which rank am I, whoever started me, and how do I reach the others?

Understands `deepspeed`, `torchrun` and `accelerate launch` (RANK, WORLD_SIZE, LOCAL_RANK), `srun` (SLURM_PROCID, …),
`mpirun` (OMPI_COMM_WORLD_RANK, …) and plain `python` (one rank).
"""

import hashlib
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from toolkit.errors import RunError, ToolkitError
from toolkit.train.spawn import free_port
from toolkit.train.watchdog.board import Board
from toolkit.train.watchdog.stillness import longest_limit_seconds
from toolkit.train.watchdog.watchdog import Watchdog

_DEFAULT_PORT = 29500
_SECONDS_FOR_THE_REPORTER = 5
_departing: list[Callable[[], None]] = []
"""Who shall know, after the user, that this process ends."""
_NOISY = (
    *("DeepSpeed", "deepspeed", "torch.distributed"),
    *("transformers", "accelerate", "datasets", "huggingface_hub"),
)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """One process among those of a job. `launcher` is for messages only."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    launcher: str

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the environment that a launcher left. Raises RunError when it is contradictory."""
        if "RANK" in env and "WORLD_SIZE" in env:
            found = cls(
                rank=_integer(env, "RANK"),
                world_size=_integer(env, "WORLD_SIZE"),
                local_rank=_integer(env, "LOCAL_RANK", "0"),
                master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
                master_port=_integer(env, "MASTER_PORT", str(_DEFAULT_PORT)),
                launcher="environment",
            )
        elif _slurm_tasks(env) > 1:
            # srun sets these for every task; a bare `python` inside an sbatch script has SLURM_NTASKS but runs alone,
            # and only a task that srun started has a step id.
            found = cls(
                rank=_integer(env, "SLURM_PROCID"),
                world_size=_slurm_tasks(env),
                local_rank=_integer(env, "SLURM_LOCALID"),
                master_addr=env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1")),
                # Every task of the job must derive the same port, and jobs on one node different ones.
                master_port=_integer(env, "MASTER_PORT", str(15000 + int(env.get("SLURM_JOB_ID", "0")) % 20000)),
                launcher="srun",
            )
        elif "OMPI_COMM_WORLD_RANK" in env:
            found = cls(
                rank=_integer(env, "OMPI_COMM_WORLD_RANK"),
                world_size=_integer(env, "OMPI_COMM_WORLD_SIZE"),
                local_rank=_integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
                master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
                master_port=_integer(env, "MASTER_PORT", str(_DEFAULT_PORT)),
                launcher="mpirun",
            )
        else:
            found = cls(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=0, launcher="python")
        if not 0 <= found.rank < found.world_size:
            raise RunError(
                f"rank {found.rank} of {found.world_size} ranks: ranks count from 0. "
                "Check RANK and WORLD_SIZE in the environment, or start through `deepspeed` or `torchrun`."
            )
        return found

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


def pick_device(environment: RankEnvironment) -> torch.device:
    """The CUDA device of this local rank, or the CPU where there is none (or DS_ACCELERATOR=cpu asks for it)."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        # DeepSpeed guesses its accelerator from what is installed; ranks must not guess differently.
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if environment.local_rank >= devices:
        error = RunError(
            f"local rank {environment.local_rank} on a machine with {devices} GPUs: one rank uses one GPU. "
            f"Start at most {devices} ranks on this machine."
        )
        error.scope = "rank"
        raise error
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)


@contextmanager
def process_group(
    environment: RankEnvironment, device: torch.device, *, hang_timeout_seconds: float = 0
) -> Iterator[Watchdog]:
    """Join the job: create the default process group, and leave it in order at the end.

    In between, a watchdog ends this rank when another one dies; and when one makes no progress for
    `hang_timeout_seconds`, where that is not 0: then somebody has to call `mark`.
    """
    os.environ.update(environment.variables)
    if environment.world_size == 1 and environment.master_port == 0:
        os.environ["MASTER_PORT"] = str(free_port())
    minutes = _integer(os.environ, "DEEPSPEED_TIMEOUT", "30")
    # Who hangs shall be found before the backend gives up without a name.
    patience = timedelta(seconds=max(60 * minutes, 2 * longest_limit_seconds(hang_timeout_seconds)))
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(minutes=minutes))))
    watchdog = Watchdog(
        Board(store, rank=rank, world_size=world_size),
        local_rank=environment.local_rank,
        timeout_seconds=hang_timeout_seconds,
        # torchrun keeps the store in a process of its own.
        keeper=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
    )
    watchdog.start()
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )
        yield watchdog
    except BaseException as error:
        watchdog.note(error)
        _departing.append(watchdog.depart)
        raise
    watchdog.finish()
    # Ranks that tear the group down while others still use it abort them (gloo) or hang (NCCL): so all together, and
    # not at all when something went wrong.
    dist.barrier()
    dist.destroy_process_group()


def check_same_everywhere(fingerprint: str, device: torch.device) -> None:
    """Raise RunError where ranks differ in `fingerprint`: they would train on different things without a word."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    others = [rank for rank, value in enumerate(every) if not torch.equal(value, every[0])]
    if others:
        shown = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
        error = RunError(
            f"the recipe or the text of rank {shown} is not that of rank 0. "
            "Give every machine the same recipe, files and data.source."
        )
        error.scope = "job"
        raise error


def quiet(*, debug: bool) -> None:
    """Silence the start-up noise of DeepSpeed and its neighbours; with `debug`, let everything through."""
    level = logging.INFO if debug else logging.ERROR
    for name in _NOISY:
        logging.getLogger(name).setLevel(level)
    if debug:
        return
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn what goes wrong into one line on stderr (by one rank of those that see it) and an exit code.

    A failing rank leaves at once: tearing a process group down while others use it aborts or hangs.
    """
    try:
        yield
        return
    except ToolkitError as error:
        if os.environ.get("DSTK_TRACEBACK") == "1":
            raise
        if not error.is_reported_by(os.environ):
            # The rank that reports it ends first, and the launcher then ends us. If we are still here, nobody did.
            time.sleep(_SECONDS_FOR_THE_REPORTER)
        for line in str(error).split("\n"):
            print(f"error: {line}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for depart in _departing:
        depart()
    os._exit(code)


def _integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or not re.fullmatch(r"\d+", text):
        raise RunError(
            f"{name}={text!r} in the environment: a whole number is needed. Check how the ranks are started."
        )
    return int(text)


def _slurm_tasks(env: Mapping[str, str]) -> int:
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return 1
    return _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")


def _first_host(nodelist: str) -> str:
    """'node[03-05,09],gpu1' -> 'node03': the first host of a Slurm list, without calling scontrol."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    return (match[1] + (match[2] or "")) if match else nodelist
