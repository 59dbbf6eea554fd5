"""Pool: tokenize pieces in several processes and give the results back in the order of the pieces."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Self

from toolkit.errors import DataError, RunError
from toolkit.train.data.pieces import Piece
from toolkit.train.data.worker import EncodedPiece, Job

# Results that may wait for a slower one before them, for each worker: bounds the memory of the parent.
_AHEAD = 4


def encode_pieces(pieces: Iterator[Piece], job: Job, workers: int) -> Iterator[EncodedPiece]:
    """The encoded pieces, in order, whatever the number of workers. Raises what reading or tokenizing raised."""
    first, second = next(pieces, None), next(pieces, None)
    if first is None:
        return
    if workers == 1 or second is None:
        with without_rayon():
            encoder = job.open()
            for piece in _chain(first, second, pieces):
                yield encoder.encode(piece)
        return
    with WorkerPool(job, workers) as pool:
        yield from pool.encode(_chain(first, second, pieces))


@contextlib.contextmanager
def without_rayon() -> Iterator[None]:
    """Keep `tokenizers` from starting threads, which would make it warn in every process forked later on."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class WorkerPool:
    """Processes that run `toolkit.train.data.worker`, one piece at a time each."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._count = workers
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in self._workers.items():
            pipe.close()
            # Workers hold nothing that could be lost.
            process.kill()
        for process in self._workers.values():
            process.wait()

    def encode(self, pieces: Iterator[Piece]) -> Iterator[EncodedPiece]:
        """Tokenize; a worker gets its next piece when it has answered, so neither side ever blocks the other."""
        idle: list[Connection] = []
        working: dict[Connection, int] = {}
        done: dict[int, EncodedPiece] = {}
        sent = given = 0
        more = True
        while True:
            while more and sent - given < _AHEAD * self._count and (idle or len(self._workers) < self._count):
                piece = next(pieces, None)
                if piece is None:
                    more = False
                    break
                pipe = idle.pop() if idle else self._start()
                self._send(pipe, piece)
                working[pipe] = sent
                sent += 1
            if given in done:
                yield done.pop(given)
                given += 1
            elif working:
                for ready in wait(list(working)):
                    assert isinstance(ready, Connection)
                    done[working.pop(ready)] = self._receive(ready)
                    idle.append(ready)
            else:
                return

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            # The same import path, wherever the caller got it from.
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        command = [sys.executable, "-P", "-m", "toolkit.train.data.worker", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._workers[ours] = process
        self._send(ours, self._job)
        return ours

    def _send(self, pipe: Connection, message: Piece | Job) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(pipe) from None

    def _receive(self, pipe: Connection) -> EncodedPiece:
        try:
            answer: EncodedPiece | DataError = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(pipe) from None
        if isinstance(answer, DataError):
            raise answer
        return answer

    def _died(self, pipe: Connection) -> RunError:
        code = self._workers[pipe].wait()
        reason = (
            f"was killed by signal {-code}, perhaps for lack of memory" if code < 0 else f"ended with exit code {code}"
        )
        return RunError(f"a process that tokenizes {reason}. Lower data.workers, or see what it wrote above.")


def _chain(first: Piece, second: Piece | None, rest: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    if second is not None:
        yield second
        yield from rest
