"""Two threads that empty one rank's share onto the disk: one hashes pieces of files, the other writes them.

Whoever fills pieces waits while all of them are on their way, so memory is bounded. After a failure pieces are taken
and dropped: who fills them takes part in an exchange with other ranks, and they need it to go through with it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from toolkit.checkpoint.host_memory import host_memory
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.output_file import OutputFile

PIECE_BYTES = 2 * 2**20
"""Copied, hashed and written while it is in the CPU's cache; a multiple of any block that direct writes need."""
PIECES = 4


@dataclass(frozen=True, kw_only=True)
class _Job:
    file: OutputFile
    piece: torch.Tensor
    nbytes: int
    is_last: bool

    @property
    def content(self) -> memoryview:
        return memoryview(self.piece[: self.nbytes].numpy())  # type: ignore[arg-type]


class PieceStream:
    """`take` a piece, fill it, `put` it; then `close`. Runs until `wait` says so."""

    def __init__(self, *, pieces: int = PIECES, piece_bytes: int = PIECE_BYTES) -> None:
        self.records: list[FileRecord] = []
        """Of the files that are complete and on the disk."""
        self.failure: tuple[str, BaseException] | None = None
        """The first one, with the path of the file."""
        self._failing = threading.Lock()
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for piece in torch.split(host_memory(pieces * piece_bytes), piece_bytes):
            self._free.put(piece)
        self._to_hash: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_write: SimpleQueue[_Job | None] = SimpleQueue()
        self._hasher = threading.Thread(target=self._hash, name="checkpoint-hash", daemon=True)
        self._writer = threading.Thread(target=self._write, name="checkpoint-write", daemon=True)
        self._hasher.start()
        self._writer.start()

    def take(self) -> torch.Tensor:
        """A piece to fill, of as many bytes as any. Waits for one."""
        return self._free.get()

    def put(self, file: OutputFile, piece: torch.Tensor, nbytes: int, *, is_last: bool) -> None:
        """Append the first bytes of a piece to a file; with `is_last` have it on the disk."""
        self._to_hash.put(_Job(file=file, piece=piece, nbytes=nbytes, is_last=is_last))

    def close(self) -> None:
        """No piece follows."""
        self._to_hash.put(None)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether all is on the disk, or has failed, within this time."""
        self._writer.join(timeout_seconds)
        return not self._writer.is_alive()

    def fail(self, path: str, error: BaseException) -> None:
        """Nothing more is written; what was is of no use."""
        with self._failing:
            self.failure = self.failure or (path, error)

    def _hash(self) -> None:
        while (job := self._to_hash.get()) is not None:
            self._try(job, lambda job: job.file.hash(job.content))
            self._to_write.put(job)
            del job  # else its piece would be held while the next one is waited for
        self._to_write.put(None)

    def _write(self) -> None:
        while (job := self._to_write.get()) is not None:
            self._try(job, self._append)
            self._free.put(job.piece)

    def _append(self, job: _Job) -> None:
        job.file.write(job.content)
        if job.is_last:
            self.records.append(job.file.finish())

    def _try(self, job: _Job, step: Callable[[_Job], None]) -> None:
        if self.failure is not None:
            return
        try:
            step(job)
        except BaseException as error:
            self.fail(job.file.path, error)
