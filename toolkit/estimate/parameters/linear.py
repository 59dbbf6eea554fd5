"""The parameters of linear layers and norms, as blocks of a decoder layer put them together.

A column-parallel layer is split over its outputs, a row-parallel one over its inputs, as `toolkit.families` has it.
"""

from collections.abc import Iterator

from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.tensor import Blocks, Tensor

Tensors = Iterator[Tensor]


def column(name: str, features: tuple[int, int], *, bias: bool, blocks: Blocks = (), conv1d: bool = False) -> Tensors:
    """A linear layer split over its outputs; `features` are (outputs, inputs). Conv1D is [inputs, outputs]."""
    outputs, inputs = features
    if conv1d:
        yield Tensor(name=f"{name}.weight", shape=(inputs, outputs), dim=1, blocks=blocks)
    else:
        yield Tensor(name=f"{name}.weight", shape=(outputs, inputs), dim=0, blocks=blocks)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=(outputs,), dim=0, blocks=blocks)


def row(name: str, features: tuple[int, int], *, bias: bool, conv1d: bool = False) -> Tensors:
    """A linear layer split over its inputs; the bias is whole on every rank."""
    outputs, inputs = features
    if conv1d:
        yield Tensor(name=f"{name}.weight", shape=(inputs, outputs), dim=0)
    else:
        yield Tensor(name=f"{name}.weight", shape=(outputs, inputs), dim=1)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=(outputs,))


def whole(name: str, features: tuple[int, int], *, bias: bool) -> Tensors:
    """A linear layer that is whole on every rank."""
    yield Tensor(name=f"{name}.weight", shape=features)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=features[:1])


def norm(name: str, *shape: int, weight: bool = True, bias: bool = False) -> Tensors:
    """A norm's parameters, whole on every rank."""
    if weight:
        yield Tensor(name=f"{name}.weight", shape=shape)
    if bias:
        yield Tensor(name=f"{name}.bias", shape=shape)


def queries_keys_values(f: Facts, block: str, *, bias: bool, order: str = "qkv", gathers: bool = False) -> Tensors:
    """Three projections. `gathers`: heads are gathered behind them, so columns may lie anywhere."""
    s = f.shape
    for letter in order:
        heads = s.heads if letter == "q" else s.kv_heads
        blocks = () if gathers else ((heads, s.head_dim),)
        yield from column(f"{block}.{letter}_proj", (heads * s.head_dim, s.hidden), bias=bias, blocks=blocks)


def plain_mlp(f: Facts, up: str, down: str, *, bias: bool, conv1d: bool = False) -> Tensors:
    """Two matrices, without a gate."""
    s = f.shape
    yield from column(up, (s.ffn, s.hidden), bias=bias, conv1d=conv1d)
    yield from row(down, (s.hidden, s.ffn), bias=bias, conv1d=conv1d)
