"""Elastic launches: `torchrun --nnodes 1:4` starts all ranks again when a host goes or comes, and their number changes.

Not every number of ranks has a layout. The plan of an elastic launch takes as many as it can, and the last ranks are
spares until the next start. Imports no torch.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from toolkit.errors import RunError, SpareError
from toolkit.launch.health.heartbeat import PEER_FAILED
from toolkit.launch.health.local_process import exit_now

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_ENDED = "ended"
"""The key of a job's store that says to spares that the run has ended well."""
_POLL_SECONDS = 1.0
_HEARD_SECONDS = 5.0
"""The store ends with rank 0, which waits so long for spares to read that the run has ended."""
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """The `torchrun` that started this rank, as far as it decides what happens when hosts go and come."""

    least_hosts: int
    most_hosts: int
    max_restarts: int
    run_id: str
    """The launch's `--rdzv-id`; `none` where it has none."""

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ, command: Sequence[str] | None = None) -> Self | None:
        """Read the launcher's command line; None where another launcher started this rank, or none."""
        if "TORCHELASTIC_RUN_ID" not in env:
            return None
        words = _command_of(os.getppid()) if command is None else command
        nodes = re.fullmatch(r"(\d+)(?::(\d+))?", _option(words, "--nnodes") or env.get("PET_NNODES", "1"))
        least = int(nodes[1]) if nodes else 1
        most = int(nodes[2] or nodes[1]) if nodes else 1
        max_restarts = int(env.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        return cls(least_hosts=least, most_hosts=most, max_restarts=max_restarts, run_id=env["TORCHELASTIC_RUN_ID"])

    @property
    def is_elastic(self) -> bool:
        """Whether the number of hosts may change from start to start."""
        return self.most_hosts > self.least_hosts

    @property
    def starts_again(self) -> bool:
        """Whether several hosts start their ranks again when one of them goes or comes."""
        return self.most_hosts > 1 and (self.is_elastic or self.max_restarts > 0)

    @property
    def launch(self) -> str:
        """The id that the starts of one launch share; empty where they have none of their own."""
        return self.run_id if self.starts_again and self.run_id != "none" else ""

    def check_store(self, env: Mapping[str, str] = os.environ) -> None:
        """Raise RunError if ranks of several starts would meet in one store.

        torchrun (2.4 and later) shares the store of its agents with the ranks and keeps it when they start again. Its
        keys have the number of a host's restarts in their names, which differs between a host that stayed and one that
        came; and after the host of rank 0 is lost, the other agents still name its address.
        """
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and self.starts_again:
            raise RunError(
                f"{_SHARED_STORE} is not set under torchrun with several hosts and restarts: ranks that start again "
                f"would meet in the store of the start before, and hang. Set {_SHARED_STORE}=1 on every host.",
                scope="job",
            )


RESTARTS = "DSTK_RESTARTS"
"""The environment variable by which `dstk train` says how often it starts its ranks again."""


def restarting_launcher(env: Mapping[str, str] = os.environ) -> int | None:
    """The process that starts this rank again after a failure; None where none does."""
    torchrun = Torchrun.detect(env)
    restarts = torchrun.max_restarts if torchrun is not None else int(env.get(RESTARTS, "0"))
    return os.getppid() if restarts else None


def wait_as_spare(store: "Store", rank: int, world_size: int) -> NoReturn:
    """Wait as one of the last of `world_size` ranks until the run of the others ends.

    Raises SpareError, which is no failure, where that run ended well. Where it did not, this process exits as the
    ranks of that run do, and torchrun starts all again.
    """
    try:
        while not store.check([_ENDED]):
            time.sleep(_POLL_SECONDS)
        store.set(f"{_ENDED}/{rank}", "")
    except RuntimeError:  # with which torch reports a store that is gone
        exit_now(PEER_FAILED)
    raise SpareError(f"rank {rank} was a spare of {world_size} ranks.")


def release_spares(store: "Store", spares: range) -> None:
    """Tell spares that the run has ended well. For rank 0, which hosts the store, at its very end."""
    if not spares:
        return
    store.set(_ENDED, "")
    deadline = time.monotonic() + _HEARD_SECONDS
    while not store.check([f"{_ENDED}/{rank}" for rank in spares]) and time.monotonic() < deadline:
        time.sleep(0.05)


def _command_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option, as `--name value` or `--name=value`; None where it is not given."""
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
