"""DeepSpeed ZeRO-3: Megatron's GPT of 2021 with activations on the host, and a plain PyTorch model of 2025.

Letters: S a rank's share of the parameters that are left after the tensor cut. Mechanisms of 2021, and where they can
be read (DeepSpeed 0.4, runtime/zero/stage3.py; DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3):

- 2S weights, 4S masters, 8S moments, and parameters of at most 100,000 elements whole besides; gradients of 2S and two
  reduction buckets of h² elements only from the backward pass to the step (`partition_previous_reduced_grads`,
  `backward`, `_release_ipg_buffers`; the launch script's config);
- the update makes a gradient of 4S, and torch's AdamW a root and a quotient of 4S each (optimizer `_functional.py`);
- checkpoints are cut over tensor-parallel ranks and lie on the host, so that one layer's input is on the GPU
  (activation_checkpointing/checkpointing.py, `get_full_inputs`);
- the layer is not fused: `megatron_2021_layer` with `fuses=False`. It and the tied embedding are gathered, whose
  gradient waits from the head to the end; and the embedding's dropout mask waits too.

The run of 2025 is counted by the toolkit's own estimate of DeepSpeed's states; its update takes more than its
activations of 512 tokens.
"""

from dataclasses import replace

from published.megatron_2021_layer import recomputed_peak
from published.megatron_stage import GptStage, gpt_stage
from published.prediction import Prediction
from published.rows import Row
from toolkit.estimate.parameters import Group, Holdings
from toolkit.estimate.states import DeepSpeedSettings, deepspeed_states

_SMALL = 100_000
"""Elements up to which a parameter stays whole (`param_persistence_threshold` in the logs)."""


def predict(row: Row) -> Prediction | str:
    """Allocated by PyTorch on rank 0."""
    if row.dp is None:
        return "the row does not say how many ranks share the states"
    return _of_2025(row) if row.source_id == "ds_bf16_master" else _of_2021(row)


def _of_2021(row: Row) -> Prediction:
    stage = gpt_stage(row, 0)
    shards, whole = _shares(stage.held, row.dp or 1)
    static = 14 * shards + 2 * whole
    backward = 2 * shards + _in_backward(row, stage)
    update = (2 + 4 + 8) * shards
    return Prediction(peak=static + max(backward, update, _in_head(stage)), static=static)


def _shares(held: Holdings, ranks: int) -> tuple[int, int]:
    """(elements in a rank's shards, elements of small parameters, which stay whole)."""
    counted = [entry for group in held.groups for entry in group.counted]
    shards = sum(-(-numel // ranks) * count for numel, count in counted)
    return shards, sum(numel * count for numel, count in counted if numel <= _SMALL)


def _in_backward(row: Row, stage: GptStage) -> int:
    """While one layer is recomputed and gone back through: its input and the gradient of its output included."""
    embedding = 2 * row.vocab * row.hidden // row.tp
    buckets = 2 * 2 * row.hidden**2
    gathered = 2 * stage.held.layer_numel + embedding
    layer = 2 * stage.boundary + recomputed_peak(replace(stage.widths, fuses=False))
    return buckets + gathered + embedding + stage.dropout_mask + layer


def _in_head(stage: GptStage) -> int:
    """The final norm's input and output, logits in 16 bits and in fp32, and the head's weight."""
    weight = 2 * stage.row.vocab * stage.row.hidden // stage.row.tp
    return 2 * stage.boundary + 6 * stage.logits_elements + weight + stage.dropout_mask


def _of_2025(row: Row) -> Prediction:
    """A stack of nn.MultiheadAttention and two linear layers, 12h² + 13h elements; embedding, positions and head.

    Source: DeepSpeedExamples, training/bf16_master_weight/train.py, configs/baseline.json.
    """
    h, f = row.hidden, row.ffn
    layer = (3 * h * h, 3 * h, h * h, h, h, h, h, h, h * f, f, f * h, h)
    group = Group(
        front=(row.vocab * h, row.seq_len * h), layer=layer, layers=row.layers, back=(row.vocab * h, row.vocab)
    )
    held = Holdings(groups=(group,), layers=row.layers, layer_numel=sum(layer), buffer_bytes=0, matrices=0)
    settings = DeepSpeedSettings.from_config(
        {
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_bucket_size": 5e7,
                "stage3_param_persistence_threshold": 0,
            },
        }
    )
    states = deepspeed_states(settings, held, dp=row.dp or 1)
    return Prediction(peak=states.held.total + states.step, static=states.held.total)
