"""RunLock: one job at a time trains in a run directory, on this machine or on another one that shares the file system.

RUN/.lock-1, .lock-2, …  one file for each process that holds the directory, or died holding it; the highest one counts.
Its first line is a number that the holder increments (its heartbeat), or `released`; its second says who that is.

A process takes the directory by creating the next file with O_EXCL, which one process of all machines can do. It may
when the holder has released it; has ended (on this machine: its pid is free, or belongs to a process that started at
another time); or has lost its lease (on another machine: its heartbeat has not changed while this process watched for
that long. The clocks of two machines are never compared). The lease is short between starts of one elastic launch,
whose agents have agreed that the host of the holder is lost.

A holder that was suspended may come back at any time. So it increments its number and then looks for a higher file; who
takes over creates the higher file and then looks whether the number is still the same. One of the two notices: the
holder stops before it writes, or the other one steps back. As long as a process lives, only itself removes its file: so
none is ever removed in place of a newer one of that name.

UrlLock is the same behind checkpoint.url, where one process can create an object by a conditional write
(`If-None-Match`), and a beat is another write of the object. A store that ignores the condition keeps one of two that
are created at once: each looks at what is there before it writes again.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from toolkit.checkpoint.names import write_all
from toolkit.errors import Refusal, RunDirectoryError, Scope
from toolkit.files import printable, read_regular, reason_of
from toolkit.launch.elastic import Torchrun
from toolkit.launch.health.local_process import machine_id
from toolkit.remote_files import RemotePath, advice_of

_FILE = re.compile(r"\.lock-([1-9][0-9]{0,8})")
_RELEASED = b"released"
_HEARTBEATS = 6
_RELEASE_SECONDS = 5.0
_POLLS = 60
"""Numbers of heartbeats, and of looks at another's lock, in the time of a lease."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a run directory. `machine_id`: of the machine since its start, and of the container."""

    host: str
    pid: int
    start_ticks: int
    """Start of the process, as its machine counts: later, another process may have the same pid."""
    machine_id: str
    since: str
    job: str = ""
    launch: str = ""
    """The id of a launch that starts its ranks again when hosts go and come; empty for others."""

    @classmethod
    def here(cls) -> "Holder":
        slurm_job = os.environ.get("SLURM_JOB_ID")
        torchrun = Torchrun.detect()
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=int(_process_fields(os.getpid())[19]),
            machine_id=machine_id(),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            job=f" (Slurm job {slurm_job})" if slurm_job else "",
            launch=torchrun.launch if torchrun is not None else "",
        )

    @classmethod
    def decode(cls, content: bytes) -> "Holder | None":
        """Return the writer of a lock file; None where that is not complete yet, or no lock file."""
        try:
            holder = cls(**json.loads(content.split(b"\n")[1]))
        except (ValueError, IndexError, TypeError):
            return None
        return holder if type(holder.pid) is int and 0 < holder.pid < 2**31 else None

    def __str__(self) -> str:
        return printable(f"process {self.pid} on {self.host}{self.job}")


def _process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on: 0 is its state, 19 when it started (man 5 proc)."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _has_ended(content: bytes, machine: str) -> bool | None:
    """Whether the process that wrote a lock file has released it or ended; None where that cannot be told."""
    if content.startswith(_RELEASED):
        return True
    holder = Holder.decode(content)
    if holder is None or not machine or holder.machine_id != machine:
        return None
    try:
        os.kill(holder.pid, 0)
        fields = _process_fields(holder.pid)
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user, or hidden in /proc
        return None
    return fields[0] in "ZX" or int(fields[19]) != holder.start_ticks


def _files(run_dir: Path) -> dict[int, bytes]:
    """The lock files of a directory: number -> content."""
    files = {}
    for path in run_dir.iterdir():
        if match := _FILE.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                files[int(match[1])] = read_regular(path, max_bytes=4096)
    return files


def _newest(files: dict[int, bytes]) -> tuple[int, bytes]:
    return max(files.items(), default=(0, b""))


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds an existing directory, or died holding it."""
    try:
        number, content = _newest(_files(run_dir))
    except OSError:
        return True  # `acquire` says why
    return number > 0 and not content.startswith(_RELEASED)


@dataclass(frozen=True, kw_only=True)
class LockState:
    """The newest lock of a run directory, to be shown to people.

    No directory is taken by it: it compares the clocks of two machines, and a job that wants to take one does not.
    """

    holder: Holder
    is_released: bool
    """Whether the holder has let other jobs write there."""
    has_ended: bool
    """Whether the holder has released the directory, or its process has ended on this machine."""
    silent_seconds: float
    """Time since the last heartbeat, by the clock of this machine and the time stamp of the file."""

    @property
    def is_held(self) -> bool:
        """Whether the holder may still train: it has not ended, and its last heartbeat is not older than two leases."""
        return not self.has_ended and self.silent_seconds < 2 * RunLock.lease_seconds


def look(run_dir: Path) -> LockState | None:
    """Look who trains in a directory, without waiting; None where nobody does."""
    try:
        number, content = _newest(_files(run_dir))
        holder = Holder.decode(content)
        if holder is None:
            return None
        age = time.time() - (run_dir / f".lock-{number}").stat().st_mtime
    except OSError:
        return None
    return LockState(
        holder=holder,
        is_released=content.startswith(_RELEASED),
        has_ended=bool(_has_ended(content, machine_id())),
        silent_seconds=max(0.0, age),
    )


def holds(holder: Holder, run_dir: Path) -> bool:
    """Whether this host sees in the directory the lock of a process that holds it, maybe from another host."""
    try:
        return Holder.decode(_newest(_files(run_dir))[1]) == holder
    except OSError:
        return False


class RunLock:
    """This process's hold on a run directory, which a thread renews from `acquire` to `release`."""

    lease_seconds = 60.0
    launch_lease_seconds = 10.0
    """The lease towards later starts of the same elastic launch."""
    field = "run_dir"

    def __init__(self, run_dir: Path, holder: Holder | None = None) -> None:
        self._run_dir = run_dir
        self.holder = holder or Holder.here()
        self._line = json.dumps(asdict(self.holder)).encode() + b"\n"
        self._number = 0
        self._beats = 0
        self._file = -1
        self._is_held = False
        self._renewed = 0.0
        self._mutex = threading.Lock()
        self._is_over = threading.Event()
        self._lost: RunDirectoryError | None = None

    def acquire(self) -> None:
        """Take the directory; may wait for a lease. Raises RunDirectoryError where another process holds it."""
        watched = None
        deadline = 0.0
        lease = self.lease_seconds
        while True:
            newest = _newest(_files(self._run_dir))
            number, content = newest
            has_ended = number == 0 or _has_ended(content, self.holder.machine_id)
            if has_ended or (newest == watched and time.monotonic() >= deadline):
                if self._create(number, content):
                    break
            elif newest != watched:
                holder = Holder.decode(content)
                if holder is not None and (has_ended is False or watched is not None):
                    reason = f"{holder} has trained there since {printable(holder.since)}"
                    raise self._error(reason, "wait until it has ended", "end it", (self.field, "another directory"))
                if watched is None:
                    launch = self.holder.launch
                    is_same_launch = launch != "" and holder is not None and holder.launch == launch
                    lease = self.launch_lease_seconds if is_same_launch else self.lease_seconds
                    patience = f"If it gives no sign of life for {lease:g} s, this run takes its place."
                    who = holder or "another process"
                    print(f"{self._run_dir}: {who} may still train there. {patience}", file=sys.stderr, flush=True)
                watched = newest
                deadline = time.monotonic() + lease
            time.sleep(lease / _POLLS)
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()

    def _create(self, number: int, content: bytes) -> bool:
        """Take the place of a holder that is gone; False where another process was faster, or the holder is back."""
        path = self._path(number + 1)
        began = _now()
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            files = _files(self._run_dir)
            if max(files, default=0) != number + 1 or (number and files.get(number) != content):
                return False
            write_all(file, memoryview(b"%012d\n%s" % (0, self._line)))
            os.fsync(file)
            self._number = number + 1
            self._file = file
            self._is_held = True
            self._renewed = began
        finally:
            if self._file < 0:
                os.close(file)
                path.unlink()
        self._remove_ended(files)
        return True

    def _remove_ended(self, files: dict[int, bytes]) -> None:
        for lower in files.keys() - {self._number}:
            if _has_ended(files[lower], self.holder.machine_id):
                self._path(lower).unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._is_over.wait(self._shortest_lease / _HEARTBEATS):
            with contextlib.suppress(RunDirectoryError):  # `check` raises it again, in the thread that is to write
                self.check()

    def check(self, *, quickly: bool = False) -> None:
        """Call this before a write. Raises RunDirectoryError where another process has taken the directory over.

        `quickly`: without a look at the disk, if the last one is so recent that nobody can have taken it over since.
        """
        if quickly and self._lost is None and self._is_recent():
            return  # without waiting for the thread, which may be waiting for a slow disk
        with self._mutex:
            if self._lost is None:
                began = _now()
                content = b""
                try:
                    content = self._beat()
                except OSError as error:
                    if self._is_recent():
                        return
                    self._give_up(error)
                if content.endswith(self._line):
                    self._renewed = began
                    return
                who = Holder.decode(content) or "another process"
                reason = f"{who} may train there now, as this one was suspended or could not reach its disk"
                self._lost = self._error(
                    reason, "let it train", "end it, and start again with --resume auto", scope="rank"
                )
                self._is_over.set()
            raise self._lost

    def _beat(self) -> bytes:
        """Increment the number; return the newest lock file."""
        self._beats += 1
        os.pwrite(self._file, b"%012d" % self._beats, 0)
        os.fsync(self._file)
        return _newest(_files(self._run_dir))[1]

    def _give_up(self, error: OSError) -> None:
        """Raise where a lock that could not be looked at for long may still be held; here it counts as lost."""

    def _is_recent(self) -> bool:
        return self._is_held and _now() - self._renewed < self._shortest_lease / 2

    @property
    def _shortest_lease(self) -> float:
        """The time after which a silent holder may lose the directory to anyone."""
        return self.launch_lease_seconds if self.holder.launch else self.lease_seconds

    def release(self) -> None:
        """Let other processes take the directory. Nothing may be written after this."""
        self._is_over.set()
        with self._mutex, contextlib.suppress(OSError):
            if self._file < 0:
                return
            file = self._file
            self._file = -1
            self._is_held = False
            files = _files(self._run_dir)
            if min(files, default=self._number) < self._number:  # of another machine: it would count again
                os.pwrite(file, _RELEASED.ljust(12), 0)
                os.fsync(file)
            elif files.get(self._number, b"").endswith(self._line):
                self._path(self._number).unlink()
            os.close(file)

    def _path(self, number: int) -> Path:
        return self._run_dir / f".lock-{number}"

    def _error(self, reason: str, *remedy: tuple[str, str] | str, scope: Scope = "job") -> RunDirectoryError:
        return RunDirectoryError(Refusal.of(self.field, str(self._run_dir), reason, *remedy), scope=scope)


class UrlLock(RunLock):
    """This process's hold on checkpoint.url. While the store cannot be reached it is neither lost nor checked."""

    field = "checkpoint.url"

    def __init__(self, url: RemotePath, holder: Holder | None = None) -> None:
        super().__init__(url, holder)
        self._url = url

    def _create(self, number: int, content: bytes) -> bool:
        path = self._url / f".lock-{number + 1}"
        began = _now()
        mine = b"%012d\n%s" % (0, self._line)
        if not path.create(mine):
            return False
        files = _files(self._url)
        if max(files, default=0) != number + 1 or (number and files.get(number) != content):
            if files.get(number + 1) == mine:
                path.unlink(missing_ok=True)
            return False
        if files[number + 1] != mine:
            return False
        self._number = number + 1
        self._is_held = True
        self._renewed = began
        self._remove_ended(files)
        return True

    def _beat(self) -> bytes:
        content = _newest(_files(self._url))[1]
        if not self._is_held or not content.endswith(self._line):
            return content
        self._beats += 1
        (self._url / f".lock-{self._number}").write_bytes(b"%012d\n%s" % (self._beats, self._line))
        return _newest(_files(self._url))[1]

    def _give_up(self, error: OSError) -> None:
        raise self._error(reason_of(error), advice_of(error), scope="rank") from None

    def release(self) -> None:
        """Let other processes take the URL; what that takes if the store cannot be reached is left undone."""
        self._is_over.set()
        releasing = threading.Thread(target=self._release, name="url-lock-release", daemon=True)
        releasing.start()
        releasing.join(_RELEASE_SECONDS)

    def _release(self) -> None:
        with self._mutex, contextlib.suppress(OSError):
            if not self._is_held:
                return
            self._is_held = False
            files = _files(self._url)
            path = self._url / f".lock-{self._number}"
            if not files.get(self._number, b"").endswith(self._line):
                return
            if min(files) < self._number:  # of another machine: it would count again
                path.write_bytes(_RELEASED.ljust(12) + b"\n" + self._line)
            else:
                path.unlink()


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
