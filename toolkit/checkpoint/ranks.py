"""Ranks that act together, and agree on how it went.

A rank that raises while the others wait for it leaves them waiting. So whatever can fail on one rank (a full disk, a
file that it may not write) is caught there, told to all, and raised by all as the same error.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from toolkit.checkpoint.names import shown

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong on a rank, as plain data that travels to the others."""

    rank: int
    path: str
    reason: str
    is_full: bool = False
    """Whether it was for lack of room."""
    is_denied: bool = False
    """Whether it was for lack of permission."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, path: Path | str) -> "Failure":
        """The failure that an exception stands for. `path`: where it happened, unless the exception knows better."""
        path = shown(str(path))
        if isinstance(error, OSError):
            path = shown(str(error.filename)) if error.filename is not None else path
            return cls(
                rank=rank,
                path=path,
                reason=shown(error.strerror or str(error)),
                is_full=error.errno in (errno.ENOSPC, errno.EDQUOT),
                is_denied=error.errno in (errno.EACCES, errno.EPERM, errno.EROFS),
            )
        return cls(rank=rank, path=path, reason=shown(f"{type(error).__name__}: {error}"))


class Work(Protocol):
    """A transfer on its way."""

    def wait(self) -> object:
        """Return when it is over. Raises RuntimeError when a peer is gone."""


class Ranks:
    """The ranks of a process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    @classmethod
    def alone(cls) -> "Ranks":
        """No one to agree with."""
        return cls(None, 0, 1)

    @classmethod
    def joined(cls, group: dist.ProcessGroup | None = None) -> "Ranks":
        """The ranks of `group`, of the whole job where it is None; alone where no group was initialised."""
        if not dist.is_initialized():
            return cls.alone()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def apart(self) -> "Ranks":
        """The same ranks over connections of their own through host memory, for a thread beside training.

        What they say there cannot cross with what training says. A collective call.
        """
        if self.size == 1:
            return self
        members = None if self._group is None else dist.get_process_group_ranks(self._group)
        group = dist.new_group(members, backend="gloo", use_local_synchronization=members is not None)
        return Ranks(group, self.rank, self.size)

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be transferred."""
        if self.size > 1 and dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def transfer(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Work]:
        """Start sending tensors to ranks, and receiving into tensors from ranks; in order between any two of them."""
        if not sends and not receives:
            return []
        group = self._group
        operations = [
            dist.P2POp(function, tensor, peer if group is None else dist.get_global_rank(group, peer), group)
            for function, transfers in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in transfers
        ]
        return list(dist.batch_isend_irecv(operations))

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank. A collective call."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    def all(self, flag: bool) -> bool:
        """Whether every rank says so. A collective call, and a cheap one."""
        if self.size == 1:
            return flag
        lowest = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
        return bool(lowest.item())

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first rank, on every rank; what it raises, every rank raises."""
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


def first_failure(outcomes: Sequence[object]) -> Failure | None:
    """Of the lowest rank that failed; one that ran out of room counts before others, which may follow from it."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    return min(failures, key=lambda failure: (not failure.is_full, failure.rank), default=None)
