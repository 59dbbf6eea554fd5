"""Holdings: the parameters of one rank, in the order in which an engine flattens them.

Decoder layers are all alike, so a rank's parameters are a front (embeddings), one layer's times their number, and a
back (final norm, head). All sums are closed forms: a model of a thousand layers costs no more than one of two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Parameters of one group of the optimizer, as element counts in order."""

    front: tuple[int, ...]
    layer: tuple[int, ...]
    layers: int
    back: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the whole group."""
        return sum(self.front) + self.layers * sum(self.layer) + sum(self.back)

    @property
    def count(self) -> int:
        """How many parameters."""
        return len(self.front) + self.layers * len(self.layer) + len(self.back)

    @property
    def counted(self) -> Iterator[tuple[int, int]]:
        """(elements, how many parameters of that size), in order, layers together."""
        yield from ((numel, 1) for numel in self.front)
        if self.layers:
            yield from ((numel, self.layers) for numel in self.layer)
        yield from ((numel, 1) for numel in self.back)

    def __iter__(self) -> Iterator[int]:
        """The size of every parameter, in order."""
        yield from self.front
        for _ in range(self.layers):
            yield from self.layer
        yield from self.back

    def touching(self, start: int, stop: int) -> int:
        """Elements of the parameters that have any element in [start, stop) of the flattened group, counted whole."""
        stop = min(stop, self.numel)
        if start >= stop:
            return 0
        return self._boundary(stop - 1)[1] - self._boundary(start)[0]

    def count_touching(self, start: int, stop: int) -> int:
        """How many parameters have any element in [start, stop) of the flattened group."""
        offset = count = 0
        for numel in self:
            count += offset < stop and offset + numel > start
            offset += numel
        return count

    def _boundary(self, offset: int) -> tuple[int, int]:
        """(first, behind last) element of the parameter that holds element `offset`."""
        period, front = sum(self.layer), sum(self.front)
        if offset < front:
            return _find(self.front, offset, 0)
        inside = offset - front
        if inside < period * self.layers:
            return _find(self.layer, inside % period, offset - inside % period)
        return _find(self.back, inside - period * self.layers, front + period * self.layers)


def _find(numels: Iterable[int], offset: int, base: int) -> tuple[int, int]:
    for numel in numels:
        if offset < numel:
            return base, base + numel
        offset -= numel
        base += numel
    raise AssertionError("offset beyond the group")


@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """What one rank holds: its parameters by group of the optimizer, and buffers of the model."""

    groups: tuple[Group, ...]
    """Without empty ones. First the matrices, which decay, then the rest; or all in one."""
    layers: int
    layer_numel: int
    """Elements of one decoder layer."""
    buffer_bytes: int
    """Rotary tables, masks and the like; they keep their own dtype."""
    matrices: int
    """Elements of matrices that multiply activations: all but the token embedding, unless that is the head too."""
    placeholders: int = 0
    """Modules whose parameters another pipeline stage holds; one number stands for each."""

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(group.numel for group in self.groups)

    @property
    def count(self) -> int:
        """How many parameters."""
        return sum(group.count for group in self.groups)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(numel for group in self.groups for numel, _ in group.counted)
