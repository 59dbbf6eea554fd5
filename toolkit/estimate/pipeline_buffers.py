"""Buffers of pipelines, of Ulysses and of routing beside the activations that a recording of a stage has.

The schedule is 1F1B (Narayanan et al. 2019, "PipeDream"; without flushes inside a step, Narayanan et al. 2021, section
2.2): a stage runs as many forward passes ahead as there are stages from it to the end, then one backward for each
forward. A recording has what a micro-batch received, until its backward pass is over, what it sent, and the gradient
that comes back.
"""

from dataclasses import dataclass

from toolkit.estimate.rank_parameters import RankParameters
from toolkit.models.shape import ModelShape

_LOSSES = 3
"""fp32 scalars that every stage keeps: its loss, the sum over micro-batches, the mean over replicas."""


def in_flight_micro_batches(stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations are live at once on a stage: min(stages - stage, micro-batches).

    DeepSpeed keeps at least two slots for inputs and outputs (TrainSchedule.num_pipe_buffers of 0.19.8). A slot without
    a micro-batch in flight is empty: the toolkit's engine lets go of what the last stage returned.
    """
    return min(stages - stage, micro_batches)


@dataclass(frozen=True, kw_only=True)
class PipelineBuffers:
    """Buffers of one stage. Without a pipeline `weight_bytes` is 0, and no buffer exists but those of Ulysses."""

    hidden: int
    """Bytes of the hidden state between two stages."""
    weight_bytes: int
    is_last: bool
    micro_batches: int
    exchanged: int = 0
    """Bytes that Ulysses exchanges: outputs of attention, which are kept as they were computed and as they came back to
    the rank; and the mask where documents do not attend to each other. 0 without Ulysses."""

    @property
    def at_peak(self) -> int:
        """Bytes beside the recording: the last stage's receive buffer; other stages have theirs in recordings."""
        return self.hidden if self.weight_bytes and self.is_last else self.exchanged

    @property
    def between(self) -> int:
        """Bytes of the buffer that a stage keeps between two steps; 0 without a pipeline.

        Every stage keeps one buffer, for the hidden state that comes or the gradient that comes back: both are the same
        (pipe/engine.py, `_allocate_or_extend_buffers`).
        """
        return self.hidden if self.weight_bytes else 0

    def counters(self, params: RankParameters) -> int:
        """Scalars of the engine, and the numbers that stand for other stages' parameters."""
        if not self.weight_bytes:
            return 0
        totals = 16  # the toolkit's sums of losses and of target tokens, fp64
        stage_bytes = 4 * _LOSSES + totals + self.weight_bytes * params.placeholders
        # The last stage also has the total, and each micro-batch's loss, of which the newest is counted above.
        return stage_bytes + (4 + 4 * (self.micro_batches - 1) if self.is_last else 0)


def routing_counters(shape: ModelShape) -> int:
    """Bytes of sums on each rank (toolkit/engines/routing.py).

    In fp64 the losses, the loads of all layers' experts, and those of the global batch; in fp32 what the losses of a
    micro-batch are computed from.
    """
    if shape.experts is None:
        return 0
    count = shape.experts.count
    return 8 * (2 + shape.layers * count) + 8 * (count + 1) + 4 * (2 * count + 3)
