"""Saving while training goes on: the same steps, agreement and bytes as `save`, with a pause for training in between.

`begin` gathers the tensors and keeps this rank's share in host memory, which its background writer then empties onto
the disk. `poll`, at a step boundary, publishes the checkpoint once every rank has written. Everything collective
happens in these calls, never in the thread, so it cannot cross with what training communicates.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.retention import Keep
from toolkit.checkpoint.save import FileSizes, Saved, Saving, TensorGroup


class AsyncSaver:
    """At most one checkpoint on its way at a time. All methods are collective calls.

    Its host memory (this rank's share of the tensors) stays with it.
    """

    def __init__(self, *, ranks: Ranks | None = None, sizes: FileSizes | None = None) -> None:
        self._ranks = ranks or Ranks.joined()
        self._sizes = sizes or FileSizes()
        self._saving: Saving | None = None
        self._snapshot = HostCopies()

    @property
    def is_running(self) -> bool:
        """Whether a checkpoint has begun that is not committed yet."""
        return self._saving is not None

    def begin(
        self,
        run_dir: Path,
        step: int,
        *,
        groups: Sequence[TensorGroup],
        trainer_state: Mapping[str, Any],
        beside: Callable[[Path], None] = lambda folder: None,
        keep: Keep | None = None,
    ) -> Saved | None:
        """Take a snapshot; arguments as of `save`. Waits for the one before and returns it. Raises CheckpointError."""
        before = self.finish()
        self._saving = Saving(
            run_dir,
            step,
            groups=groups,
            trainer_state=trainer_state,
            beside=beside,
            keep=keep,
            ranks=self._ranks,
            sizes=self._sizes,
            snapshot=self._snapshot,
        )
        return before

    def poll(self) -> Saved | None:
        """The checkpoint, once every rank has written its share; None until then. Raises CheckpointError."""
        if self._saving is None or not self._ranks.all(self._saving.is_written()):
            return None
        return self.finish()

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that has begun, if there is one. Raises CheckpointError."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.commit()
