"""Megatron-DeepSpeed's pipeline of 2021 to 2022, fp16: DeepSpeed's engine around Megatron's layers.

Letters: N parameters of a rank, U bytes of a hidden state, t tensor-parallel ranks. Mechanisms, and where they can be
read (DeepSpeed 0.4 to 0.6, deepspeed/runtime):

- ZeRO-0: FP16_UnfusedOptimizer, 2N weights, 4N masters, 8N moments from the start, gradients of 2N freed by each step,
  which makes 4N more (fp16/unfused_optimizer.py). ZeRO-1: as in the toolkit (zero/stage_1_and_2.py);
- hidden states are cut in t between stages (`PartitionedTensor`, utils.py): a micro-batch in flight keeps every layer's
  input and U/t of what it sent, which is put together again for its backward pass (pipe/engine.py);
- buffers that stay: U/t for receiving, behind the first stage; one for gradients, before the last, of U, and of U/t
  since 11 June 2021 (`is_grad_partitioned`); tokens, positions and mask in every slot of the first stage;
- the last stage's two slots keep the logits in fp32, which the loss overwrites, and the micro-batch's input and
  gradient (pipe/engine.py, `_exec_forward_pass`; nothing clears `outputs` there);
- one causal mask for all, 16 bits an entry; the tied module brings the positions to the last stage as well
  (Megatron-DeepSpeed, pretrain_gpt.py, megatron/model/gpt_model.py);
- layers as in `megatron_2021_layer`.

The tables of 2022 tell what nvidia-smi showed, rounded to GB, on the fuller of the first and the last machine: CUDA's
context, NCCL's buffers, and what the allocator reserves, which is replayed for the first stage.
"""

from published.caching_allocator import OutOfMemoryError
from published.megatron_deepspeed_reserve import replayed
from published.megatron_stage import GptStage, gpt_stage
from published.nccl import communicator_bytes
from published.prediction import Prediction
from published.rows import Row
from toolkit.estimate.stages import uniform_bounds
from toolkit.estimate.states import DeepSpeedSettings, deepspeed_states
from toolkit.estimate.states.model_states import ModelStates
from toolkit.hardware import gpu

CONTEXT_BYTES = 1573 * 2**20
"""What nvidia-smi shows of a process on an A100 that has made one tensor: measured by the tables' own authors
(bigscience, train/tr11-176B-ml/chronicles-prequel.md)."""
_GPU = "A100-SXM-80GB"
_SLOT_LABELS = 8 + 4
"""Bytes of a position's label and loss mask."""


def predict(row: Row) -> Prediction | str:
    """Logs of one stage: allocated. The tables of 2022: nvidia-smi, the larger of first and last stage."""
    if row.pp_stage is not None:
        static, peak = allocated(row, gpt_stage(row, row.pp_stage, is_whole_embedding_tied=True))
        return Prediction(peak=peak, static=static)
    return _on_device(row)


def _on_device(row: Row) -> Prediction | str:
    """What nvidia-smi shows, and whether every stage fits."""
    if row.gpu != "A100-80GB-SXM" or row.dp is None:
        return f"gpu={row.gpu}: only the tables on A100s are modelled"
    bounds = _bounds(row)
    first = gpt_stage(row, 0, bounds, is_whole_embedding_tied=True)
    later = min(1, row.pp - 1), row.pp - 1  # of stages in the middle the second has most micro-batches in flight
    others = [gpt_stage(row, stage, bounds, is_whole_embedding_tied=True) for stage in later]
    beside = CONTEXT_BYTES + _communicators(row) * communicator_bytes(row.dp * row.tp * row.pp, 8, gpu(_GPU))
    room = gpu(_GPU).memory_bytes - beside
    # Fragments depend on the order of every allocation: that a run has no room is told by what is allocated alone.
    fits = all(allocated(row, stage)[1] <= room for stage in (first, *others))
    try:
        taken = replayed(first, row.dp, allocated(row, first)[0], room).reserved
    except OutOfMemoryError:
        taken = room
    return Prediction(peak=beside + max(taken, min(room, allocated(row, others[-1])[1])), fits=fits)


def _communicators(row: Row) -> int:
    """NCCL's of a rank on the first or the last stage.

    World; tensor-parallel ranks, for Megatron and again for parts of hidden states; replicas; a model's ranks, for
    norms; a pipeline's, for the loss; the neighbour, for hidden states; both ends, for the tied embedding. Sources:
    runtime/pipe/topology.py, p2p.py, module.py; Megatron-DeepSpeed, megatron/mpu/initialize.py.
    """
    tensor, pipe = row.tp > 1, row.pp > 1
    return 1 + 2 * tensor + ((row.dp or 1) > 1) + (tensor or pipe) + 3 * pipe


def _bounds(row: Row) -> tuple[int, ...]:
    """Layers as evenly as they go; `transformer|embed` counts the embedding at either end as a layer."""
    if "transformer|embed" not in row.notes:
        return uniform_bounds(row.layers, row.pp)
    inner = uniform_bounds(row.layers + 2, row.pp)
    return (0, *(bound - 1 for bound in inner[1:-1]), row.layers)


def allocated(row: Row, stage: GptStage) -> tuple[int, int]:
    """Bytes (between two steps, at the peak)."""
    states = _states(row, stage)
    static = states.held.total + _between(row, stage)
    return static, static + max(states.step, states.reduction, _in_backward(row, stage))


def _states(row: Row, stage: GptStage) -> ModelStates:
    settings = DeepSpeedSettings(
        zero_stage=row.zero or 0,
        precision="fp16",
        accumulation_bytes=2,
        communication_bytes=2,
        counts_in_tensors=False,
        by_decay=False,
    )
    return deepspeed_states(settings, stage.held, dp=row.dp or 1)


def _between(row: Row, stage: GptStage) -> int:
    """Buffers that stay."""
    u, count = stage.boundary, stage.micro_batches
    slots = max(2, min(row.pp - stage.stage + 1, count))
    total = 2 * row.seq_len**2
    if not stage.first:
        total += u // row.tp
    if not stage.last:
        total += u // row.tp if _cuts_gradients(row) else u
    if stage.first:
        total += slots * stage.tokens_and_mask
    if stage.last:
        total += min(slots, count) * (_slot(stage) + _SLOT_LABELS * row.seq_len * row.micro_batch)
    return total


def _slot(stage: GptStage) -> int:
    """The last stage's: logits in fp32, the input and its gradient, where it has them."""
    return 4 * stage.logits_elements + (0 if stage.first else 2 * stage.boundary)


def _cuts_gradients(row: Row) -> bool:
    """Since 11 June 2021: of the rows here, those of 2022, which run ZeRO-1; the logs are of the day before."""
    return bool(row.zero)


def _in_backward(row: Row, stage: GptStage) -> int:
    """Gradients and activations at the worst moment, beyond what stays.

    The last stage's own slot is among what stays: its input is the first layer's, its input's gradient comes last.
    """
    u, kept = stage.boundary, _kept(row, stage)
    restored = 0 if stage.last else u - u // row.tp
    in_slot = 2 * u if stage.last and not stage.first else 0
    found = []
    for moment in stage.moments:
        at_top = moment.inputs == stage.layers
        # The gradient is received in the buffer that stays, or put together from parts; layers below make theirs.
        received = u if stage.last or _cuts_gradients(row) else 0
        incoming = received + (0 if at_top or stage.last else u)
        layer = kept - (stage.layers - moment.inputs) * u + incoming + restored + stage.layer_peak
        own = max(layer, _head(row, stage)) if at_top else layer
        found.append((moment.in_flight - 1) * kept + moment.gradients + own - in_slot)
    return max(found)


def _kept(row: Row, stage: GptStage) -> int:
    """By one micro-batch: inputs of layers, its part of what was sent, the embedding's dropout mask."""
    sent = 0 if stage.last else stage.boundary // row.tp
    return stage.kept_by_layers + sent + stage.dropout_mask


def _head(row: Row, stage: GptStage) -> int:
    """The final norm, then the gradients of the logits in 16 bits, of the state and of the weight, beside the slot."""
    if not stage.last:
        return 0
    weight = 2 * row.vocab * row.hidden // row.tp
    return _kept(row, stage) + 3 * stage.boundary + 2 * stage.logits_elements + weight
