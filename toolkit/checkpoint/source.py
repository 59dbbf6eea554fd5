"""Where the tensors of a checkpoint come from: each source gives a rank those that it writes, one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Ranks

Own = tuple[str, str, torch.Tensor | list[torch.Tensor]]
"""(kind, name, tensor or the next runs of its bytes), to be looked at before the next one is asked for."""

Snapshot = Callable[[Ranks], Iterator[Own]]
"""Gives what this rank writes; collective over the ranks that it is given."""


class Source(ABC):
    """All tensors of a checkpoint."""

    @property
    @abstractmethod
    def specs(self) -> list[tuple[str, Sequence[TensorSpec]]]:
        """Of each kind, in the order in which they come; the same on every rank."""

    @abstractmethod
    def own(self, files: Sequence[PlannedFile], ranks: Ranks) -> Iterator[Own]:
        """What this rank writes of `files`, or more. Iterating is a collective call."""

    @abstractmethod
    def snapshot(self, files: Sequence[PlannedFile], ranks: Ranks, copies: HostCopies) -> Snapshot:
        """The same from copies of what there is now. A collective call; tensors may change after it."""


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """All tensors of one kind: `model`, or a state of the optimizer such as `exp_avg`.

    `tensors` gives (name, whole tensor) in the order of `specs`, on every rank. Iterating may be collective, and a
    tensor is read before the next one is asked for.
    """

    kind: str
    specs: Sequence[TensorSpec]
    tensors: Iterable[tuple[str, torch.Tensor]]


class WholeTensors(Source):
    """Tensors that every rank goes over."""

    def __init__(self, groups: Sequence[TensorGroup]) -> None:
        self._groups = groups

    @property
    def specs(self) -> list[tuple[str, Sequence[TensorSpec]]]:
        """See Source."""
        return [(group.kind, group.specs) for group in self._groups]

    def own(self, files: Sequence[PlannedFile], ranks: Ranks) -> Iterator[Own]:
        """See Source. Gives all, and leaves the choice to the writer."""
        for group in self._groups:
            due = iter(group.specs)
            for name, tensor in group.tensors:
                spec = next(due, None)
                if spec is None or spec.name != name:
                    raise ValueError(f"{group.kind}: {name} was given, {spec.name if spec else 'nothing'} is due")
                yield group.kind, name, tensor
                del tensor  # else it would be held while the next one is gathered
            if (spec := next(due, None)) is not None:
                raise ValueError(f"{group.kind}: {spec.name} is due, nothing was given")

    def snapshot(self, files: Sequence[PlannedFile], ranks: Ranks, copies: HostCopies) -> Snapshot:
        """See Source."""
        written = {(file.kind, spec.name) for file in files if file.rank == ranks.rank for spec in file.specs}
        copies.clear(sum(file.nbytes for file in files if file.rank == ranks.rank), len(written))
        kept: list[Own] = []
        for kind, name, tensor in self.own(files, ranks):
            if (kind, name) in written:
                assert isinstance(tensor, torch.Tensor)
                kept.append((kind, name, copies.copy(tensor)))
            del tensor
        return lambda ranks: iter(kept)
