"""Parameter: one parameter of a model. RankParameters: all those of a rank, in the order in which engines flatten them.

Blocks are runs of features along the sharded dimension: heads of some width, or single columns. A rank holds an equal
share of each block; where there are fewer units than ranks (key-value heads), neighboring ranks share one.

Decoder layers are all alike, so a rank's parameters are a front (embeddings), one layer's times their number, and a
back (final norm, head). All sums are closed forms: a model of a thousand layers costs no more than one of two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from toolkit.models.tensor_plan import Blocks

Place = Literal["layer", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, or a buffer of the model."""

    name: str
    """Hugging Face's name; inside a decoder layer, what follows the layer's index."""
    shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that tensor parallelism shards; None if it is replicated."""
    blocks: Blocks = ()
    """How that dimension consists of units; () for columns without units."""
    is_vocabulary: bool = False
    """Its rows are tokens: they are padded to a multiple of the ranks."""
    place: Place = "layer"
    """Where it is: in every decoder layer, on the first pipeline stage, or on the last."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it, which puts it into another group of the optimizer: it is a matrix."""
        return len(self.shape) >= 2

    def local_numels(self, tp: int) -> tuple[int, ...]:
        """Elements on one of `tp` ranks. Several numbers if tensor parallelism makes several parameters of
        one: it does so if a fused projection has blocks that are sharded and others that are replicated.
        """
        if tp == 1 or self.dim is None:
            return (self.numel,)
        features = self.shape[self.dim]
        other = self.numel // features
        if self.is_vocabulary:
            return (-(-features // tp) * other,)
        blocks = self.blocks or ((features, 1),)
        parts: list[int] = []
        kind = None
        for units, width in blocks:
            shared = units % tp != 0
            local = (width if shared else units // tp * width) * other
            if shared == kind:
                parts[-1] += local
            else:
                parts.append(local)
            kind = shared
        return tuple(parts)


_FLAT_ALIGNMENT = 2
"""Elements (DeepSpeed's `nccl_start_alignment_factor`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterGroup:
    """Parameters of one optimizer group, as element counts in order."""

    front: tuple[int, ...]
    layer: tuple[int, ...]
    layers: int
    back: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return sum(self.front) + self.layers * sum(self.layer) + sum(self.back)

    def padded(self, dp: int) -> int:
        """Elements in a flat buffer of DeepSpeed that `dp` ranks share equally, each part aligned."""
        multiple = _FLAT_ALIGNMENT * dp
        return -(-self.numel // multiple) * multiple

    @property
    def count(self) -> int:
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
class RankParameters:
    """One rank's parameters, by optimizer group, and the buffers of the model."""

    groups: tuple[ParameterGroup, ...]
    """Without empty ones. First the matrices, which decay, then the rest; or all in one."""
    layers: int
    layer_numel: int
    """Elements of one decoder layer."""
    buffer_bytes: int
    """Rotary tables, masks and the like; they keep their own dtype."""
    matrices: int
    """Elements of matrices that multiply activations: all but the token embedding, unless that is the head too."""
    hidden_matrices: tuple[tuple[int, int], ...] = ()
    """(elements, shorter side) of every matrix of one decoder layer, before tensor parallelism."""
    placeholders: int = 0
    """Modules whose parameters are on another pipeline stage; a scalar stands for each."""

    @cached_property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)

    @cached_property
    def largest(self) -> int:
        return max(numel for group in self.groups for numel, _ in group.counted)
