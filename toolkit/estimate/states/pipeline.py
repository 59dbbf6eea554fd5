"""What DeepSpeed's pipeline engine holds besides the optimizer: scalars, and buffers for what stages send."""

from toolkit.estimate.parameters import Holdings

_LOSSES = 3
"""fp32 scalars that every stage keeps: its loss, the sum over micro-batches, the mean over replicas."""


def channels_between(*, boundary: int, logits: int, last: bool, micro_batches: int) -> int:
    """Bytes of buffers between two steps; `boundary` of a hidden state between stages, `logits` of a micro-batch's.

    Every stage keeps one buffer, for the hidden state that comes or the gradient that comes back: both are the same
    (pipe/engine.py, `_allocate_or_extend_buffers`). The last stage has two slots, and a slot keeps its micro-batch's
    output, the logits, with the input that they came from and its gradient, until the next one takes its place.
    """
    if not last:
        return boundary
    return boundary + min(2, micro_batches) * (logits + 2 * boundary)


def pipeline_counters(held: Holdings, *, weight_bytes: int, last: bool, micro_batches: int) -> int:
    """Scalars of the engine, and the numbers that stand for other stages' parameters."""
    totals = 16  # the toolkit's sums of losses and of target tokens, fp64
    own = 4 * _LOSSES + totals + weight_bytes * held.placeholders
    # The last stage also has the total, and each micro-batch's loss, of which the newest is counted above.
    return own + (4 + 4 * (micro_batches - 1) if last else 0)
