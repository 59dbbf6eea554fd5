"""Ranks on this machine by forking: one process that has imported everything becomes N in milliseconds.

For CPU ranks only (tests, comparisons): a process that forks must not have touched CUDA.
"""

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.train.spawn import free_port, rank_variables


class RankFailedError(RuntimeError):
    """A rank raised, died or hung. The message names it and carries its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120, joined: bool = True
) -> list[Any]:
    """Call `function(*args)` on `world_size` forked ranks; the results in order of rank.

    The ranks are joined in a gloo group, or with `joined=False` find the environment that a launcher would leave.
    Results travel by pickle: return plain data or CPU tensors. Raises the ToolkitError that a rank raised, or
    RankFailedError for anything else, once the other ranks are gone.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store") if joined else None
        port = free_port()
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, port, store, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            # All results are here, or one rank failed and the others wait for it in vain.
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: Sequence[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not finish in {timeout_seconds:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailedError(f"rank {rank} died without a word") from None
            if not ok and isinstance(value, ToolkitError):
                raise value
            if not ok:
                raise RankFailedError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


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
    except BaseException:
        _send(pipe, False, traceback.format_exc())
    finally:
        pipe.close()
        # Destroying the group or running exit handlers in a forked child can abort or hang: leave at once.
        os._exit(0)


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    # Plain pickle: multiprocessing's own would share a tensor's memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps((ok, value)))
