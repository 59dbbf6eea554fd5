"""RankParameters: what one rank holds of a model's parameters, as element counts by optimizer group."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_FLAT_ALIGNMENT = 2
"""Elements (DeepSpeed's `nccl_start_alignment_factor`)."""


@dataclass(frozen=True, kw_only=True)
class HiddenMatrices:
    """A weight matrix of a decoder layer, or those of all experts in one tensor: what Muon updates."""

    numel: int
    """Elements of one matrix."""
    side: int
    """Length of the shorter side."""
    count: int
    """How many matrices the tensor has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterGroup:
    """Parameters of one optimizer group, as element counts in the order in which engines flatten them.

    Sums are closed forms: a thousand layers that are alike cost no more than two.
    """

    runs: tuple[tuple[tuple[int, ...], int], ...]
    """Sizes that follow each other, and how often: what stands in front of the layers, layers, what stands behind."""
    ep: int = 1
    """Replicas that share out these parameters: so many times fewer have the same ones."""
    is_hidden: bool = False
    """Whether they are the matrices of decoder layers, where the optimizer treats these differently."""

    @cached_property
    def numel(self) -> int:
        return sum(sum(sizes) * times for sizes, times in self.runs)

    def padded(self, dp: int) -> int:
        """Elements in a flat buffer of DeepSpeed that ranks with the same parameters share equally, aligned."""
        multiple = _FLAT_ALIGNMENT * dp // self.ep
        return -(-self.numel // multiple) * multiple

    def part(self, dp: int) -> int:
        """Elements of one rank's part of that buffer."""
        return self.padded(dp) * self.ep // dp

    def shards(self, dp: int) -> Iterator[tuple[int, int]]:
        """(elements of a rank's shard, how many parameters have one), where each parameter is sharded by itself."""
        return ((-(-numel * self.ep // dp), times) for numel, times in self.counted)

    @cached_property
    def count(self) -> int:
        return sum(len(sizes) * times for sizes, times in self.runs)

    @property
    def counted(self) -> Iterator[tuple[int, int]]:
        """(elements, how many parameters of that size), in order, layers together."""
        for sizes, times in self.runs:
            yield from ((numel, times) for numel in sizes)

    def __iter__(self) -> Iterator[int]:
        """The size of every parameter, in order."""
        for sizes, times in self.runs:
            for _ in range(times):
                yield from sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class RankParameters:
    """One rank's parameters, by optimizer group, and the buffers of the model."""

    groups: tuple[ParameterGroup, ...]
    """Groups of the parameters that train, without empty ones. First the matrices, which decay, then the rest; or all
    in one."""
    frozen: ParameterGroup = ParameterGroup(runs=())
    """Parameters that do not train."""
    layer_numels: tuple[int, ...]
    """Elements of each decoder layer."""
    outside: int
    """Elements outside the layers, of the group that has most of them."""
    buffer_bytes: int
    """Rotary tables, masks and the like; they keep their own dtype."""
    matrices: int
    """Elements of linear layers' matrices, which autocast casts: not the embedding's, unless that is the head too, and
    not those of layers in front of all that trains, which no gradient reaches.
    """
    layer_matrices: tuple[int, ...] = ()
    """Elements of linear layers' matrices in each decoder layer, as `matrices` counts them."""
    trained_layers: tuple[int, ...] = ()
    """Elements that train, of each layer."""
    trained_matrices: tuple[int, ...] = ()
    """Elements of linear layers' matrices that train, of each decoder layer."""
    hidden_matrices: tuple[HiddenMatrices, ...] = ()
    """Matrices of the decoder layers that train, before tensor parallelism."""
    factors: int = 0
    """Rows and columns of the matrices that train, whole ones, and elements of vectors: what Adafactor keeps."""
    largest_early: int = 0
    """Elements of the largest parameter that trains and whose gradient is complete before the backward pass ends: not
    of the embedding, also where it is the LM head too. 0 where there is none."""
    zero_biases: int = 0
    """Elements of buffers that take the place of experts' biases, where ranks' outputs are partial sums."""
    placeholders: int = 0
    """Modules whose parameters are on another pipeline stage; a scalar stands for each."""

    @property
    def layers(self) -> int:
        return len(self.layer_numels)

    @cached_property
    def layer_numel(self) -> int:
        """Elements of the largest decoder layer."""
        return max(self.layer_numels, default=0)

    @cached_property
    def trained_layer(self) -> int:
        """Elements that train of the layer that has most of them."""
        return max(self.trained_layers, default=0)

    @cached_property
    def numel(self) -> int:
        return self.trained + self.frozen.numel

    @cached_property
    def trained(self) -> int:
        """Elements that train."""
        return sum(group.numel for group in self.groups)

    def buffers(self, weight_bytes: int) -> int:
        """Bytes of all buffers."""
        return self.buffer_bytes + weight_bytes * self.zero_biases

    @property
    def count(self) -> int:
        """Parameters that train."""
        return sum(group.count for group in self.groups)

    @cached_property
    def largest(self) -> int:
        return max(numel for group in (*self.groups, self.frozen) for numel, _ in group.counted)

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest parameter that trains."""
        return max(numel for group in self.groups for numel, _ in group.counted)
