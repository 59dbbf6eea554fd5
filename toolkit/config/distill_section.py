"""DistillSection: the teacher whose distributions a run learns, beside its text."""

from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.section import PositiveInt, Section, Text

BATCHES_A_COMMIT = 16
"""Micro-batches of a rank whose teacher's tokens are in memory together, before they are written."""


class DistillSection(Section):
    """Distillation: the loss of a target is (1 - weight) of its token loss plus weight of the divergence of the
    student's distribution from the teacher's, over the teacher's `top_k` tokens and one event for all others
    (docs/distillation.md)."""

    teacher: Text
    """Directory or hub name of the teacher, a model with the same tokenizer."""
    top_k: PositiveInt = 64
    """The teacher's most probable tokens, whose log-probabilities are stored for each target."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """What logits of both models are divided by in the divergence, which is multiplied by its square."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the divergence in the loss; the token loss has the rest."""
    divergence: Literal["forward", "reverse"] = "forward"
    """`forward`: KL(teacher || student), which covers all that the teacher may say. `reverse`: KL(student || teacher),
    which avoids what it would not say."""

    @property
    def token_bytes(self) -> int:
        """Bytes that the store of what the teacher says takes for a token: ids in 4 bytes, log-probabilities in 4, of
        which there is one more."""
        return 8 * self.top_k + 4
