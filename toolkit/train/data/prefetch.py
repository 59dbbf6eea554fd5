"""Prefetcher: builds the next micro-batches in a background thread while the accelerator is busy with this one."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.train.data.samples import Samples


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A micro-batch as int64 tensors [b, s], in pinned memory where there is CUDA."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None


class Prefetcher:
    """Iterates over the micro-batches of `schedule`, pairs of (step, positions), in order.

    An error in the background is raised where the batch is asked for. Close it (or leave its `with` block) to end the
    thread before the schedule is through.
    """

    def __init__(
        self,
        samples: Samples,
        schedule: Iterable[tuple[int, Sequence[int] | NDArray[np.int64]]],
        *,
        depth: int = 2,
    ) -> None:
        self._samples = samples
        self._schedule = schedule
        self._pin = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
        self._ready: queue.Queue[TensorBatch | BaseException | None] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[TensorBatch]:
        return self

    def __next__(self) -> TensorBatch:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, TensorBatch):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and drop what it has built. May be called twice."""
        self._closed.set()
        # Makes room, so that a thread that waits to put notices.
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join()

    def _work(self) -> None:
        last: BaseException | None = None
        try:
            for step, positions in self._schedule:
                if self._closed.is_set():
                    return
                self._put(self._tensors(step, positions))
        except BaseException as error:
            last = error
        self._put(last)

    def _tensors(self, step: int, positions: Sequence[int] | NDArray[np.int64]) -> TensorBatch:
        batch = self._samples.batch(step, positions)
        return TensorBatch(
            input_ids=self._tensor(batch.input_ids),
            labels=self._tensor(batch.labels),
            position_ids=None if batch.position_ids is None else self._tensor(batch.position_ids),
        )

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor

    def _put(self, item: TensorBatch | BaseException | None) -> None:
        # A bounded wait, because whoever would make room may have closed us instead.
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
