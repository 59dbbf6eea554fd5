"""One rank's share of a checkpoint, written by a thread of its own while the next parameter is gathered.

Between the two is a queue that holds a bounded number of bytes. With `snapshot`, it holds the rank's share in host
memory, and writing begins once that is complete: nothing slows down what training waits for.

After a failure tensors are taken and dropped: gathering is collective, and the other ranks need this one to go through
with it.
"""

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Failure
from toolkit.checkpoint.tensor_file import TensorFile

MAX_QUEUED_BYTES = 256 * 2**20
Outcome = Failure | list[FileRecord]


class BackgroundWriter:
    """Writes this rank's `files`, which follow each other as their tensors do, into `folder`."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[PlannedFile],
        *,
        rank: int,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        snapshot: HostCopies | None = None,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._max_queued_bytes, self._snapshot = max_queued_bytes, snapshot
        self._file_of = {(file.kind, spec.name): file for file in files for spec in file.specs}
        self._open: dict[str, TensorFile] = {}
        self._records: list[FileRecord] = []
        self._failure: Failure | None = None
        self._error: BaseException | None = None
        self._queue: deque[tuple[PlannedFile, str, torch.Tensor]] = deque()
        self._queued_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        if snapshot is None:
            self._thread.start()
        else:
            snapshot.clear(sum(file.nbytes for file in files), len(self._file_of))

    def put(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of a tensor, if this rank writes it. Waits while the queue is full."""
        file = self._file_of.get((kind, name))
        if file is None or self._failure is not None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(tensor.nbytes))
        # A copy: the caller may free or reuse the gathered parameter when we ask for the next one.
        held = tensor.detach().to("cpu", copy=True) if self._snapshot is None else self._snapshot.copy(tensor)
        with self._changed:
            self._queue.append((file, name, held))
            self._queued_bytes += held.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """No tensor follows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._snapshot is not None:
            self._thread.start()

    def abandon(self) -> None:
        """Stop as soon as may be; what was written is of no use."""
        with self._changed:
            self._queue.clear()
            self._failure = self._failure or Failure(rank=self._rank, path="", reason="abandoned")
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether all is on the disk, or has failed, within this time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def outcome(self) -> Outcome:
        """What was written, or why not; when `wait` says that it is over."""
        return self._records if self._failure is None else self._failure

    @property
    def error(self) -> BaseException | None:
        """The exception behind a failure."""
        return self._error

    def _has_room(self, nbytes: int) -> bool:
        if self._snapshot is not None or self._failure is not None:
            return True
        return not self._queue or self._queued_bytes + nbytes <= self._max_queued_bytes

    def _run(self) -> None:
        path = ""
        try:
            while (item := self._next()) is not None:
                file, name, tensor = item
                path = file.path
                self._write(file, name, tensor)
                del item, tensor
            for path in self._open:
                self._open[path].close()  # raises: a tensor is missing
            missing = {file.path for file in self._file_of.values()} - {record.path for record in self._records}
            if missing:
                path = min(missing)
                raise ValueError("no tensor of this file was given")
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or Failure.of(error, rank=self._rank, path=self._folder / path)
                self._error = error
                self._queue.clear()
                self._changed.notify_all()
        finally:
            for opened in self._open.values():
                opened.abandon()

    def _next(self) -> tuple[PlannedFile, str, torch.Tensor] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._is_closed)
            if not self._queue:
                return None
            item = self._queue.popleft()
            self._queued_bytes -= item[2].nbytes
            self._changed.notify_all()
            return item

    def _write(self, file: PlannedFile, name: str, tensor: torch.Tensor) -> None:
        if file.path not in self._open:
            self._open[file.path] = TensorFile(self._folder / file.path, file.specs)
        opened = self._open[file.path]
        opened.write(name, tensor)
        if opened.is_complete:
            size, sha256 = opened.close()
            del self._open[file.path]
            self._records.append(FileRecord(path=file.path, size=size, sha256=sha256))
