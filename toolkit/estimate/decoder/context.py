"""Context: one rank's part of a model on a tape: sizes after the tensor cut, and Megatron's f and g.

Dims: b samples, s positions, h hidden, a query heads, k key-value heads, d features of a head, f MLP width, v
vocabulary, t tensor-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.estimate.sizes.operations import Gradients, Kept
from toolkit.estimate.sizes.tape import Tape, Tensor
from toolkit.estimate.sizes.views import clone, is_contiguous, make_contiguous, narrow
from toolkit.estimate.style import LayerStyle
from toolkit.shape import ModelShape

Attention = Literal["eager", "sdpa", "flash"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every part of a layer needs to know."""

    tape: Tape
    shape: ModelShape
    style: LayerStyle
    b: int
    s: int
    itemsize: int
    attention: Attention
    tp: int
    sequence_parallel: bool
    isolates_documents: bool = False
    """Samples hold documents that do not see each other: attention has a mask, whatever the kernel."""
    recomputes_scores: bool = False
    """Selective recomputation: attention between its projections is computed again in the backward pass."""
    returned: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    """What attention returns beside its output: the layer holds it until it returns itself."""

    @property
    def local_s(self) -> int:
        """Positions of this rank outside the regions."""
        return self.s // self.tp if self.sequence_parallel else self.s

    @property
    def gathers_attention(self) -> bool:
        """Whether every rank computes all heads, with only the matrices split."""
        return self.tp > 1 and "attention" in self.style.gathers

    @property
    def gathers_mlp(self) -> bool:
        """The same of the MLP."""
        return self.tp > 1 and "mlp" in self.style.gathers

    @property
    def heads(self) -> int:
        """Query heads that this rank computes."""
        return self.shape.heads if self.gathers_attention else self.shape.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key-value heads that this rank computes: at least one."""
        return self.shape.kv_heads if self.gathers_attention else max(1, self.shape.kv_heads // self.tp)

    @property
    def ffn(self) -> int:
        """MLP features that this rank computes."""
        return self.shape.ffn if self.gathers_mlp else self.shape.ffn // self.tp

    def parameter(self, *shape: int) -> Tensor:
        """A weight in the model's dtype."""
        return self.tape.parameter(shape, self.itemsize)

    def shared(self, shape: tuple[int, ...], itemsize: int | None = None) -> Tensor:
        """A table that all layers use: positions, masks."""
        tensor = self.tape.new(shape, self.itemsize if itemsize is None else itemsize)
        self.tape.kinds[tensor.storage] = "shared"
        return tensor

    def enter(self, x: Tensor) -> Tensor:
        """Into a region: f, or with sequence parallelism the positions gathered."""
        if self.tp > 1 and self.sequence_parallel:
            return self._exchange(x, gathers=True)
        return self.copied(x)

    def leave(self, x: Tensor) -> Tensor:
        """Out of a region: g, or with sequence parallelism each rank's positions of the sum."""
        if self.tp > 1 and self.sequence_parallel:
            return self._exchange(x, gathers=False)
        return self.summed(x)

    def copied(self, x: Tensor) -> Tensor:
        """f: x as it is, and its gradient summed over the ranks, which copies it."""
        if self.tp == 1:
            return x
        y = x.alias()
        self.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else clone(make_contiguous(g[0]))])
        return y

    def summed(self, x: Tensor) -> Tensor:
        """g: x summed over the ranks, which copies it, and its gradient as it is."""
        if self.tp == 1:
            return x
        with self.tape.no_grad():
            y = clone(make_contiguous(x))
        self.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else g[0].alias()])
        return y

    def gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' columns put together."""
        y = self._moved(x, -1, x.shape[-1] * self.tp)
        own = x.shape[-1]

        def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
            assert g[0] is not None
            return [clone(narrow(g[0], -1, own))]

        self.tape.record([y], [x], [], backward)
        return y

    def scatter_columns(self, x: Tensor) -> Tensor:
        """This rank's columns, copied."""
        whole = x.shape[-1]
        with self.tape.no_grad():
            y = clone(narrow(x, -1, whole // self.tp))

        def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
            assert g[0] is not None
            return [self._moved(g[0], -1, whole)]

        self.tape.record([y], [x], [], backward)
        return y

    def scatter_positions(self, x: Tensor) -> Tensor:
        """This rank's positions of what is whole, copied: in front of the first layer."""
        with self.tape.no_grad():
            y = clone(narrow(x, 1, self.local_s))

        def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
            assert g[0] is not None
            return [self._moved(g[0], 1, self.s)]

        self.tape.record([y], [x], [], backward)
        return y

    def gather_positions(self, x: Tensor) -> Tensor:
        """The positions put together, behind the last layer."""
        y = self._moved(x, 1, self.s)

        def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
            assert g[0] is not None
            return [clone(narrow(g[0], 1, self.local_s))]

        self.tape.record([y], [x], [], backward)
        return y

    def _exchange(self, x: Tensor, *, gathers: bool) -> Tensor:
        """All-gather or reduce-scatter over positions, of which backward does the other."""
        dim = len(x.shape) - 2
        before = x.shape[dim]
        after = before * self.tp if gathers else before // self.tp
        y = self._moved(x, dim, after)

        def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
            assert g[0] is not None
            return [self._moved(g[0], dim, before)]

        self.tape.record([y], [x], [], backward)
        return y

    def _moved(self, x: Tensor, dim: int, size: int) -> Tensor:
        """What a collective along `dim` returns: it puts that dim first, exchanges, and copies it back in place."""
        dim %= len(x.shape)
        with self.tape.no_grad():
            order = [dim, *(i for i in range(len(x.shape)) if i != dim)]
            first = x.alias(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order))
            first = first if is_contiguous(first) else clone(first)
            out = self.tape.new((size, *first.shape[1:]), x.itemsize)
            return self.tape.new((*x.shape[:dim], size, *x.shape[dim + 1 :]), out.itemsize)
