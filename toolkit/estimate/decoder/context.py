"""Context: one rank's part of a model on a tape: local sizes under tensor parallelism, and Megatron's f and g.

Dims: b samples, s positions, h hidden, a query heads, k key-value heads, d features of a head, f MLP width, v
vocabulary, t tensor-parallel ranks.
"""

from dataclasses import dataclass, field
from typing import Literal

from toolkit.estimate.sizes.tape import Tape, Tensor
from toolkit.estimate.sizes.views import clone, is_contiguous, make_contiguous, narrow
from toolkit.estimate.style import LayerStyle
from toolkit.models.shape import ModelShape

Attention = Literal["eager", "sdpa", "flash"]


@dataclass(frozen=True, kw_only=True)
class WalkSettings:
    """What a walk over a section of a model depends on. Layouts with equal settings share the walk."""

    shape: ModelShape
    style: LayerStyle
    b: int
    s: int
    itemsize: int = 2
    attention: Attention = "sdpa"
    tp: int = 1
    sequence_parallel: bool = False
    autocast: bool = False
    """Products run in 16 bits, under torch.autocast; casts of the weights are counted with the model states."""
    isolates_documents: bool = False
    """Documents in a sample do not attend to each other, so attention has a mask with every kernel."""
    recomputes_scores: bool = False
    """Selective recomputation: the backward pass recomputes attention between its projections."""
    on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Context(WalkSettings):
    """The settings of a walk, and its tape."""

    tape: Tape
    returned: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    """What attention returns beside its output: the layer keeps it until it returns."""

    @property
    def local_s(self) -> int:
        """Positions of this rank outside the tensor-parallel regions."""
        return self.s // self.tp if self.sequence_parallel else self.s

    @property
    def gathers_attention(self) -> bool:
        """Whether every rank computes all heads, and only the matrices are sharded."""
        return self.tp > 1 and "attention" in self.style.gathers

    @property
    def gathers_mlp(self) -> bool:
        """Whether every rank computes all MLP features, and only the matrices are sharded."""
        return self.tp > 1 and "mlp" in self.style.gathers

    @property
    def heads(self) -> int:
        return self.shape.heads if self.gathers_attention else self.shape.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key-value heads that this rank computes: at least one."""
        return self.shape.kv_heads if self.gathers_attention else max(1, self.shape.kv_heads // self.tp)

    @property
    def ffn(self) -> int:
        return self.shape.ffn if self.gathers_mlp else self.shape.ffn // self.tp

    def parameter(self, *shape: int) -> Tensor:
        return self.tape.parameter(shape, self.itemsize)

    def shared(self, shape: tuple[int, ...], itemsize: int | None = None) -> Tensor:
        """Allocate a table that all layers use: positions, masks."""
        tensor = self.tape.new(shape, self.itemsize if itemsize is None else itemsize)
        self.tape.kinds[tensor.storage] = "shared"
        return tensor

    def enter(self, x: Tensor) -> Tensor:
        """Enter a region: f, or with sequence parallelism an all-gather of the positions."""
        return self._exchange(x, gathers=True) if self.tp > 1 and self.sequence_parallel else self.copied(x)

    def leave(self, x: Tensor) -> Tensor:
        """Leave a region: g, or with sequence parallelism a reduce-scatter over the positions."""
        return self._exchange(x, gathers=False) if self.tp > 1 and self.sequence_parallel else self.summed(x)

    def copied(self, x: Tensor) -> Tensor:
        """f: identity forward; all-reduce of the gradient, which copies it."""
        if self.tp == 1:
            return x
        return x.tape.record(x.alias(), [x], [], lambda g, kept: [clone(make_contiguous(g))])

    def summed(self, x: Tensor) -> Tensor:
        """g: all-reduce forward, which copies x; identity backward."""
        if self.tp == 1:
            return x
        with self.tape.no_grad():
            y = clone(make_contiguous(x))
        return self.tape.record(y, [x], [], lambda g, kept: [g.alias()])

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All-gather the ranks' parts along `dim`: columns, or the positions behind the last layer."""
        own = x.shape[dim]
        y = self._moved(x, dim, own * self.tp)
        return self.tape.record(y, [x], [], lambda g, kept: [clone(narrow(g, dim, own))])

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Copy this rank's part along `dim`: its columns, or its positions in front of the first layer."""
        whole = x.shape[dim]
        with self.tape.no_grad():
            y = clone(narrow(x, dim, whole // self.tp))
        return self.tape.record(y, [x], [], lambda g, kept: [self._moved(g, dim, whole)])

    def _exchange(self, x: Tensor, *, gathers: bool) -> Tensor:
        """All-gather or reduce-scatter over positions, of which backward does the other."""
        dim = len(x.shape) - 2
        before = x.shape[dim]
        y = self._moved(x, dim, before * self.tp if gathers else before // self.tp)
        return self.tape.record(y, [x], [], lambda g, kept: [self._moved(g, dim, before)])

    def _moved(self, x: Tensor, dim: int, size: int) -> Tensor:
        """Result of a collective along `dim`: it moves that dim to the front, communicates, and copies it back."""
        dim %= len(x.shape)
        with self.tape.no_grad():
            order = [dim, *(i for i in range(len(x.shape)) if i != dim)]
            first = x.alias(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order))
            first = first if is_contiguous(first) else clone(first)
            out = self.tape.new((size, *first.shape[1:]), x.itemsize)
            return self.tape.new((*x.shape[:dim], size, *x.shape[dim + 1 :]), out.itemsize)
