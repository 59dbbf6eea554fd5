"""The board: a small store, reached by every rank, on which each keeps one entry. One thread of a rank uses it."""

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from toolkit.train.watchdog.entry import Entry, Verdict

_EMPTY = "-"
_ANSWER_SECONDS = 60
_FIRST_ENTRY_SECONDS = 10
"""All have met a moment ago, so that rank 0 is as far."""
P = ParamSpec("P")
T = TypeVar("T")


class BoardLostError(Exception):
    """Whoever keeps the board is gone."""


def _reached(function: Callable[P, T]) -> Callable[P, T]:
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except (dist.DistError, RuntimeError) as error:
            raise BoardLostError(str(error).partition("\n")[0]) from error

    return call


class Board:
    """Each call is one round trip or two, whatever the number of ranks, but `read` of many."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        # A connection of its own: whoever waits for a key of the job's store would make the watch wait as well.
        self._store = PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]  # the stubs lack it
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self.rank, self.world_size = rank, world_size

    @_reached
    def open(self, entry: Entry) -> Entry | None:
        """Begin with this rank's entry and what `look` reads. Rank 0's entry; the others wait for it a little."""
        self._store.compare_set("verdict", "", _EMPTY)
        self.publish(entry)
        if self.rank:
            with contextlib.suppress(dist.DistStoreError):  # too late: its entry comes when it comes
                self._store.wait(["entry-0"], timedelta(seconds=_FIRST_ENTRY_SECONDS))
        first = self._store.compare_set("entry-0", "", _EMPTY)
        return None if first == _EMPTY.encode() else Entry.from_json(first)

    @_reached
    def publish(self, entry: Entry) -> None:
        """Replace this rank's entry."""
        self._store.set(f"entry-{self.rank}", entry.to_json())

    @_reached
    def look(self) -> tuple[Entry | None, Verdict | None]:
        """The entry of rank 0, and why the job ends, if it does."""
        first, verdict = self._store.multi_get(["entry-0", "verdict"])
        return (
            None if first == _EMPTY.encode() else Entry.from_json(first),
            None if verdict == _EMPTY.encode() else Verdict.from_json(verdict),
        )

    @_reached
    def read(self, ranks: Iterable[int]) -> dict[int, Entry]:
        """The entries of those that have one."""
        wanted = list(ranks)
        if not self._store.check([f"entry-{rank}" for rank in wanted]):
            wanted = [rank for rank in wanted if self._store.check([f"entry-{rank}"])]
        if not wanted:
            return {}
        texts = self._store.multi_get([f"entry-{rank}" for rank in wanted])
        return {
            rank: Entry.from_json(text) for rank, text in zip(wanted, texts, strict=True) if text != _EMPTY.encode()
        }

    @_reached
    def accuse(self, verdict: Verdict) -> Verdict:
        """Propose a verdict; the one that counts, which may be another rank's."""
        return Verdict.from_json(self._store.compare_set("verdict", _EMPTY, verdict.to_json()))

    @_reached
    def number(self, name: str) -> int:
        """How many ranks have asked for a number under this name, this one included."""
        return int(self._store.add(f"number-{name}", 1))

    @_reached
    def numbers(self, name: str) -> int:
        """How many have."""
        return int(self._store.add(f"number-{name}", 0))
