"""How context-parallel ranks see each other's keys and values where `parallel.cp_exchange` is `auto`.

Gathering needs one collective and no merging of blocks, but keys and values of whole sequences exist on each rank while
a layer computes. A ring needs a part of that, and more steps.
"""

from typing import Literal

from toolkit.config.layout import CpExchange
from toolkit.models.shape import ModelShape

MOST_GATHERED_BYTES = 1 << 30
"""Keys and values of a layer, in bytes, that `auto` gathers: of more than these a ring takes less memory."""
ExchangeKind = Literal["gather", "ring"]


def key_value_width(shape: ModelShape, tp: int) -> int:
    """Numbers that a token's keys, or its values, have in a layer on a tensor-parallel rank."""
    return max(shape.head_dim, shape.kv_dim // tp)


def gathered_bytes(shape: ModelShape, *, tp: int, tokens: int, itemsize: int) -> int:
    """Bytes of a layer's keys and values of whole sequences of so many tokens, on a tensor-parallel rank."""
    return 2 * tokens * key_value_width(shape, tp) * itemsize


def chosen_exchange(
    asked: CpExchange, shape: ModelShape | None, *, tp: int, tokens: int, itemsize: int
) -> ExchangeKind:
    """Return what was asked for; for `auto` the exchange that suits sequences of so many tokens in a micro-batch."""
    return automatic_exchange(shape, tp=tp, tokens=tokens, itemsize=itemsize) if asked == "auto" else asked


def automatic_exchange(shape: ModelShape | None, *, tp: int, tokens: int, itemsize: int) -> ExchangeKind:
    """Choose for the sequences of a micro-batch, of so many tokens. A model of unknown shape is gathered."""
    if shape is None:
        return "gather"
    return "ring" if gathered_bytes(shape, tp=tp, tokens=tokens, itemsize=itemsize) > MOST_GATHERED_BYTES else "gather"
