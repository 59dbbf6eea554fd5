"""MicroBatch: the samples that go through the model together. Dims: b samples, s positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from toolkit.parallel.distilled_loss import TeacherTokens


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences of a micro-batch of preference data: which positions each has, and what is known of it.

    Dims: n pairs or completions of the micro-batch; the second dim of a [n, 2] is (chosen, rejected), or (completion,
    mismatched one). Sequence k of pair i has the number 2i + k.
    """

    numbers: torch.Tensor
    """The number of the sequence at each position, int64 [b, s]; 2n outside of any."""
    tokens: torch.Tensor
    """Targets of each sequence, int64 [n, 2]."""
    reference: torch.Tensor
    """Log-probabilities of the reference model in nats, fp64 [n, 2]; zeros where there is none."""
    is_desirable: torch.Tensor
    """Whether a completion is desirable, bool [n]."""
    is_counted: torch.Tensor
    """Whether it counts, bool [n]: not where a validation set repeats a sample to fill the last micro-batch."""
    weights: torch.Tensor
    """The weight of each in the loss, fp64 [n]."""
    rows: torch.Tensor
    """The sample of each, int64 [n]."""
    pieces: torch.Tensor
    """The number of each in its text, int64 [n]."""
    chosen_token_share: float
    """Pairs over the targets of chosen completions, of the global batch."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Sequences":
        """Return a copy with other tensors."""
        return Sequences(
            numbers=function(self.numbers),
            tokens=function(self.tokens),
            reference=function(self.reference),
            is_desirable=function(self.is_desirable),
            is_counted=function(self.is_counted),
            weights=function(self.weights),
            rows=function(self.rows),
            pieces=function(self.pieces),
            chosen_token_share=self.chosen_token_share,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """input_ids and labels, int64 [b, s]; labels are shifted: labels[:, i] is the token after input_ids[:, i].

    position_ids [b, s] start at 0 with each document where documents do not attend to each other; otherwise None.
    dropout_seed seeds the dropout of this forward pass. sources [b] is the source of each sample of a mixture.
    lengths [b] counts the tokens of each sample before its padding; None where none has padding. Every rank has them.
    is_packed: whether position_ids restart inside a sample, so that a mask must keep documents apart. Every rank knows;
    by default it is read from position_ids. sequences: those that an objective compares; None where targets are alike.
    weights: the weight of each label in the loss, fp32 [b, s]; None: all weigh 1. teacher: what a teacher would say
    in the place of each label; None without one. places [b, s] says, where a teacher is asked, which token of the text
    each label is; -1 in padding. held: the positions of the sequences that the tensors have, where ranks share these,
    with position_ids of the whole sequences; None: all of them. starts: where documents begin in each whole sample, the
    first at 0, where the tensors have a part of it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    dropout_seed: int = 0
    sources: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    is_packed: bool | None = None
    sequences: Sequences | None = None
    weights: torch.Tensor | None = None
    teacher: TeacherTokens | None = None
    places: torch.Tensor | None = None
    held: tuple[range, ...] | None = None
    starts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.is_packed is None:
            restarts = self.position_ids is not None and bool((self.position_ids.diff(dim=-1) != 1).any())
            object.__setattr__(self, "is_packed", restarts)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model's forward pass."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def to(self, device: torch.device) -> "MicroBatch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Copy it to page-locked memory, from which copies to CUDA are asynchronous."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        return replace(
            self,
            input_ids=function(self.input_ids),
            labels=function(self.labels),
            position_ids=None if self.position_ids is None else function(self.position_ids),
            sources=None if self.sources is None else function(self.sources),
            lengths=None if self.lengths is None else function(self.lengths),
            sequences=None if self.sequences is None else self.sequences.map(function),
            weights=None if self.weights is None else function(self.weights),
            teacher=None if self.teacher is None else self.teacher.map(function),
            places=None if self.places is None else function(self.places),
        )
