"""Where a rank waits for a collective that it has started, seen from Python.

A collective that is started with `async_op=True` returns a `Work`, and `Work.wait` is where the rank needs its result:
what the rank computes between the two can hide the transfer. ProcessGroup's methods and `Work.wait` are replaced while
a step is counted. Collectives that C++ starts, which are those of DDP's buckets, are waited for by C++ as well, when
the backward pass has ended.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_STARTS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)


class CollectiveWaits:
    """Calls `waited(start)` where the rank waits for what was started. `start`: whatever `started` was given."""

    def __init__(self, waited: Callable[[Any], None]) -> None:
        self._waited = waited
        self._unclaimed: list[Any] = []
        """Starts for which no method of a ProcessGroup has returned yet."""
        self._works: dict[int, tuple[Any, Any]] = {}
        self._results: dict[int, Any] = {}
        self._patches: list[Any] = []

    def open(self) -> None:
        """Begin to watch."""
        for name in _STARTS:
            original = getattr(dist.ProcessGroup, name, None)
            if original is None:
                continue  # torch has named some of them twice, and not in all versions
            self._patch(dist.ProcessGroup, name, self._starting(original))
        self._patch(dist.Work, "wait", self._waiting(dist.Work.wait))

    def close(self) -> None:
        """Watch no more."""
        for patch in self._patches:
            patch.stop()
        self._patches = []

    def started(self, start: Any) -> None:
        """A collective of c10d has been started in this thread."""
        self._unclaimed.append(start)

    def result_started(self, start: Any, result: torch.Tensor) -> None:
        """A functional collective has been started: `result` is waited for by the operation `wait_tensor`."""
        self._results[result.untyped_storage()._cdata] = start

    def result_awaited(self, result: torch.Tensor) -> None:
        """The operation `wait_tensor` is called."""
        start = self._results.pop(result.untyped_storage()._cdata, None)
        if start is not None:
            self._waited(start)

    def backward_ended(self) -> None:
        """No backward pass runs now: what C++ has started in one is done."""
        for start in self._unclaimed:
            self._waited(start)
        self._unclaimed = []

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        patch = mock.patch.object(owner, name, value)
        patch.start()
        self._patches.append(patch)

    def _starting(self, original: Any) -> Any:
        def start(*arguments: Any, **keywords: Any) -> Any:
            before = len(self._unclaimed)
            work = original(*arguments, **keywords)
            claimed = self._unclaimed[before:]
            del self._unclaimed[before:]
            if work is not None and claimed:
                # pybind returns the same object for the same Work as long as it is kept.
                self._works[id(work)] = (work, claimed[-1])
            return work

        return start

    def _waiting(self, original: Any) -> Any:
        def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
            _, start = self._works.pop(id(work), (None, None))
            if start is not None:
                self._waited(start)
            return original(work, *arguments, **keywords)

        return wait
