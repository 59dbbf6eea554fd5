"""Megatron-LM of early 2021 (v2.4), fp16, without DeepSpeed: states and the schedule of its pipeline.

Letters: N parameters of a rank, U bytes of a hidden state, E logits of a micro-batch on a rank, W bytes of the
embedding's gradient in 16 bits. Mechanisms, and where they can be read (Megatron-LM v2.4):

- 2N weights, 4N masters, 8N moments, 2N gradients, and 4N gradients of the masters, which nobody ever frees:
  `zero_grad` looks at the model's own (megatron/optimizer/optimizer.py, Float16OptimizerWithFloat16Params);
- 2N more from the second step on: `allreduce_gradients` names each gradient `main_grad` too, so the old ones live until
  the next reduction (megatron/model/distributed.py), and a flat copy of 2N while they are reduced;
- moments come to be in the first update, so that a log that ends with it has not seen them during a backward pass;
- the last input of a stage and its gradient stay, named by the model (`set_input_tensor`, megatron/schedules.py);
- each micro-batch in flight keeps every layer's input, what was sent, its causal mask, and the embedding's dropout
  mask; beside them lie the received gradient and the one that was sent last (megatron/schedules.py);
- a layer as in `megatron_2021_layer`; the loss works in place (megatron/mpu/cross_entropy.py).
"""

from published.megatron_stage import GptStage, gpt_stage
from published.prediction import Prediction
from published.rows import Row

_ONE_UPDATE = ("perf_n16-ds-off",)
"""Logs that report memory after their first update: no step of theirs began with moments. The others report after
twenty steps, eighteen of which were skipped for the loss scale."""


def predict(row: Row) -> Prediction | str:
    """Allocated by PyTorch, on the stage that the log names."""
    if row.pp_stage is None:
        return "the row does not say which pipeline stage was measured"
    stage = gpt_stage(row, row.pp_stage)
    has_updated_once = any(name in row.source_ref for name in _ONE_UPDATE)
    count, retained = stage.held.numel, _retained(stage)
    static = 20 * count + retained
    if has_updated_once:
        backward = 6 * count + backward_peak(stage)
        return Prediction(peak=max(static, backward, 10 * count + retained), static=static)
    return Prediction(peak=max(22 * count + retained, 20 * count + backward_peak(stage)), static=static)


def _retained(stage: GptStage) -> int:
    """Between two steps: the last micro-batch's input and its gradient."""
    return 0 if stage.first else 2 * stage.boundary


def backward_peak(stage: GptStage) -> int:
    """Gradients in 16 bits and activations at the worst moment of the backward passes."""
    u, kept = stage.boundary, _kept(stage)
    found = []
    for moment in stage.moments:
        at_top = moment.inputs == stage.layers
        sent = u if moment.is_later and not stage.first else 0
        # The received gradient stays while the layers below make theirs; the head's does not.
        incoming = u if at_top or stage.last else 2 * u
        layer = kept - (stage.layers - moment.inputs) * u + incoming + stage.layer_peak
        own = max(layer, _head(stage)) if at_top else layer
        found.append((moment.in_flight - 1) * kept + sent + moment.gradients + own)
    return max(found)


def _kept(stage: GptStage) -> int:
    """By one micro-batch: inputs of layers, what was sent, masks."""
    sent = 0 if stage.last else stage.boundary
    return stage.kept_by_layers + sent + stage.dropout_mask + stage.tokens_and_mask


def _head(stage: GptStage) -> int:
    """Final norm, logits and loss: E in fp32 beside E in 16 bits, or later the latter beside two gradients."""
    if not stage.last:
        return 0
    norm = stage.boundary * (1 if stage.row.micro_batch == 1 else 2)
    weight = 2 * stage.row.vocab * stage.row.hidden // stage.row.tp
    logits = stage.logits_elements
    return _kept(stage) + norm + max(6 * logits, 2 * logits + stage.boundary + weight)
