"""HeartbeatStore: the heartbeats of all ranks and the failure report, in the job's TCPStore."""

import contextlib
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from toolkit.launch.health.heartbeat import FailureReport, Heartbeat

_EMPTY = "-"
_RESPONSE_SECONDS = 60
_FIRST_HEARTBEAT_SECONDS = 10
"""Seconds of waiting for rank 0's first heartbeat: all ranks have just passed the rendezvous, so rank 0 is about as
far."""
_LOST_CONNECTION = re.compile(r"\bgloo/|\bNCCL\b|[Cc]onnection (closed|reset|refused)|Broken pipe")
P = ParamSpec("P")
T = TypeVar("T")


class HeartbeatStoreLostError(Exception):
    """The process that hosts the store is gone."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank has exited."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
    )


def _request(function: Callable[P, T]) -> Callable[P, T]:
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except (dist.DistError, RuntimeError) as error:
            raise HeartbeatStoreLostError(str(error).partition("\n")[0]) from error

    return call


class HeartbeatStore:
    """Each call takes one or two round trips, whatever the number of ranks, except a `read` of many.

    Only one thread of a rank may use it.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        # A connection of its own: a thread that waits for a key of the job's store would block the watchdog as well.
        self._store = PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]  # the stubs lack it
        self._store.set_timeout(timedelta(seconds=_RESPONSE_SECONDS))
        self.rank = rank
        self.world_size = world_size

    @_request
    def open(self, heartbeat: Heartbeat) -> Heartbeat | None:
        """Publish the first heartbeat and create the keys that `poll` reads. Returns rank 0's, for which the other
        ranks wait a little."""
        self._store.compare_set("report", "", _EMPTY)
        self.publish(heartbeat)
        if self.rank:
            with contextlib.suppress(dist.DistStoreError):  # rank 0 is late: `poll` will find it
                self._store.wait(["heartbeat-0"], timedelta(seconds=_FIRST_HEARTBEAT_SECONDS))
        return _heartbeat(self._store.compare_set("heartbeat-0", "", _EMPTY))

    @_request
    def publish(self, heartbeat: Heartbeat) -> None:
        self._store.set(f"heartbeat-{self.rank}", heartbeat.to_json())

    @_request
    def poll(self) -> tuple[Heartbeat | None, FailureReport | None]:
        """Return the heartbeat of rank 0, and the failure report if there is one."""
        first, report = self._store.multi_get(["heartbeat-0", "report"])
        return _heartbeat(first), None if report == _EMPTY.encode() else FailureReport.from_json(report)

    @_request
    def read(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the heartbeats of those ranks that have published one."""
        wanted = list(ranks)
        if not self._store.check([f"heartbeat-{rank}" for rank in wanted]):
            wanted = [rank for rank in wanted if self._store.check([f"heartbeat-{rank}"])]
        texts = self._store.multi_get([f"heartbeat-{rank}" for rank in wanted]) if wanted else []
        heartbeats = {rank: _heartbeat(text) for rank, text in zip(wanted, texts, strict=True)}
        return {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat is not None}

    @_request
    def report_failure(self, report: FailureReport) -> FailureReport:
        """Publish a failure report; returns the one that counts, which may be another rank's."""
        return FailureReport.from_json(self._store.compare_set("report", _EMPTY, report.to_json()))

    @_request
    def increment(self, counter: str) -> int:
        return int(self._store.add(f"counter-{counter}", 1))

    @_request
    def count(self, counter: str) -> int:
        return int(self._store.add(f"counter-{counter}", 0))


def _heartbeat(text: bytes) -> Heartbeat | None:
    return None if text == _EMPTY.encode() else Heartbeat.from_json(text)
