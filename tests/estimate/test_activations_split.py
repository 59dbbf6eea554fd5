"""The estimate of activations against models that are split over tensor-parallel ranks, and over pipeline stages."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from measured_activations import EAGER_ONLY, NEVER_RECOMPUTED, Case, kept_bytes
from nonempty import nonempty

from toolkit.models.shape import families

DAILY = ("gpt2", "falcon", "llama")
_OWN_BLOCKS = ("glm", "bitnet", "olmo3", "diffllama", "minicpm3", "xglm", "persimmon", "mpt")
"""Gathered columns, norms inside, latents, fused projections."""
_VARIANTS = (
    ("stablelm", {"qk_layernorm": True}),
    ("cohere", {"use_qk_norm": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_attention_heads": 8, "num_kv_heads": 4}),
)


def _measure(cases: Sequence[Case]) -> list[int]:
    """On a rank: what its part of each model keeps."""
    from family_check import parallelize
    from torch import distributed as dist

    from toolkit.parallel.model_structure import analyze_model
    from toolkit.parallel.tensor.vocabulary import VocabularyShard, vocab_parallel_token_loss_sum

    group = dist.group.WORLD
    assert group is not None
    found = []
    for case in cases:
        model = case.model()
        with torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
        parallelize(model, analyze_model(twin), group, sequence_parallel=case.sequence_parallel)
        shard = VocabularyShard.of(model.config.get_text_config().vocab_size, group)

        def loss_sum(logits: torch.Tensor, labels: torch.Tensor, own: VocabularyShard = shard) -> torch.Tensor:
            return vocab_parallel_token_loss_sum(logits, labels, own, group)

        torch.manual_seed(0)  # ranks of one group see the same tokens
        found.append(kept_bytes(case, case.prepared(model), loss_sum))
    return found


def _check(ranks: Callable[..., list[Any]], cases: Sequence[Case]) -> None:
    for measured in ranks(_measure, 2, cases):
        errors = {str(case): case.predicted_kept(tp=2) / own - 1 for case, own in zip(cases, measured, strict=True)}
        assert max(errors.values(), key=abs) == pytest.approx(0, abs=0.01), errors


def _cases(family: str, **settings: Any) -> list[Case]:
    return [
        Case(family=family, attention=attention, sequence_parallel=sequence_parallel, recompute=recompute, **settings)
        for attention in ("eager", "sdpa")
        for sequence_parallel in (False, True)
        for recompute in (("none",) if family in NEVER_RECOMPUTED else ("none", "full"))
        if attention == "eager" or family not in EAGER_ONLY
    ]


@pytest.mark.parametrize("family", DAILY)
def test_what_a_rank_keeps_is_known_within_a_percent(ranks: Callable[..., list[Any]], family: str) -> None:
    _check(ranks, [case for case in _cases(family) if case.recompute == "none" or case.sequence_parallel])


def test_a_rank_of_a_family_with_special_blocks_is_known_within_a_percent(ranks: Callable[..., list[Any]]) -> None:
    _check(
        ranks,
        [Case(family=family, attention="eager", sequence_parallel=i % 2 == 0) for i, family in enumerate(_OWN_BLOCKS)],
    )


@pytest.mark.parametrize(("family", "changes"), _VARIANTS)
def test_blocks_that_gather_their_columns_are_counted_whole(
    ranks: Callable[..., list[Any]], family: str, changes: dict[str, Any]
) -> None:
    cases = [
        Case(family=family, attention="eager", sequence_parallel=sequence_parallel, changes=changes)
        for sequence_parallel in (False, True)
    ]
    _check(ranks, cases)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_rank_that_recomputes_attention_keeps_its_inputs(ranks: Callable[..., list[Any]], family: str) -> None:
    cases = [
        Case(family=family, attention="eager", recompute="selective", sequence_parallel=sp) for sp in (False, True)
    ]
    _check(ranks, cases)


@pytest.mark.whole
@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_any_familys_rank_keeps_is_known_within_a_percent(
    ranks: Callable[..., list[Any]], family: str, samples: int, dtype: torch.dtype
) -> None:
    _check(ranks, _cases(family, samples=samples, dtype=dtype))


@pytest.mark.parametrize(("stages", "recompute"), [(2, "none"), (3, "selective"), (4, "none")])
def test_the_peak_of_a_live_pipeline_stage_is_known_within_a_thousandth(
    make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]], stages: int, recompute: str
) -> None:
    from live_pipeline import MICRO_BATCHES, SAMPLES, one_more_step
    from training_setups import rank_pass

    from toolkit.estimate.pipeline_buffers import PipelineBuffers, in_flight_micro_batches
    from toolkit.estimate.recorded.recording import StagePart, config_text
    from toolkit.estimate.recorded.recordings import activations
    from toolkit.models.chunked_head import Chunks

    recipe = make_recipe(
        parallel={"pp": stages, "zero_stage": 0, "recompute": recompute},
        train__steps=1,
        overrides__n_layer=8,
        overrides__attn_pdrop=0.0,
    )
    errors = {}
    for rank in ranks(one_more_step, stages, recipe):
        stage = rank.pipe
        tokens = SAMPLES * recipe.data.seq_len
        part: StagePart = "first" if stage == 0 else "last" if stage == stages - 1 else "middle"
        stage_pass = rank_pass(
            config_text(rank.config),
            recompute=recompute,
            precision="fp32",
            device="cpu",
            part=part,
            chunks=Chunks.of(tokens, vocabulary=rank.config["vocab_size"], hidden=rank.config["n_embd"], tp=1),
        )
        first = sum(rank.stage_layers[:stage])
        worst = activations(stage_pass, SAMPLES, recipe.data.seq_len).worst_moment(
            range(first, first + rank.stage_layers[stage]),
            in_flight=in_flight_micro_batches(stages, stage, MICRO_BATCHES),
        )
        buffers = PipelineBuffers(
            hidden=4 * tokens * rank.config["n_embd"],
            weight_bytes=4,
            is_last=stage == stages - 1,
            micro_batches=MICRO_BATCHES,
        )
        predicted = worst.total + buffers.at_peak
        errors[stage] = (predicted + rank.gradients) / rank.peak - 1
    assert max(errors.values(), key=abs) == pytest.approx(0, abs=0.001), errors


def test_micro_batches_in_flight_are_those_of_deepspeeds_schedule() -> None:
    """Forward passes that have not had their backward, over the instructions of every stage."""
    from deepspeed.runtime.pipe import schedule

    from toolkit.estimate.pipeline_buffers import in_flight_micro_batches

    for stages in range(1, 6):
        for micro_batches in range(1, 9):
            for stage in nonempty(range(stages)):
                made = schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
                live = most = 0
                for instructions in made.steps():
                    for one in instructions:
                        live += isinstance(one, schedule.ForwardPass) - isinstance(one, schedule.BackwardPass)
                        most = max(most, live)
                assert most == in_flight_micro_batches(stages, stage, micro_batches), (stages, stage, micro_batches)
                assert made.num_pipe_buffers() == max(2, in_flight_micro_batches(stages, stage, micro_batches))
