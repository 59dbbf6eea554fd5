"""The memory of the pass of a distillation's teacher, which ranks run before they build the student.

Source: `top_tokens` (toolkit/engines/full_forward.py), `TopTokens` (toolkit/parallel/distilled_loss.py), and
AllGatherCoalescedHandle (deepspeed/runtime/zero/partition_parameters.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.config.distill_section import BATCHES_A_COMMIT
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.rank_pass import stage_pass
from toolkit.estimate.rank_states import Engine, RankStates, rank_states
from toolkit.estimate.recorded.recordings import activations
from toolkit.estimate.stage_bounds import stages_of_rank
from toolkit.estimate.trainable import vectors_alone
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.models.chunked_head import chunk_tokens

_ID_BYTES = 8
"""Bytes of a token's id, and of other integers of a batch."""
_FP32_BYTES = 4


def teacher_pass_bytes(
    setup: TrainingSetup, engine: Engine, pipe: int, stage_layers: Sequence[range], *, top_k: int, stand_ins: bool
) -> int:
    """Return the bytes of pipeline rank `pipe` at the peak of the pass of a teacher, whose setup this is.

    They are states, weights that are gathered or cast, what several micro-batches leave until it is written, and one
    of two moments: a layer at work, or a chunk of logits, in the dtype of the products and in fp32. `stage_layers`: the
    decoder layers of each stage. `top_k`: tokens that are stored for each target. `stand_ins`: as in MemoryRequest.

    Known error: a copy of logits where ranks have tokens that the student lacks, and what a pipeline's stages receive,
    are not counted.
    """
    own_stages = stages_of_rank(setup.layout, pipe)
    layers = tuple(index for stage in own_stages for index in stage_layers[stage])
    rank = rank_states(setup, engine, pipe, layers, model=vectors_alone(setup.model.parameters))
    working = max(_working_bytes(setup, stage, stage_layers[stage], rank, stand_ins=stand_ins) for stage in own_stages)
    cast = 2 * rank.params.largest if rank.copies_weights else 0
    arriving = _arriving_bytes(setup, engine, rank)
    uncommitted = _uncommitted_bytes(setup, pipe, top_k=top_k)
    return rank.states.resident.total + rank.states.gathered + arriving + cast + working + uncommitted


def _working_bytes(setup: TrainingSetup, stage: int, layers: range, rank: RankStates, *, stand_ins: bool) -> int:
    """Return the bytes of a stage with these layers at work in a teacher's forward pass.

    They are those of a layer, or of a chunk of logits.
    """
    layout = setup.layout
    # A layer that is recomputed keeps nothing in its forward pass, as without gradients.
    forward_only = replace(setup, layout=replace(layout, recompute="full"))
    rank_pass = stage_pass(forward_only, stage, rank.precision, stand_ins=stand_ins)
    recorded = activations(replace(rank_pass, chunks=None), setup.micro_batch_size, setup.rank_positions)
    in_layers = recorded.without_gradients(layers)
    if stage < layout.stages - 1:
        return in_layers
    return max(in_layers, recorded.embedding.delta + _logits_bytes(setup, rank))


def _logits_bytes(setup: TrainingSetup, rank: RankStates) -> int:
    """Bytes of a teacher's logits at their worst moment, in fp32 beside those of the product, and of their input."""
    shape = setup.model.shape
    tokens = setup.rank_tokens
    rows = -(-shape.vocab // setup.layout.tp)
    chunk = chunk_tokens(tokens, rows) if setup.chunked_loss else tokens
    # A chunk in fp32 is overwritten; full logits are the model's output, and copied.
    logit_bytes = _FP32_BYTES
    if rank.product_bytes < _FP32_BYTES or not setup.chunked_loss:
        logit_bytes += rank.product_bytes
    return tokens * shape.hidden * rank.itemsize + chunk * rows * logit_bytes


def _arriving_bytes(setup: TrainingSetup, engine: Engine, rank: RankStates) -> int:
    """Bytes of weights that ZeRO-3 gathers into one tensor, a prefetch bucket at a time, and then each into its own."""
    if not isinstance(engine, DeepSpeedSettings) or engine.zero_stage != 3 or setup.layout.replicas == 1:
        return 0
    return engine.model_bytes * min(engine.prefetch_bucket_size, rank.params.numel)


def _uncommitted_bytes(setup: TrainingSetup, pipe: int, *, top_k: int) -> int:
    """Bytes of what micro-batches leave on the device until it is written: tokens and, on the last rank, the top k."""
    ids_of_token = 3  # its id, its label and its place in the text
    if setup.computation.documents:
        ids_of_token += 1  # its position in its document
    token_bytes = _ID_BYTES * ids_of_token
    if setup.layout.stage_ranks[-1] == pipe:
        # Ids of the top k tokens, and in fp32 their log-probabilities and that of all others together.
        token_bytes += _ID_BYTES * top_k + _FP32_BYTES * (top_k + 1)
    return BATCHES_A_COMMIT * setup.rank_tokens * token_bytes
