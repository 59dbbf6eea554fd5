"""Activations on the stages of a DeepSpeed pipeline: how many micro-batches wait, and what its buffers hold.

The schedule is 1F1B (Narayanan et al. 2019, "PipeDream"; without flushes inside a step, Narayanan et al. 2021, section
2.2): a stage runs as many forward passes ahead as there are stages from it to the end, then one backward for each
forward.
"""

from toolkit.estimate.activations import ActivationBreakdown


def in_flight_micro_batches(stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations are live at once on a stage: min(stages - stage, micro-batches)."""
    return min(stages - stage, micro_batches)


def pipeline_buffers(stages: int, stage: int, micro_batches: int) -> int:
    """Slots that DeepSpeed keeps for inputs and outputs: max(2, min(stages - stage, micro-batches)).

    Source: TrainSchedule.num_pipe_buffers of DeepSpeed 0.19.8. A slot without a micro-batch in flight is empty, but
    for the logits of the last stage, which stay until the slot is used again.
    """
    return max(2, in_flight_micro_batches(stages, stage, micro_batches))


def stage_peak(
    activations: ActivationBreakdown,
    *,
    layers: int | range,
    stage: int,
    stages: int,
    micro_batches: int,
    gradients_kept: int = 0,
) -> int:
    """The most that activations and the engine's buffers take on a stage, of `activations` with loss="stock".

    Beside what a micro-batch keeps for backward, DeepSpeed holds
    - its received hidden state (`ActivationBreakdown.kept` has that) and the one it sent, until its backward has run;
    - one buffer for what is received, hidden states and gradients alike, from the first use on;
    - on the last stage the logits in the model's dtype: of this micro-batch, as with loss="stock", and of the one
      before, whose graph also holds the hidden state that it received and its gradient.
    """
    first, last = stage == 0, stage == stages - 1
    waiting = in_flight_micro_batches(stages, stage, micro_batches)
    peak = activations.peak(layers=layers, first=first, last=last, in_flight=waiting, gradients_kept=gradients_kept)
    if stages == 1:
        return peak
    if last:
        before = activations.logits_output + 2 * activations.boundary if micro_batches > 1 else 0
        return peak + activations.boundary + before
    return peak + (waiting + 1) * activations.boundary
