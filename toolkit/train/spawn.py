"""Start the ranks of one machine as processes, and end all of them when one fails. Imports no torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from toolkit.errors import PreemptedError, RunError
from toolkit.train.watchdog.entry import PEER_FAILED

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10
_SAVING_SECONDS = 120
_LAST_WORDS_SECONDS = 3
"""Ranks notice by themselves that one has died or hangs, and say where it was."""
_BAD_INPUT = 2


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended. `is_crash`: a rank died, by a signal or an error that no input explains; nobody asked for it."""

    code: int
    is_crash: bool = False


def restarted_ranks(
    script: Path, arguments: Callable[[int], tuple[Sequence[str], str]], nproc: int, restarts: int
) -> int:
    """`run_local_ranks`, and again after a crash, up to `restarts` times.

    `arguments` gives, for the how-manieth restart (0: the first start), the arguments and from where the run goes on.
    """
    try:
        for attempt in range(restarts + 1):
            given, origin = arguments(attempt)
            if attempt:
                print(f"restart {attempt} of {restarts}: {origin}", file=sys.stderr, flush=True)
            ended = _run(script, given, nproc)
            if not ended.is_crash:
                break
    except _StoppedError as stopped:  # between two starts
        return 128 + stopped.number
    return ended.code


def run_local_ranks(script: Path, arguments: Sequence[str], nproc: int) -> int:
    """Run `python script arguments…` as `nproc` ranks; the exit code of the first rank that failed, or 0.

    When a rank fails, the others have three seconds to say what they know of it. Then they get SIGTERM and, after a
    grace of ten seconds, SIGKILL: without their peer they would wait in a collective until its timeout. SIGTERM and
    SIGUSR1 go on to the ranks, which save a checkpoint and end with 75; they have two minutes.
    """
    return restarted_ranks(script, lambda attempt: (arguments, ""), nproc, 0)


def _run(script: Path, arguments: Sequence[str], nproc: int) -> Ended:
    port = free_port()
    # Whoever ends us (a scheduler, `timeout`, a container) means the ranks as well.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        ranks += [_start(script, arguments, rank, nproc, port) for rank in range(nproc)]
        while True:
            codes = [rank.poll() for rank in ranks]
            # A rank that was killed comes first: the others failed because of it.
            for rank, code in enumerate(codes):
                if code is not None and code < 0:
                    print(f"error: rank {rank} was ended by {signal.Signals(-code).name}.", file=sys.stderr, flush=True)
                    _wait_for_last_words(ranks)
                    return Ended(code=128 - code, is_crash=True)
            if any(codes):
                # Whoever failed first takes others down with it; the one that says why ends with 2.
                time.sleep(5 * _POLL_SECONDS)
                failed = {code for code in (rank.poll() for rank in ranks) if code}
                # Bad input is as bad a second time, and whoever was asked to stop shall not start again.
                told = next((code for code in (_BAD_INPUT, PreemptedError.exit_code) if code in failed), None)
                if told is not None:
                    return Ended(code=told)
                _wait_for_last_words(ranks)
                return Ended(code=next(iter(failed - {PEER_FAILED}), PEER_FAILED), is_crash=True)
            if all(code == 0 for code in codes):
                return Ended(code=0)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return Ended(code=130)
    except _StoppedError as stopped:
        return Ended(code=_stopped_by(stopped.number, ranks))
    finally:
        _end(ranks)


def _wait_for_last_words(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Of ranks that end by themselves. One that hangs in a collective, or was stopped, would not follow a SIGTERM."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while time.monotonic() < deadline and any(rank.poll() is None and not _is_stopped(rank.pid) for rank in ranks):
        time.sleep(_POLL_SECONDS)
    if PEER_FAILED in [rank.poll() for rank in ranks]:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()


def _is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP, or a debugger holds it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class _StoppedError(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # Whoever insists ends at once.
    for again in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(again, signal.SIG_DFL)
    raise _StoppedError(number)


def _stopped_by(number: int, ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Pass a signal on and wait for the checkpoint; the exit code that the ranks agree on, or the signal's."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)
    deadline = time.monotonic() + _SAVING_SECONDS
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)
    codes = {rank.poll() for rank in ranks}
    return PreemptedError.exit_code if PreemptedError.exit_code in codes else 128 + number


def find_recipes() -> Path:
    """The directory of recipes and of train.py: beside the package in a checkout, under share/ when installed.

    Raises RunError where neither exists.
    """
    checkout = Path(__file__).resolve().parents[2] / "recipes"
    installed = Path(sys.prefix) / "share" / "deepspeed-megatron-toolkit" / "recipes"
    for folder in (checkout, installed):
        if (folder / "train.py").is_file():
            return folder
    raise RunError(f"recipes/train.py is neither in {checkout} nor in {installed}. Install the toolkit again.")


def _start(script: Path, arguments: Sequence[str], rank: int, nproc: int, port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | rank_variables(rank, nproc, port)
    # Each rank would start a thread a core, and all of them would fight for the same cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # PyTorch reads this when it is imported; it would show a stack of C++ for each connection that a dead rank leaves.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for _ in range(2):  # a rank that trains takes the first for a request to save, and the second seriously
        for rank in running:
            rank.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in running:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one of `world_size` ranks on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
