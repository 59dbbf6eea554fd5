"""Saving while training goes on: the same steps, agreement and bytes as `save`, with a copy of the present in between.

`begin` copies what this rank holds into host memory. A thread then does the rest: it brings the tensors together where
they are written, has them written, agrees with the other ranks and publishes. It talks to them over connections that
it alone uses, so that nothing crosses with what training communicates. `poll`, at a step boundary, tells how it went.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.retention import Keep
from toolkit.checkpoint.save import Aside, FileSizes, Saved, Saving
from toolkit.checkpoint.source import Source, TensorGroup

_HEARTBEAT_SECONDS = 1.0
"""Ranks that are done wait for the others in collective calls no longer than this: a slow disk is no timeout."""


class AsyncSaver:
    """At most one checkpoint on its way at a time. All methods are collective calls.

    Its host memory (this rank's part of the tensors) and its connections stay with it.
    """

    def __init__(self, *, ranks: Ranks | None = None, sizes: FileSizes | None = None) -> None:
        self._ranks = ranks or Ranks.joined()
        self._sizes = sizes or FileSizes()
        self._running: _Running | None = None
        self._aside: Aside | None = None

    @property
    def is_running(self) -> bool:
        """Whether a checkpoint has begun that nobody was told about yet."""
        return self._running is not None

    def begin(
        self,
        run_dir: Path,
        step: int,
        *,
        groups: Sequence[TensorGroup] | Source,
        trainer_state: Mapping[str, Any],
        beside: Callable[[Path], None] = lambda folder: None,
        keep: Keep | None = None,
    ) -> Saved | None:
        """Take a snapshot; arguments as of `save`. Waits for the one before and returns it. Raises CheckpointError.

        `beside` is called in the thread.
        """
        before = self.finish()
        if self._aside is None:
            self._aside = Aside(copies=HostCopies(), ranks=self._ranks.apart())
        saving = Saving(
            run_dir,
            step,
            groups=groups,
            trainer_state=trainer_state,
            beside=beside,
            keep=keep,
            ranks=self._ranks,
            sizes=self._sizes,
            aside=self._aside,
        )
        self._running = _Running(saving)
        return before

    def poll(self) -> Saved | None:
        """The checkpoint, once every rank knows it published; None until then. Raises CheckpointError."""
        if self._running is None or not self._ranks.all(self._running.is_over(0.0)):
            return None
        running, self._running = self._running, None
        return running.result()

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that has begun, if there is one. Raises CheckpointError."""
        running, self._running = self._running, None
        if running is None:
            return None
        while not self._ranks.all(running.is_over(_HEARTBEAT_SECONDS)):
            pass
        return running.result()


class _Running:
    """A thread that finishes a checkpoint."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_over(self, timeout_seconds: float) -> bool:
        """Whether it has ended, well or not, within this time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def result(self) -> Saved:
        """What it saved; raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def _run(self) -> None:
        try:
            self._saved = self._saving.finish()
        except BaseException as error:
            self._error = error
