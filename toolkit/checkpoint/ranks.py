"""Ranks that act together, and agree on the result.

A rank that raises while others wait for it in a collective call leaves them waiting. So whatever can fail on one rank
(a full disk, a file without permission) is caught there, sent to all, and raised by all as the same error.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.files import printable
from toolkit.parallel.groups import transfer_device
from toolkit.remote_files import advice_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A failure on a rank, as plain data that can be sent to the others."""

    rank: int
    path: str
    reason: str
    is_disk_full: bool = False
    is_permission_denied: bool = False
    advice: str = ""
    """What to do about it, where it happened behind a URL."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, path: Path | str) -> "RankFailure":
        """The failure that an exception means. `path`: where it happened, unless the exception names a file."""
        if not isinstance(error, OSError):
            kind = "" if isinstance(error, ToolkitError) else f"{type(error).__name__}: "
            return cls(rank=rank, path=printable(path), reason=printable(f"{kind}{error}"))
        return cls(
            rank=rank,
            path=printable(path if error.filename is None else str(error.filename)),
            reason=printable(error.strerror or str(error)),
            is_disk_full=error.errno in (errno.ENOSPC, errno.EDQUOT),
            is_permission_denied=error.errno in (errno.EACCES, errno.EPERM, errno.EROFS),
            advice=advice_of(error),
        )


def first_failure(outcomes: Sequence[object]) -> RankFailure | None:
    """The failure of the lowest rank; a full disk comes first, since other failures may follow from it."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    return min(failures, key=lambda failure: (not failure.is_disk_full, failure.rank), default=None)


class Ranks:
    """The ranks of a process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    @classmethod
    def single(cls) -> "Ranks":
        return cls(None, 0, 1)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> "Ranks":
        """The ranks of `group`, by default of the whole job; this process alone where no group was initialized."""
        if not dist.is_initialized():
            return cls.single()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def with_own_connections(self) -> "Ranks":
        """Return the ranks in a new gloo group, for a thread beside training. A collective call.

        Its messages cannot be mixed up with those of training.
        """
        if self.size == 1:
            return self
        members = None if self._group is None else dist.get_process_group_ranks(self._group)
        group = dist.new_group(members, backend="gloo", use_local_synchronization=members is not None)
        return Ranks(group, self.rank, self.size)

    @property
    def device(self) -> torch.device:
        """Device on which tensors must be to be transferred."""
        return transfer_device(self._group) if self.size > 1 else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def transfer(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[dist.Work]:
        """Start sending tensors to ranks, and receiving into tensors from ranks; in order between any two of them.

        `wait()` of what is returned raises RuntimeError when a peer is gone.
        """
        if not sends and not receives:
            return []
        group = self._group
        operations = [
            dist.P2POp(function, tensor, peer if group is None else dist.get_global_rank(group, peer), group)
            for function, transfers in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in transfers
        ]
        return list(dist.batch_isend_irecv(operations))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, on every rank. A collective call."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank. A cheap collective call."""
        if self.size == 1:
            return flag
        lowest = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        return bool(lowest.item())

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank; every rank returns its result, or raises its exception."""
        if self.size == 1:
            return function()
        outcome: tuple[T | None, Exception | None] = (None, None)
        if self.is_first:
            try:
                outcome = (function(), None)
            except Exception as error:
                outcome = (None, error)
        value, raised = self.gather(outcome)[0]
        if raised is not None:
            raise raised
        return value  # type: ignore[return-value]
