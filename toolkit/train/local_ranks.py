"""Ranks on this machine by forking: one process that has imported everything becomes N in milliseconds.

For CPU ranks only (tests, comparisons): a process that forks must not have touched CUDA.
"""

import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.train.spawn import free_port, rank_variables

_SECONDS_UNTIL_KILLED = 10
"""A rank that failed waits to be ended: its peers would complain of a lost connection, and hide why."""


class RankFailedError(RuntimeError):
    """A rank raised, died or hung. The message names it and carries its traceback."""


class LocalRanks:
    """`world_size` forked ranks at work on one function."""

    def __init__(self, function: Callable[..., Any], world_size: int, *args: Any, joined: bool = True) -> None:
        context = mp.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store") if joined else None
        port = free_port()
        self.results: dict[int, Any] = {}
        self.world_size = world_size
        self._waiting: dict[Connection, int] = {}
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, port, store, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            self._waiting[ours] = rank
            self._processes.append(process)

    @property
    def pipes(self) -> list[Connection]:
        """Of the ranks that have not reported."""
        return list(self._waiting)

    def receive(self, pipe: Connection) -> None:
        """Take one rank's result. Raises the ToolkitError that it raised, or RankFailedError for anything else."""
        rank = self._waiting.pop(pipe)
        try:
            ok, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise RankFailedError(f"rank {rank} died without a word{self._ended_by(rank)}") from None
        if not ok and isinstance(value, ToolkitError):
            raise value
        if not ok:
            raise RankFailedError(f"rank {rank} failed:\n{value}")
        self.results[rank] = value

    def _ended_by(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=1)  # its pipe closes a little before it is gone
        code = process.exitcode
        if code is None or code >= 0:
            return ""
        hint = ", as the kernel does where memory runs out" if code == -signal.SIGKILL else ""
        return f" ({signal.Signals(-code).name}{hint})"

    def in_order(self) -> list[Any]:
        """The results of all ranks."""
        return [self.results[rank] for rank in range(self.world_size)]

    def end(self) -> None:
        """All results are here, or one rank failed and the others wait for it in vain."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120, joined: bool = True
) -> list[Any]:
    """Call `function(*args)` on `world_size` forked ranks; the results in order of rank.

    The ranks are joined in a gloo group, or with `joined=False` find the environment that a launcher would leave.
    Results travel by pickle: return plain data or CPU tensors. Raises the ToolkitError that a rank raised, or
    RankFailedError for anything else, once the other ranks are gone.
    """
    ((_, outcome, _),) = run_jobs(
        [(partial(function, *args), world_size)], cores=world_size, timeout_seconds=timeout_seconds, joined=joined
    )
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


Outcome = list[Any] | ToolkitError | RankFailedError


def run_jobs(
    jobs: Sequence[tuple[Callable[[], Any], int]], *, cores: int, timeout_seconds: float, joined: bool = True
) -> Generator[tuple[int, Outcome, float], None, None]:
    """Call each job's function on its number of ranks, several jobs at a time while their ranks have cores.

    Yields (index of the job, its ranks' results or the error, seconds) as jobs end. A job has `timeout_seconds`.
    """
    pending = list(enumerate(jobs))
    running: dict[int, tuple[LocalRanks, float]] = {}
    try:
        while pending or running:
            busy = sum(ranks.world_size for ranks, _ in running.values())
            while pending and (not running or busy + pending[0][1][1] <= cores):
                index, (function, size) = pending.pop(0)
                running[index] = (LocalRanks(function, size, joined=joined), time.monotonic())
                busy += size
            ready = wait(
                [pipe for ranks, _ in running.values() for pipe in ranks.pipes],
                timeout=max(0.0, min(start for _, start in running.values()) + timeout_seconds - time.monotonic()),
            )
            for index, (ranks, start) in list(running.items()):
                outcome = _progress(ranks, ready, time.monotonic() - start, timeout_seconds)
                if outcome is not None:
                    del running[index]
                    ranks.end()
                    yield index, outcome, time.monotonic() - start
    finally:
        for ranks, _ in running.values():
            ranks.end()


def _progress(ranks: LocalRanks, ready: Sequence[Any], seconds: float, timeout_seconds: float) -> Outcome | None:
    """Take what is ready; the outcome where that was all, or where a rank failed, or the time is up."""
    try:
        for pipe in ranks.pipes:
            if pipe in ready:
                ranks.receive(pipe)
    except (ToolkitError, RankFailedError) as error:
        return error
    if not ranks.pipes:
        return ranks.in_order()
    if seconds >= timeout_seconds:
        missing = sorted(set(range(ranks.world_size)) - ranks.results.keys())
        return RankFailedError(f"ranks {missing} did not finish in {timeout_seconds:.0f} s")
    return None


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    store: str | None,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(rank_variables(rank, world_size, port))
    torch.set_num_threads(1)
    try:
        if store is not None:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(*args)
        if store is not None:
            dist.barrier()
        _send(pipe, True, result)
    except ToolkitError as error:
        _send(pipe, False, error)
        time.sleep(_SECONDS_UNTIL_KILLED)
    except BaseException:
        _send(pipe, False, traceback.format_exc())
        time.sleep(_SECONDS_UNTIL_KILLED)
    finally:
        pipe.close()
        # Destroying the group or running exit handlers in a forked child can abort or hang: leave at once.
        os._exit(0)


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    # Plain pickle: multiprocessing's own would share a tensor's memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps((ok, value)))
