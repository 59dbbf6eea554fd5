"""Checkpoints in the memory of hosts: what a crash or a lost host costs is a few steps, and no disk is read.

They are checkpoints as any other, behind a URL that leads to the memory of the job's hosts (toolkit/host_memory): any
layout reads them, and the newest one replaces the one before once it is complete. They live as long as the launcher.
"""

import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from toolkit.checkpoint.commit import Retention
from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.ranks import Ranks
from toolkit.config.recipe import Recipe
from toolkit.errors import CheckpointError, RunError, ToolkitError
from toolkit.host_memory.filesystem import RUN_URL, HostServer, Ring, join
from toolkit.host_memory.server import staging_directory
from toolkit.host_memory.start import server_of_this_host
from toolkit.launch.meeting_point import address_towards
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.remote_files import RemotePath
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback, Rollback
from toolkit.training.checkpointing import Checkpointer
from toolkit.training.loop import TrainingRun
from toolkit.training.resume import AUTO, Resumed, newest_checkpoint

_RUN = RemotePath(RUN_URL)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostMemoryRun:
    """The checkpoints of this launch in the memory of its hosts."""

    hosts: int
    staging: Path

    @classmethod
    def join(cls, recipe: Recipe, launcher: int | None) -> "HostMemoryRun | None":
        """Join the servers of all hosts, which are started where there are none; None where the recipe has none.

        `launcher`: the process of this host that starts its ranks again, if one does. A collective call. Raises
        RunError, the same on every rank, where there is no such launcher, or a host has no server.
        """
        check_launcher(recipe, launcher)
        if not recipe.checkpoint.memory_every or launcher is None:
            return None
        here = RankEnvironment.detect()
        staging = staging_directory(launcher)

        def start() -> HostServer | None:
            if here.local_rank:
                return None
            _make_private(staging)
            return server_of_this_host(launcher, address_towards(here.master_addr))

        ranks = Ranks.of()
        servers = _on_every_rank(ranks, start)
        hosts = tuple(server for server in servers if server is not None)
        number = list(accumulate(server is not None for server in servers))[ranks.rank] - 1
        join(Ring(hosts=hosts, here=number))
        return cls(hosts=len(hosts), staging=staging)

    def resume(self, asked: str | None, checkpoints: Path) -> Resumed | None:
        """The newest checkpoint in memory, if `--resume auto` asks for it and there is no newer one in `checkpoints`.

        None where there is none. A run that starts from elsewhere removes those in memory. A collective call.
        """
        ranks = Ranks.of()
        if asked != AUTO:
            ranks.run_on_first(self.clear)
            return None
        in_memory = newest_checkpoint(_RUN)
        newest_step = ranks.run_on_first(lambda: _newest_step(checkpoints))
        return in_memory if in_memory is not None and in_memory.state.step >= newest_step else None

    def checkpointer(self, other: Checkpointer, check_lock: Callable[[], None]) -> Checkpointer:
        """A checkpointer that saves in memory what another one saves elsewhere.

        `check_lock`: that of the run directory alone, as checkpoint.url may be out of reach just now.
        """
        return replace(other, url=_RUN, staging=self.staging, keep=Retention(newest=1), check_lock=check_lock)

    @staticmethod
    def clear() -> None:
        """Remove all checkpoints in memory. For one rank."""
        with suppress(FileNotFoundError):
            _RUN.remove_files()


class MemoryCheckpoints(Callback):
    """checkpoint.memory_every of a recipe: saves from a snapshot while training continues.

    One that fails is said, and no reason to stop: the run goes on without it.
    """

    def __init__(self, checkpointer: Checkpointer, every: int) -> None:
        self._checkpointer = checkpointer
        self._every = every

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        assert run.directory is not None
        path = run.directory.path
        self._try(run, self._checkpointer.poll)
        if run.step % self._every == 0 and run.step < run.recipe.train.steps and not run.is_stopping:
            self._try(
                run,
                lambda: self._checkpointer.save(
                    path,
                    run.step,
                    tokens=run.tokens,
                    learning_rate=run.learning_rate(max(0, run.step - 1)),
                    skipped_batches=run.skipped_batches,
                    wait=False,
                ),
            )

    @override
    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        self._try(run, self._checkpointer.finish)
        Ranks.of().run_on_first(HostMemoryRun.clear)  # they may hold what the rollback undid

    @override
    def on_run_end(self, run: TrainingRun) -> None:
        self._try(run, self._checkpointer.finish)

    def _try(self, run: TrainingRun, function: Callable[[], object]) -> None:
        try:
            function()
        except CheckpointError as error:  # the same on every rank
            run.progress.say(f"step {run.step}: no checkpoint in memory: {error}")


def check_launcher(recipe: Recipe, launcher: int | None) -> None:
    """Raise RunError for checkpoints in memory under a launcher that does not start its ranks again."""
    every = recipe.checkpoint.memory_every
    if every and launcher is None:
        reason = "this launcher does not start ranks again, and the checkpoints end with it"
        remedies = ("use dstk train --restarts N, or torchrun --max-restarts N", ("checkpoint.memory_every", 0))
        raise RunError.of("checkpoint.memory_every", every, reason, *remedies)


def _make_private(staging: Path) -> None:
    """Make a directory that only this user may read, in place of what ranks that died have left in it."""
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(mode=0o700)
    except OSError as error:
        reason = f"{staging} cannot be made on {socket.gethostname()} ({error.strerror})"
        raise RunError(f"checkpoint.memory_every: {reason}. Remove it, or set checkpoint.memory_every=0.") from None


def _newest_step(checkpoints: Path) -> int:
    try:
        return max((listed.step for listed in list_checkpoints(checkpoints)), default=0)
    except OSError:
        return 0


def _on_every_rank(ranks: Ranks, function: Callable[[], T]) -> list[T]:
    """The results of all ranks. Raises the first error of any rank, on all of them."""
    outcome: T | str
    try:
        outcome = function()
    except ToolkitError as error:
        outcome = str(error)
    outcomes = ranks.gather(outcome)
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors:
        raise RunError(errors[0], scope="job")
    return outcomes  # type: ignore[return-value]
