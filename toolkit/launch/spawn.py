"""Start the ranks of one machine as processes, and end all of them when one fails. Imports no torch."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from toolkit.checkpoint.names import MANIFEST
from toolkit.errors import PreemptedError, RunError
from toolkit.launch.elastic import RESTARTS
from toolkit.launch.forked_script import ForkedScript, can_fork
from toolkit.launch.health.heartbeat import PEER_FAILED
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.launch.stop_requests import PASSED_ON, RANK_SIGNALS, REPEAT_SECONDS, SAVE_SECONDS, STOP_SIGNALS
from toolkit.parent_process import end_with
from toolkit.remote_files import RemotePath

AUTO = "auto"
_POLL_SECONDS = 0.1
_MESSAGE_SECONDS = 3
"""The other ranks notice by themselves that one has died or hangs, and print where it was."""
_NO_CRASH = (2, PreemptedError.exit_code)
"""Exit codes for bad input, and for a request to stop."""
Rank = subprocess.Popen[bytes] | ForkedScript
Ranks = Sequence[Rank]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a run, and where the ranks of all machines meet."""

    number: int
    """Number of this machine, from 0; rank 0 is on machine 0."""
    machines: int
    master_addr: str
    """Name or address of machine 0."""
    master_port: int


@dataclass(frozen=True, kw_only=True)
class _RunExit:
    """The end of a run. `is_crash`: a rank died, by a signal or an error other than bad input, and was not asked to."""

    code: int
    is_crash: bool = False


def run_with_restarts(
    script: Path,
    arguments: Callable[[int], tuple[Sequence[str], str]],
    nproc: int,
    restarts: int,
    *,
    preload: Callable[[], None] | None = None,
    machine: Machine | None = None,
) -> int:
    """Run local ranks as `run_local_ranks` does, and start again after a crash, up to `restarts` times.

    `arguments` maps an attempt (0: the first start) to the script's arguments and a description of where it resumes.
    """
    os.environ |= _variables_of_all(nproc) | {RESTARTS: str(restarts)}
    received: list[int] = []  # signals to this process are meant for its ranks as well
    if preload is not None:
        _handle_stop_signals(partial(_interrupt, received))
        with contextlib.suppress(KeyboardInterrupt):
            preload()
    _handle_stop_signals(lambda number, frame: received.append(number))
    start = ForkedScript if preload is not None and not received and can_fork() else _start
    for attempt in range(restarts + 1):
        script_arguments, origin = arguments(attempt)
        if received:
            before = f"restart {attempt}, {origin}" if attempt else "the ranks started; nothing was saved yet"
            print(f"error: stopped by {signal.Signals(received[0]).name} before {before}.", file=sys.stderr)
            return 128 + received[0]
        if attempt:
            print(f"restart {attempt} of {restarts}: {origin}", file=sys.stderr, flush=True)
        ended = _run(partial(start, script, script_arguments), nproc, received, machine)
        if not ended.is_crash:
            break
    return ended.code


def _handle_stop_signals(handler: Callable[[int, Any], None]) -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is in the background jobs of a script
            signal.signal(number, handler)


def _interrupt(received: list[int], number: int, frame: object) -> None:
    """Note a signal, and do not wait for the seconds of imports."""
    received.append(number)
    raise KeyboardInterrupt


def run_local_ranks(
    script: Path,
    arguments: Sequence[str],
    nproc: int,
    *,
    preload: Callable[[], None] | None = None,
    machine: Machine | None = None,
) -> int:
    """Run `python script arguments…` as `nproc` ranks; return the exit code of the first rank that failed, or 0.

    The ranks start with RANK_SIGNALS blocked, until they can handle them. When one fails, the others have three seconds
    to report what they know about it, and are killed: without their peer they would wait in a collective. STOP_SIGNALS
    are passed on to the ranks (`PASSED_ON`), which have two minutes to save a checkpoint and exit with 75. However this
    process ends, its ranks end. With `preload`, which imports in this process what ranks need, they are forked from it
    where that is possible; all imports, their time and most of their memory are then shared. With `machine` they are
    `nproc` of the ranks of several machines.
    """
    return run_with_restarts(script, lambda attempt: (arguments, ""), nproc, 0, preload=preload, machine=machine)


def _run(
    start: Callable[[dict[str, str]], Rank], nproc: int, received: Sequence[int], machine: Machine | None
) -> _RunExit:
    port = free_port()
    first_rank = 0 if machine is None else machine.number * nproc
    ranks: list[Rank] = []
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
        for number in range(nproc):
            variables = _variables(machine, number, nproc) if machine else rank_variables(number, nproc, port)
            ranks.append(start(os.environ | variables))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RANK_SIGNALS)
        while (ended := _poll(ranks, first_rank)) is None and not received:
            time.sleep(_POLL_SECONDS)
        if ended is None or received or ended.code == PreemptedError.exit_code:
            return _RunExit(code=_stop(ranks, received, first_rank))
        return ended
    finally:
        for rank in _running(ranks):
            rank.kill()
            rank.wait()


def _poll(ranks: Ranks, first_rank: int) -> _RunExit | None:
    """Return how the run ended, or None while all ranks that have exited were successful."""
    codes = [rank.poll() for rank in ranks]
    # A killed rank comes first: the others failed because of it.
    for rank, code in enumerate(codes, start=first_rank):
        if code is not None and code < 0:
            print(f"error: rank {rank} was ended by {_signal_name(-code)}.", file=sys.stderr, flush=True)
            _wait_for_messages(ranks)
            return _RunExit(code=128 - code, is_crash=True)
    if not any(codes):
        return _RunExit(code=0) if all(code == 0 for code in codes) else None
    # The first rank that fails makes others fail too; the one that reports the reason exits with 2.
    time.sleep(5 * _POLL_SECONDS)
    failed = {code for code in (rank.poll() for rank in ranks) if code}
    if failed.isdisjoint(_NO_CRASH):
        _wait_for_messages(ranks)
    for code in _NO_CRASH:
        if code in [rank.poll() for rank in ranks]:
            return _RunExit(code=code)
    return _RunExit(code=next(iter(failed - {PEER_FAILED}), PEER_FAILED), is_crash=True)


def _signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have numbers alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _wait_for_messages(ranks: Ranks) -> None:
    """Let ranks report and exit by themselves."""
    deadline = time.monotonic() + _MESSAGE_SECONDS
    while time.monotonic() < deadline and _running(ranks):
        time.sleep(_POLL_SECONDS)


def _running(ranks: Ranks) -> Ranks:
    return [rank for rank in ranks if rank.poll() is None]


def _stop(ranks: Ranks, received: Sequence[int], first_rank: int) -> int:
    """Pass signals on and wait for the checkpoint; return the exit code that the ranks agree on, or the signal's."""
    passed_on = 0
    start = time.monotonic()
    deadline = start + SAVE_SECONDS
    while (running := _running(ranks)) and time.monotonic() < deadline:
        if ranks[0].poll() == PreemptedError.exit_code:
            return PreemptedError.exit_code  # the checkpoint is complete, and this rank has said so
        if len(received) > passed_on:
            passed_on = len(received)
            insists = received[-1] != signal.SIGUSR1 and time.monotonic() - start > REPEAT_SECONDS
            deadline = time.monotonic() + _MESSAGE_SECONDS if insists else deadline
            for rank in running:
                rank.send_signal(signal.SIGTERM if insists else PASSED_ON[signal.Signals(received[-1])])
        time.sleep(_POLL_SECONDS)
    codes = [rank.poll() for rank in ranks]
    if late := [str(rank) for rank, code in enumerate(codes, start=first_rank) if code is None]:
        print(f"error: rank {', '.join(late)} did not stop in time and is killed.", file=sys.stderr, flush=True)
    if agreed := [code for code in _NO_CRASH if code in codes]:
        return agreed[0]
    return 128 + received[0] if any(codes) or late else 0


class Restart:
    """The arguments of recipes/train.py for each attempt of one run. Create it before the first attempt.

    `arguments`: those of the user, to which an attempt adds `--resume` and `--overwrite` where it needs them.

    A restart resumes from the newest checkpoint that the run has saved. Without one it repeats the first attempt and
    overwrites what that left; a run that was in the directory before is kept, unless `overwrite`.
    """

    def __init__(
        self, *, run_dir: Path, arguments: Sequence[str], resume: str | None, overwrite: bool, url: str | None = None
    ) -> None:
        self.run_dir = run_dir
        self._place = run_dir if url is None else RemotePath(url)
        self._arguments = arguments
        self._resume = resume
        self._overwrite = overwrite
        self._earlier = {_identity(checkpoint) for checkpoint in self._checkpoints()}
        self._had_run = (run_dir / "metrics.jsonl").exists()

    def arguments(self, attempt: int) -> tuple[list[str], str]:
        """Return the arguments of an attempt (0: the first start), and a description of where it resumes."""
        # Quoted, because a name such as 2024 would be read as a number.
        arguments = [*self._arguments, f"run_dir={json.dumps(str(self.run_dir), ensure_ascii=False)}"]
        saved = [checkpoint for checkpoint in self._checkpoints() if _identity(checkpoint) not in self._earlier]
        if attempt and saved:
            return [*arguments, "--resume", AUTO], f"resuming from {saved[-1].name} in {self._place}"
        if self._resume:
            arguments += ["--resume", self._resume]
        if self._overwrite or (attempt and not self._had_run):
            arguments.append("--overwrite")
        if attempt == 0:
            return arguments, ""
        if self._resume:
            return arguments, f"from {self._resume} again"
        return arguments, "from the beginning, as no checkpoint was saved yet"

    def _checkpoints(self) -> list[ListedCheckpoint]:
        try:
            return list_checkpoints(self._place)
        except OSError:
            return []


def _identity(listed: ListedCheckpoint) -> tuple[str, int, int]:
    """Identify a checkpoint, as another one may get its name later."""
    try:
        status = (listed.path / MANIFEST).stat()
    except OSError:
        return listed.name, 0, 0
    return listed.name, status.st_ino, status.st_mtime_ns


def _start(script: Path, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, env=environment, preexec_fn=partial(end_with, os.getpid()))


def _variables_of_all(nproc: int) -> dict[str, str]:
    """Return variables that torch reads when it is imported, where the user has not set them."""
    defaults = {
        # By default each rank would start one thread per core, and all ranks would compete for the same cores.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a C++ stack for each connection to a dead rank
    }
    return {name: value for name, value in defaults.items() if name not in os.environ}


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables of one of `world_size` ranks on this machine."""
    environment = RankEnvironment(rank=rank, world_size=world_size, local_rank=rank, master_port=port)
    return environment.variables | {"LOCAL_WORLD_SIZE": str(world_size)}


def _variables(machine: Machine, local_rank: int, nproc: int) -> dict[str, str]:
    """Return the environment variables of one of the `nproc` ranks on this machine of several."""
    environment = RankEnvironment(
        rank=machine.number * nproc + local_rank,
        world_size=machine.machines * nproc,
        local_rank=local_rank,
        master_addr=machine.master_addr,
        master_port=machine.master_port,
    )
    return environment.variables | {"LOCAL_WORLD_SIZE": str(nproc)}


def free_port() -> int:
    """A TCP port that is free now, below those that the kernel assigns: one of these could be taken before its use."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RunError("no free TCP port from 15000 to 31999 was found. Set MASTER_PORT.")
