"""Fork ranks on this machine: a process that has imported everything becomes N ranks in milliseconds.

Where forks cannot use the GPUs, because this process has initialized CUDA, ranks are started anew.
"""

import gc
import importlib
import multiprocessing as mp
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.files import remove_temporary
from toolkit.imports import no_garbage_collection
from toolkit.launch.environment import local_device
from toolkit.launch.forked_script import forks_have_gpus
from toolkit.launch.spawn import free_port, rank_variables
from toolkit.parent_process import end_with

_FAILED_RANK_SECONDS = 10
"""A failed rank waits to be killed: its peers would report a lost connection first, and hide the reason."""

_SAME_ERROR_SECONDS = 5


class RankFailedError(RuntimeError):
    """A rank raised, died or hung. The message names it and has its traceback."""


def in_one_line(error: Exception) -> str:
    """The error on one line: of a traceback, the rank and the line that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, RankFailedError) and len(lines) > 1:
        named = (line for line in reversed(lines) if _ERROR.match(line))
        return f"{lines[0]} {next(named, lines[-1])}"
    return "; ".join(lines)


_ERROR = re.compile(r"[\w.]*(Error|Exception|Failure|Exit|Interrupt)\b")


class LocalRanks:
    """`world_size` forked ranks that run one function, which has to be picklable where they cannot be forked."""

    def __init__(self, function: Callable[[], Any], world_size: int, *, joined: bool = True) -> None:
        context: Any = mp.get_context("fork" if forks_have_gpus() else "spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store") if joined else None
        port = free_port()
        self.results: dict[int, Any] = {}
        self.world_size = world_size
        self._waiting: dict[Connection, int] = {}
        self._processes = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            variables = rank_variables(rank, world_size, port)
            process = context.Process(
                target=_rank_main, args=(os.getpid(), variables, store, sender, function), daemon=True
            )
            process.start()
            sender.close()
            self._waiting[receiver] = rank
            self._processes.append(process)

    @property
    def pipes(self) -> list[Connection]:
        """The pipes of ranks whose results are missing."""
        return list(self._waiting)

    def receive(self, pipe: Connection) -> None:
        """Receive a rank's result. Raises the ToolkitError that it raised, or RankFailedError for other errors."""
        rank = self._waiting.pop(pipe)
        try:
            ok, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            raise RankFailedError(f"rank {rank} died without an error message{self._signal_of(rank)}") from None
        if not ok and isinstance(value, ToolkitError):
            raise value
        if not ok:
            raise RankFailedError(f"rank {rank} failed:\n{value}")
        self.results[rank] = value

    def wait_for_the_same_error(self) -> None:
        """Let the other ranks meet a user's error too: one of them may have a lock to release."""
        end = time.monotonic() + _SAME_ERROR_SECONDS
        while self._waiting and (ready := wait(self.pipes, max(0.0, end - time.monotonic()))):
            self._waiting = {pipe: rank for pipe, rank in self._waiting.items() if pipe not in ready}

    def _signal_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=1)  # its pipe closes shortly before it exits
        code = process.exitcode
        if code is None or code >= 0:
            return ""
        hint = ", as sent by the kernel when memory runs out" if code == -signal.SIGKILL else ""
        return f" ({signal.Signals(-code).name}{hint})"

    def kill(self) -> None:
        """End the ranks: all results are here, or one rank failed and the others wait for it forever."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120, joined: bool = True
) -> list[Any]:
    """Call `function(*args)` on `world_size` forked ranks; return the results in order of rank.

    The ranks share a gloo process group, or with `joined=False` only have the environment that a launcher sets.
    Results are pickled: return plain data or CPU tensors. Raises the ToolkitError that a rank raised, or
    RankFailedError for other errors, after the other ranks have ended.
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
    """Call each job's function on its number of ranks, as many jobs at a time as there are cores.

    Yields (index of the job, its ranks' results or the error, seconds) when a job ends. Each has `timeout_seconds`.
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
                outcome = _receive_ready(ranks, ready, time.monotonic() - start, timeout_seconds)
                if outcome is not None:
                    del running[index]
                    ranks.kill()
                    yield index, outcome, time.monotonic() - start
    finally:
        for ranks, _ in running.values():
            ranks.kill()


def _receive_ready(ranks: LocalRanks, ready: Sequence[Any], seconds: float, timeout_seconds: float) -> Outcome | None:
    """Receive what is ready; return the outcome if all results are here, a rank failed, or the time is up."""
    try:
        for pipe in ranks.pipes:
            if pipe in ready:
                ranks.receive(pipe)
    except ToolkitError as error:
        ranks.wait_for_the_same_error()
        return error
    except RankFailedError as error:
        return error
    if not ranks.pipes:
        return [ranks.results[rank] for rank in range(ranks.world_size)]
    if seconds >= timeout_seconds:
        missing = sorted(set(range(ranks.world_size)) - ranks.results.keys())
        return RankFailedError(f"ranks {missing} did not finish in {timeout_seconds:.0f} s")
    return None


def _rank_main(
    parent: int, variables: dict[str, str], store: str | None, pipe: Connection, function: Callable[[], Any]
) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent too, which kills its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(variables)
    torch.set_num_threads(1)
    # DeepSpeed collects garbage when it starts, and in every step of bf16: over all that was imported before the fork
    # that takes a third of a second, and copies the pages that the ranks share.
    gc.freeze()
    try:
        if store is not None:
            rank = int(variables["RANK"])
            world_size = int(variables["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function()
        if store is not None:
            dist.barrier()
        remove_temporary()
        _send(pipe, True, result)
    except BaseException as error:
        remove_temporary()
        _send(pipe, False, error if isinstance(error, ToolkitError) else traceback.format_exc())
        time.sleep(_FAILED_RANK_SECONDS)
    finally:
        pipe.close()
        # Destroying the group or running exit handlers in a forked child can abort or hang: exit at once.
        os._exit(0)


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    # Plain pickle: multiprocessing's would share a tensor's memory with a process that is about to exit.
    pipe.send_bytes(pickle.dumps((ok, value)))


_LATE_IMPORTS = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_count",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch._subclasses.schema_check_mode",
    "transformers.optimization",
    "transformers.tokenization_utils_tokenizers",
    "transformers.trainer_pt_utils",
)
"""Modules that libraries import only when an engine starts: together a second in every rank."""


def preload(*families: str) -> None:
    """Import what any engine needs to train models of these families: forked ranks then start in a second."""
    if local_device().type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    modeling = (f"transformers.models.{family}.modeling_{family}" for family in families)
    with no_garbage_collection():
        for name in ("accelerate", "deepspeed", *_LATE_IMPORTS, *modeling):
            with suppress(ImportError):  # a rank that needs it reports it
                importlib.import_module(name)
    gc.freeze()  # later collections skip what was imported
