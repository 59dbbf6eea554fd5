"""Facts of a family's LM head for the chunked loss, and how many tokens it takes at once. Read without torch."""

from dataclasses import dataclass
from typing import Any, Self

from toolkit.models.support import find

_CHUNK_BYTES = 2**29
"""Bytes of a chunk's logits in fp32, at most. The gradient of the head's weight takes as much at 1,024 hidden features;
smaller chunks save little beside it, and add to it more often."""
_TOKENS = 128
"""Chunks are multiples of it, for the kernels of products."""


def chunk_tokens(tokens: int, rows: int) -> int:
    """Return the tokens of a chunk: chunks are as even as their multiples allow. `rows`: of the vocabulary, here."""
    most = max(_TOKENS, _CHUNK_BYTES // (4 * max(1, rows)))
    even = -(-tokens // -(-tokens // most)) if tokens else 1
    return min(max(1, tokens), -(-even // _TOKENS) * _TOKENS)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A chunked loss as the memory estimate knows it."""

    tokens: int
    """Tokens of a chunk."""
    is_one: bool
    """Whether a single chunk has all tokens: then no gradients are summed."""
    vocabulary: int
    hidden: int

    @classmethod
    def of(cls, tokens: int, *, vocabulary: int, hidden: int, tp: int) -> Self:
        """Return the chunks of a rank's micro-batch."""
        chunk = chunk_tokens(tokens, -(-vocabulary // tp))
        return cls(tokens=chunk, is_one=chunk >= tokens, vocabulary=vocabulary, hidden=hidden)


@dataclass(frozen=True, kw_only=True)
class HeadFormula:
    """The formula of logits from the head's products: factors, then a soft cap, `cap * tanh(x / cap)`.

    Fields of the config, by sign: `* logit_scale`, `/ logits_scaling`, `cap final_logit_softcapping`.
    """

    steps: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` writes."""
        pairs = (step.split(" ") for step in text.split(", ") if step)
        return cls(steps=tuple((sign, field) for sign, field in pairs))

    def __str__(self) -> str:
        return ", ".join(" ".join(step) for step in self.steps)

    def values(self, config: Any) -> tuple[float, float | None]:
        """Return the factor and the cap, None for no cap, that a config gives."""
        scale = 1.0
        cap = None
        for sign, field in self.steps:
            value = getattr(config, field, None)
            if value is None:
                continue
            if sign == "cap":
                cap = float(value)
            else:
                scale = scale * value if sign == "*" else scale / value
        return scale, cap


def is_chunked(loss: str, *, engine: str, precision: str, model_type: object) -> bool:
    """Whether a run computes its loss in chunks: `loss`, `engine` and `precision` as a recipe has them."""
    return loss != "plain" and unchunked(engine, precision, model_type) is None


def unchunked(engine: str, precision: str, model_type: object) -> tuple[str, str] | None:
    """Return the recipe's field that forbids chunks, and the reason; None where the chunked loss is exact."""
    if engine == "reference":
        return "train.engine", "the reference computes with full logits, so that others are held to them"
    if precision == "fp16":
        return "precision", "gradients of a chunk are made before the loss scale is applied, and underflow"
    if head_formula(model_type) is None:
        support = find(model_type)
        reason = "its head is not known" if support is None else support.loss_refusal
        return "model.name_or_path", f"{model_type}: {reason}"
    return None


def head_formula(model_type: object) -> HeadFormula | None:
    """Return the formula of a family, as docs/generate_families.py found it; None where the head has none."""
    support = find(model_type)
    if support is None or support.loss_refusal is not None:
        return None
    return HeadFormula.parse(support.logits)
