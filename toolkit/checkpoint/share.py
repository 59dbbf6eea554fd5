"""What one rank does for a checkpoint: its files of tensors, and on the first rank the small files beside them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Failure, Ranks
from toolkit.checkpoint.share_writer import Outcome, ShareWriter
from toolkit.checkpoint.source import Own


class Share:
    """This rank's share of the files in `folder`. `small` writes those that are no tensors, where this rank is to."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[PlannedFile],
        ranks: Ranks,
        small: Callable[[], list[FileRecord]] | None,
    ) -> None:
        self._folder, self._rank = folder, ranks.rank
        self._files = [file for file in files if file.rank == ranks.rank]
        self._small = small
        self._writer: ShareWriter | None = None
        self._beside: threading.Thread | None = None
        self._records: list[FileRecord] = []
        self._failed: BaseException | None = None

    def write(self, tensors: Iterator[Own]) -> None:
        """Take all tensors, and return when they are on their way. Raises what iterating raises."""
        beside = threading.Thread(target=self._write_small, name="checkpoint-small", daemon=True)
        beside.start()
        self._beside = beside
        self._writer = ShareWriter(self._folder, self._files, rank=self._rank)
        try:
            for kind, name, tensor in tensors:
                self._writer.put(kind, name, tensor)
                del tensor  # else it would be held while the next one is gathered
        except BaseException:
            self._writer.abandon()
            beside.join()  # who removes the folder shall find nobody in it
            raise
        self._writer.close()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether all is on the disk, or has failed, within this time."""
        end = time.monotonic() + timeout_seconds
        assert self._beside is not None
        assert self._writer is not None
        self._beside.join(timeout_seconds)
        return not self._beside.is_alive() and self._writer.wait(max(0.0, end - time.monotonic()))

    @property
    def outcome(self) -> Outcome:
        """What was written, or why not; when `wait` says that it is over."""
        if self._failed is not None:
            return Failure.of(self._failed, rank=self._rank, path=self._folder)
        assert self._writer is not None
        outcome = self._writer.outcome
        return outcome if isinstance(outcome, Failure) else outcome + self._records

    @property
    def error(self) -> BaseException | None:
        """The exception behind a failure."""
        return self._failed or (None if self._writer is None else self._writer.error)

    def _write_small(self) -> None:
        try:
            self._records = [] if self._small is None else self._small()
        except BaseException as error:
            self._failed = error
