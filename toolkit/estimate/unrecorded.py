"""Activations of a rank that the recording of its pass lacks, in bytes of one micro-batch.

A recording is made on one rank: what attention allocates in blocks, exchanges of context parallelism and of Ulysses,
tiles of MLPs, and what the losses of routers keep come on top.
"""

from collections.abc import Sequence

from toolkit.config.layout import recomputes
from toolkit.estimate.attention_moment import bytes_in_attention
from toolkit.estimate.rank_states import RankStates
from toolkit.estimate.recorded.activations import UnrecordedInLayer
from toolkit.estimate.recorded.tiled_mlp import tile_bytes
from toolkit.estimate.training_setup import TrainingSetup

_FP32_BYTES = 4


def unrecorded_bytes(setup: TrainingSetup, layers: Sequence[int], rank: RankStates) -> dict[str, int]:
    """Return the bytes that these layers keep of a micro-batch beside their recording, by kind of activation."""
    return {
        "routers": kept_by_router_losses(setup, layers),
        "attention": _exchanged_outputs(setup, layers, rank.product_bytes),
    }


def kept_by_router_losses(setup: TrainingSetup, layers: Sequence[int]) -> int:
    """Bytes of a micro-batch: 4 t e for each loss and layer with experts, of probabilities or of logits in fp32.

    t: tokens of a rank, e: experts. Known error: a few fp32 numbers for each token.
    """
    experts = setup.model.shape.experts
    if experts is None or not setup.router_losses:
        return 0
    layout = setup.layout
    shards = layout.ulysses * layout.cp
    if layout.sequence_parallel:
        shards *= layout.tp
    tokens = setup.micro_batch_size * setup.seq_len // shards
    parameters = setup.model.parameters
    has_experts = [any(parameter.is_experts for parameter in kind) for kind in parameters.kinds]
    expert_layers = sum(has_experts[parameters.pattern[index]] for index in layers)
    return _FP32_BYTES * tokens * experts.count * expert_layers * setup.router_losses


def unrecorded_in_layer(setup: TrainingSetup, rank: RankStates) -> UnrecordedInLayer:
    """Return the bytes in the backward pass of one layer that its recording lacks, of attention and of a tile."""
    layout = setup.layout
    in_attention = 0
    before_attention = 0
    if setup.attention == "blocks":
        in_attention = bytes_in_attention(setup, rank.product_bytes)
    if layout.cp_ulysses > 1 and layout.recompute != "none":
        # Outputs as they were computed; those that came back to the rank are freed when attention begins.
        before_attention += _layer_output_bytes(setup, rank.product_bytes)
    if layout.tiled_mlp:
        before_attention += tile_bytes(setup.model.shape, setup.rank_tokens, rank.itemsize, tp=layout.tp)
    return UnrecordedInLayer(in_attention=in_attention, before_attention=before_attention)


def ulysses_elements(setup: TrainingSetup) -> int:
    """Return the elements that a rank of Ulysses keeps of a micro-batch beside its recording.

    They are outputs of attention as they were computed, beside those that came back to the rank, and the mask where
    documents do not attend to each other.
    """
    shape = setup.model.shape
    tokens = setup.rank_tokens
    layers = _layers_that_keep_outputs(setup)
    if not setup.computation.documents:
        return layers * tokens * shape.heads * shape.head_dim
    # With a mask, keys and values are copied for each head, unless a rank has a single one.
    copied_heads = 0
    if shape.kv_heads > setup.layout.ulysses:
        copied_heads = 2 * (shape.heads - shape.kv_heads)
    mask = setup.micro_batch_size * setup.seq_len**2
    return mask + layers * tokens * (shape.heads + copied_heads) * shape.head_dim


def _layers_that_keep_outputs(setup: TrainingSetup) -> int:
    """Count the layers whose backward pass has not run: all that are not recomputed, or the one that is."""
    recompute = setup.layout.recompute
    if recompute == "selective":
        return 1
    return max(1, sum(not recomputes(recompute, layer) for layer in range(setup.model.shape.layers)))


def _exchanged_outputs(setup: TrainingSetup, layers: Sequence[int], itemsize: int) -> int:
    """Bytes of attention's outputs that layers keep of a micro-batch where context-parallel ranks exchange heads.

    They are kept as they were computed, beside those that came back to the rank, but in layers that are recomputed.
    """
    layout = setup.layout
    if layout.cp_ulysses == 1 or layout.recompute == "selective":
        return 0
    keeping = sum(not recomputes(layout.recompute, layer) for layer in layers)
    return keeping * _layer_output_bytes(setup, itemsize)


def _layer_output_bytes(setup: TrainingSetup, itemsize: int) -> int:
    """Bytes of the outputs of a layer's attention on a rank."""
    shape = setup.model.shape
    return setup.rank_tokens * shape.heads * shape.head_dim * itemsize // setup.layout.tp
