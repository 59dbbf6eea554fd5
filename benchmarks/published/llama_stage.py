"""What both frameworks that train Llama models here are told of a pipeline stage."""

from dataclasses import dataclass
from typing import Any, Self

from published.rows import Row


@dataclass(frozen=True, kw_only=True)
class LlamaStage:
    """What a rank runs."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq_len: int
    samples: int
    tp: int
    layers: int
    first: bool
    last: bool

    @classmethod
    def of(cls, row: Row, index: int, *, layers: int, **more: Any) -> Self:
        """The stage with this number, which has so many decoder layers."""
        return cls(
            hidden=row.hidden,
            heads=row.heads,
            ffn=row.ffn,
            vocab=row.vocab,
            seq_len=row.seq_len,
            samples=row.micro_batch,
            tp=row.tp,
            layers=layers,
            first=index == 0,
            last=index == row.pp - 1,
            **more,
        )
