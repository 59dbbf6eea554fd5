"""Each tensor of a checkpoint is progress, however slow the disk."""

from collections.abc import Iterator, Sequence

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.source import Own, Snapshot, Source
from toolkit.train.watchdog.mark import Mark


class MarkedSource(Source):
    """The tensors of another source."""

    def __init__(self, source: Source, mark: Mark) -> None:
        self._source, self._mark = source, mark

    @property
    def specs(self) -> list[tuple[str, Sequence[TensorSpec]]]:
        """See Source."""
        return self._source.specs

    def own(self, files: Sequence[PlannedFile], ranks: Ranks) -> Iterator[Own]:
        """See Source."""
        for own in self._source.own(files, ranks):
            yield own
            self._mark("checkpoint")

    def snapshot(self, files: Sequence[PlannedFile], ranks: Ranks, copies: HostCopies) -> Snapshot:
        """See Source."""
        return self._source.snapshot(files, ranks, copies)
