"""Division: which numbers of tensor-parallel ranks, pipeline stages and Ulysses ranks a model's own numbers allow.

Attention is split by heads, the MLP by columns and the decoder by layers, and each rank gets whole ones. Fewer
key-value heads than ranks are repeated. The vocabulary is padded, and the hidden size is never split: no rule for them.
Ulysses splits heads alone.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from toolkit.shape import ModelShape

_SHOWN = 6


class Misfit(NamedTuple):
    """A number of ranks that a model does not allow."""

    axis: Literal["tp", "pp", "ulysses"]
    reason: str
    allowed: str
    """The numbers that would do, in words."""


def misfits(shape: ModelShape, *, tp: int = 1, pp: int = 1, ulysses: int = 1) -> Iterator[Misfit]:
    """What keeps `shape` from being cut over these numbers of ranks: at most one line an axis."""
    reason = _tensor_misfit(shape, tp)
    if reason is not None:
        yield Misfit("tp", reason, _nearest(tensor_parallel_sizes(shape), tp))
    if pp > shape.layers:
        allowed = f"{shape.layers} or less" if shape.layers > 1 else "1"
        yield Misfit("pp", f"{_count(shape.layers, 'decoder layer')} cannot fill {pp} stages", allowed)
    reason = _heads_misfit(shape, ulysses)
    if reason is not None:
        sizes = [size for size in range(1, shape.heads + 1) if _heads_misfit(shape, size) is None]
        yield Misfit("ulysses", reason, _nearest(sizes, ulysses))


def tensor_parallel_sizes(shape: ModelShape) -> list[int]:
    """Every tp that splits the model, from 1."""
    return [tp for tp in range(1, shape.heads + 1) if _tensor_misfit(shape, tp) is None]


def _tensor_misfit(shape: ModelShape, tp: int) -> str | None:
    reason = _heads_misfit(shape, tp)
    if reason is None and shape.ffn % tp:
        return f"an MLP of width {shape.ffn} cannot be shared equally by {tp} ranks"
    return reason


def _heads_misfit(shape: ModelShape, ranks: int) -> str | None:
    if shape.heads % ranks:
        return f"{_count(shape.heads, 'attention head')} cannot be shared equally by {ranks} ranks"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        heads = _count(shape.kv_heads, "key-value head")
        return f"{heads} can neither be shared equally by {ranks} ranks nor be repeated equally often on them"
    return None


def _nearest(sizes: list[int], given: int) -> str:
    """The sizes as `1, 2 or 4`; of many, those nearest to the given one."""
    shown = [str(size) for size in sorted(sorted(sizes, key=lambda size: abs(size - given))[:_SHOWN])]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
