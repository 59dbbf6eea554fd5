"""The pass over a micro-batch that a rank of a training setup runs, as the RankPass whose recording is looked up."""

from dataclasses import replace

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.computation import Attention, Computation
from toolkit.estimate.recorded.recording import Precision, RankPass, StagePart
from toolkit.estimate.recorded.recordings import stand_in
from toolkit.estimate.recorded.tiled_mlp import narrow
from toolkit.estimate.trainable import without_4bit
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.models.chunked_head import Chunks
from toolkit.models.support import attention_kinds


def stage_pass(setup: TrainingSetup, stage: int, precision: Precision, *, stand_ins: bool) -> RankPass:
    """Return the pass over a micro-batch on a rank of a pipeline stage.

    `stand_ins`: whether a pass that is not recorded is replaced by one that is, as in MemoryRequest.

    Raises LayoutError for a sequence or an imbalance that the layout does not allow, and ModelError for attention that
    the model does not have.
    """
    layout = setup.layout
    _check_attention(setup.model.shape.family, setup.computation.attention, precision)
    _check_sequence(setup)
    _check_imbalance(setup)
    config = setup.model.config
    if layout.tiled_mlp:
        config = narrow(config, 8 * layout.tp)
    rank_pass = RankPass(
        config=config,
        layout=_recorded_layout(setup),
        computation=_recorded_computation(setup),
        precision=precision,
        part=_stage_part(stage, layout.stages),
        samples="one" if setup.micro_batch_size == 1 else "many",
        chunks=_loss_chunks(setup),
    )
    if not stand_ins:
        return rank_pass
    return stand_in(rank_pass, setup.rank_positions)


def _stage_part(stage: int, stages: int) -> StagePart:
    """Return the part of the model that one of so many stages is."""
    if stages == 1:
        return "whole"
    if stage == 0:
        return "first"
    if stage == stages - 1:
        return "last"
    return "middle"


def _check_attention(family: str, attention: Attention, precision: Precision) -> None:
    """Raise ModelError for attention that transformers does not have for the family."""
    kinds = attention_kinds(family)
    in_fp32 = precision == "fp32"
    others = " or ".join(kind for kind in kinds if not (in_fp32 and kind == "flash"))
    if attention not in kinds:
        only = f"transformers has only {' and '.join(kinds)} attention for {family}"
        raise ModelError.of("attention", attention, only, f"choose {others}")
    if attention == "flash" and in_fp32:
        why = "its kernels compute in 16 bits, and this model in fp32"
        raise ModelError.of("attention", attention, why, f"choose {others}", "bf16 for it")


def _check_sequence(setup: TrainingSetup) -> None:
    """Raise LayoutError for positions that sequence parallelism cannot share out equally."""
    layout = setup.layout
    if layout.sequence_parallel and setup.rank_positions % layout.tp:
        settings = (("seq_len", setup.seq_len), ("tp", layout.tp), ("sequence_parallel", True))
        multiple = layout.tp * layout.ulysses * layout.cp
        raise LayoutError.between(settings, "ranks get equal parts", f"choose a multiple of {multiple}")


def _check_imbalance(setup: TrainingSetup) -> None:
    """Raise LayoutError for an imbalance that leaves one rank more rows than all ranks have."""
    owners = setup.expert_owners
    imbalance = setup.computation.imbalance
    if imbalance > owners > 1:
        reason = f"{owners} ranks share the rows of the experts, and one of them has all of them at {owners}"
        raise LayoutError.of("--imbalance", imbalance, reason, f"choose {owners} or less")


def _recorded_layout(setup: TrainingSetup) -> Layout:
    """Return what a recording depends on of a layout: what shards a layer, and what is recomputed."""
    layout = setup.layout
    return Layout(
        dp=layout.ep,
        ep=layout.ep,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        experts="whole" if setup.model.shape.experts is None else layout.experts,
    )


def _recorded_computation(setup: TrainingSetup) -> Computation:
    """Return what a recording depends on of what a pass computes."""
    layout = setup.layout
    computation = setup.computation
    # Under Ulysses the mask belongs to no layer, and the toolkit's own attention has none.
    layers_have_mask = layout.ulysses == 1 and setup.attention != "blocks"
    shares_rows = setup.model.shape.experts is not None and setup.expert_owners > 1
    return replace(
        computation,
        attention=setup.attention,
        documents=computation.documents and layers_have_mask,
        trainable=without_4bit(computation.trainable),
        loss_chunk=min(computation.loss_chunk, setup.rank_tokens),
        imbalance=computation.imbalance if shares_rows else 1.0,
    )


def _loss_chunks(setup: TrainingSetup) -> Chunks | None:
    """Return the chunks of the toolkit's own loss; None without it."""
    if not setup.chunked_loss:
        return None
    shape = setup.model.shape
    return Chunks.of(setup.rank_tokens, vocabulary=shape.vocab, hidden=shape.hidden, tp=setup.layout.tp)
