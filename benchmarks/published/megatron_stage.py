"""One pipeline stage of Megatron's GPT of 2021 to 2022: parameters, and what a micro-batch keeps at its ends.

Letter: U bytes of a hidden state. Read from Megatron-LM v2.4: megatron/model/gpt_model.py, language_model.py,
megatron/mpu/cross_entropy.py, megatron/schedules.py.
"""

from dataclasses import dataclass, replace

from published.megatron_2021_layer import LayerWidths, recomputed_peak
from published.rows import Row
from toolkit.estimate.parameters import Architecture, Holdings
from toolkit.estimate.stages import uniform_bounds

_INT64 = 8
_BOOL = 1
"""The causal mask [1, 1, s, s] is made of booleans for every micro-batch (`get_ltor_masks_and_position_ids`)."""


@dataclass(frozen=True, kw_only=True)
class GptStage:
    """A stage of a GPT with learned positions, GELU and a tied embedding, all layers recomputed one by one."""

    row: Row
    stage: int
    layers: int
    held: Holdings
    widths: LayerWidths

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has head and loss."""
        return self.stage == self.row.pp - 1

    @property
    def boundary(self) -> int:
        """U."""
        return self.widths.boundary

    @property
    def ahead(self) -> int:
        """Forward passes before the first backward pass's own: as many as stages behind this one, or micro-batches."""
        return min(self.row.pp - 1 - self.stage, self.micro_batches)

    @property
    def micro_batches(self) -> int:
        """Of one step."""
        return self.row.micro_batches or 1

    @property
    def logits_elements(self) -> int:
        """Of one micro-batch on this rank."""
        return self.row.seq_len * self.row.micro_batch * self.row.vocab // self.row.tp

    @property
    def dropout_mask(self) -> int:
        """Of the embedding's dropout: one byte an element of the hidden state."""
        return self.boundary // 2 if self.first else 0

    @property
    def tokens_and_mask(self) -> int:
        """Tokens, positions and the causal mask of one micro-batch."""
        s, b = self.row.seq_len, self.row.micro_batch
        return 2 * s * b * _INT64 + s * s * _BOOL

    @property
    def kept_by_layers(self) -> int:
        """The input of every layer."""
        return self.layers * self.boundary

    @property
    def layer_peak(self) -> int:
        """Recomputing one layer and going back through it, beyond its input and the gradient of its output."""
        return recomputed_peak(self.widths)

    @property
    def moments(self) -> tuple["Moment", ...]:
        """The moments of a step's backward passes that may be worst, under the schedule 1F1B.

        The first backward pass makes the gradients, and is worst at its start or at its end; later ones add to them,
        and are worst at their start.
        """
        whole, layers, each = 2 * self.held.numel, self.layers, 2 * self.held.layer_numel
        outside = whole - layers * each if self.last else 0
        later = self.micro_batches - self.ahead
        first = self.ahead + (1 if later else 0)
        second = self.ahead + 1 if later > 1 else first - 1
        found = [
            Moment(in_flight=first, gradients=outside, inputs=layers, is_later=False),
            Moment(in_flight=first, gradients=outside + (layers - 1) * each, inputs=1, is_later=False),
        ]
        if second:
            found.append(Moment(in_flight=second, gradients=whole, inputs=layers, is_later=True))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One layer's backward pass."""

    in_flight: int
    """Micro-batches whose activations are there, this one's included."""
    gradients: int
    """Bytes of 16-bit gradients that are there already."""
    inputs: int
    """Layers of this micro-batch whose input is still there."""
    is_later: bool
    """Whether another micro-batch's backward pass came before."""


def gpt_stage(row: Row, stage: int, bounds: tuple[int, ...] = (), *, is_whole_embedding_tied: bool = False) -> GptStage:
    """The stage's share of the model. Without `bounds` layers are cut evenly, the earliest stages have one more.

    `is_whole_embedding_tied`: the last stage has the table of positions too, beside that of tokens which is its head.
    """
    architecture = Architecture.from_config(
        {
            "model_type": "gpt2",
            "n_embd": row.hidden,
            "n_layer": row.layers,
            "n_head": row.heads,
            "n_inner": row.ffn,
            "n_positions": row.seq_len,
            "vocab_size": row.vocab,
            "tie_word_embeddings": True,
        }
    )
    bounds = bounds or uniform_bounds(row.layers, row.pp)
    layers = bounds[stage + 1] - bounds[stage]
    held = architecture.holdings(layers=layers, first=stage == 0, last=stage == row.pp - 1, tp=row.tp, by_decay=False)
    if is_whole_embedding_tied and 0 < stage == row.pp - 1:
        (group,) = held.groups
        held = replace(held, groups=(replace(group, front=(*group.front, row.seq_len * row.hidden)),))
    widths = LayerWidths(
        seq_len=row.seq_len, samples=row.micro_batch, hidden=row.hidden, heads=row.heads, ffn=row.ffn, tp=row.tp
    )
    return GptStage(row=row, stage=stage, layers=layers, held=held, widths=widths)
