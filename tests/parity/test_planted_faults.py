"""The parity tests are worth what they catch: known mistakes of tensor parallelism and pipelines, put in one by one.

Each test names what raises the alarm, and the cause that the diagnosis must give. Some mistakes leave the loss of the
first step, its whole gradient or even every copy untouched, so no single comparison would do.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.engine
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipeline
from deepspeed.runtime.pipe.schedule import BackwardPass
from torch import nn

from toolkit.families.plans import gpt2
from toolkit.parallel import collectives, linear, region, tensor, vocabulary
from toolkit.parallel.deepspeed_pipeline import StagePipeline
from toolkit.parallel.groups import ModelParallelUnit
from toolkit.parallel.linear import RowParallelLinear
from toolkit.parallel.region import Region
from toolkit.parallel.shard import mark, pieces_of
from toolkit.parallel.stage import PipelineStage
from toolkit.parallel.tensor import TensorCut
from toolkit.parallel.vocabulary import VocabParallelEmbedding, VocabularyShard
from toolkit.parity import Cause, Trial, Verdict
from toolkit.parity.tolerance import FP32_RELATIVE
from toolkit.train import cut
from toolkit.train.engines import deepspeed_engine, pipeline_engine
from toolkit.train.engines.pipeline_engine import PipelineEngine
from toolkit.train.feed import Feed
from toolkit.train.loss import IGNORE
from toolkit.train.trial import run_trial
from toolkit.train.weights import initial

CLIP = 0.2
"""Below every gradient norm of the baselines; a test checks that."""
SMALL = {"hidden_size": 48, "head_dim": 12, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 321}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 321}
ISOLATED = "llama on isolated documents"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", GPT2),
    "qwen3": ("qwen3-tiny", SMALL),
    "llama": ("llama-tiny", SMALL | {"tie_word_embeddings": True}),
    "llama with one key-value head": ("llama-tiny", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ISOLATED: ("llama-tiny", SMALL | {"tie_word_embeddings": True}),
}
EVERYTHING = {"loss", "norm", "gradient", "parameters"}
Train = Callable[..., Verdict]


def changes(model: str, **more: Any) -> dict[str, Any]:
    shape, overrides = MODELS[model]
    return {
        "model": {"name_or_path": shape, "overrides": overrides},
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        # No warm-up from zero: the first step must move the weights, or it would hide what is wrong with it.
        "schedule": {"name": "constant"},
        "train__steps": 5,
        "train__grad_clip": CLIP,
        "data__packing": "isolated" if model == ISOLATED else "padded",
    } | more


@pytest.fixture(scope="module")
def baselines(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> dict[str, Trial]:
    """One plain process for each model; all of them now, before any fault is in."""
    return {
        model: ranks(run_trial, 1, make_recipe(**changes(model, train__engine="reference", batch__micro_size=16)))[0]
        for model in MODELS
    }


@pytest.fixture
def train(baselines: dict[str, Trial], make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Train:
    """train("gpt2", tp=2) trains on two ranks and holds them against the baseline."""

    def run(model: str = "gpt2", **parallel: Any) -> Verdict:
        recipe = make_recipe(**changes(model, parallel={"zero_stage": 0} | parallel))
        trials = ranks(run_trial, parallel.get("tp", 1) * parallel.get("pp", 1), recipe)
        verdict = Verdict.of(trials[0], baselines[model])
        print(verdict)  # shown where a test fails
        return verdict

    return run


def cause_of(verdict: Verdict) -> Cause | None:
    """What the diagnosis names; None where nothing is wrong."""
    return verdict.diagnosis and verdict.diagnosis.cause


def nothing(*_: Any, **__: Any) -> None:
    """What a forgotten call does."""


def as_it_is(x: Any, *_: Any, **__: Any) -> Any:
    """What a forgotten collective does."""
    return x


def matching(verdict: Verdict, *parts: str) -> set[str]:
    """The parameters whose name has one of these parts."""
    return {row.name for row in verdict.rows if any(part in row.name for part in parts)}


def ratios(verdict: Verdict, *parts: str) -> Any:
    """How many times too long the gradients of these parameters are."""
    return np.array([row.ratio for row in verdict.rows if any(part in row.name for part in parts)])


class TestWithoutAFault:
    @pytest.mark.parametrize("model", MODELS)
    def test_no_alarm_is_raised_under_tensor_parallelism(self, train: Train, model: str) -> None:
        train(model, tp=2).check()

    def test_no_alarm_is_raised_with_zero(self, train: Train) -> None:
        train(tp=2, zero_stage=1).check()

    def test_no_alarm_is_raised_under_sequence_parallelism(self, train: Train) -> None:
        train(tp=2, sequence_parallel=True).check()

    @pytest.mark.parametrize("model", ["gpt2", ISOLATED])
    def test_no_alarm_is_raised_in_a_pipeline(self, train: Train, model: str) -> None:
        train(model, pp=2).check()

    @pytest.mark.parametrize("model", MODELS)
    def test_every_step_of_the_baseline_is_clipped(self, baselines: dict[str, Trial], model: str) -> None:
        assert min(baselines[model].curve.grad_norms) > CLIP

    @pytest.mark.parametrize("model", MODELS)
    def test_no_parameter_has_a_gradient_too_small_to_be_seen(self, baselines: dict[str, Trial], model: str) -> None:
        norms = [float(np.linalg.norm(gradient)) for gradient in baselines[model].first_gradients.values()]
        assert min(norms) > 100 * FP32_RELATIVE * float(np.linalg.norm(norms))


class TestCollectives:
    def test_norms_of_heads_whose_gradient_is_not_summed(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensor, "sum_over_ranks", nothing)
        verdict = train("qwen3", tp=2)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.wrong_gradients == matching(verdict, "q_norm", "k_norm")
        assert verdict.torn == verdict.wrong_gradients

    def test_layer_norms_under_sequence_parallelism_whose_gradient_is_not_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor, "sum_over_ranks", nothing)
        verdict = train(tp=2, sequence_parallel=True)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        # The final norm sees the whole sequence again.
        assert verdict.wrong_gradients == matching(verdict, "ln_1", "ln_2", "c_proj.bias")
        assert verdict.torn == verdict.wrong_gradients

    def test_a_missing_f(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collectives, "copy_to_tensor_ranks", as_it_is)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.right_gradients == matching(verdict, "h.1.mlp", "ln_f")
        assert verdict.torn

    def test_a_missing_f_in_front_of_the_head(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vocabulary, "copy_to_tensor_ranks", as_it_is)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.BACKWARD
        assert not verdict.right_gradients

    def test_a_g_that_sums_backward_too(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return collectives._all_reduce(gradient, dist.group.WORLD), None

        monkeypatch.setattr(collectives._Reduce, "backward", staticmethod(backward))
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        # Each factor of two adds to those of the blocks behind it.
        assert verdict.right_gradients == matching(verdict, "ln_f", "h.1.mlp.c_proj.bias")

    def test_a_gather_of_the_sequence_without_reduce_scatter_backward(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return collectives._own_slice(gradient, ctx.group, ctx.dim), None, None

        monkeypatch.setattr(collectives._GatherSequence, "backward", staticmethod(backward))
        verdict = train(tp=2, sequence_parallel=True)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.right_gradients == matching(verdict, "h.1.mlp", "ln_f")

    def test_a_gathered_sequence_whose_repeated_gradient_is_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(collectives, "gather_from_tensor_ranks", collectives.gather_sequence)
        verdict = train(tp=2, sequence_parallel=True)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.right_gradients == matching(verdict, "ln_f")
        assert ratios(verdict, "h.") == pytest.approx(2.0)

    def test_layer_norms_summed_though_every_rank_has_all_of_their_gradient(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = TensorCut.layer

        def summed(cut: TensorCut, index: int, *rest: Any) -> None:
            layer(cut, index, *rest)
            for name, parameter in cut.anatomy.layer_list(cut.model)[index].named_parameters():
                if name.startswith("ln_"):
                    linear.sum_over_ranks(parameter, cut.group)

        monkeypatch.setattr(TensorCut, "layer", summed)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.wrong_gradients == matching(verdict, "ln_1", "ln_2")
        assert ratios(verdict, "ln_1", "ln_2") == pytest.approx(2.0)
        assert not verdict.torn

    def test_tensor_parallel_ranks_taken_for_replicas(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ModelParallelUnit, "get_data_parallel_group", lambda unit: dist.group.WORLD)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.STARTING_WEIGHTS
        # It begins with rank 0 giving all replicas its weights.
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms >= EVERYTHING

    def test_zero_3_that_shards_over_all_ranks(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        init = deepspeed.zero.Init

        def over_all(**settings: Any) -> Any:
            return init(**settings | {"data_parallel_group": dist.group.WORLD})

        monkeypatch.setattr(deepspeed.zero, "Init", over_all)
        verdict = train(tp=2, zero_stage=3)
        assert cause_of(verdict) == Cause.STARTING_WEIGHTS
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms >= EVERYTHING


class TestSlices:
    def test_a_fused_projection_cut_without_regard_to_query_key_and_value(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpt2, "PLAN", replace(gpt2.PLAN, fused={}))
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.SLICE
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms == EVERYTHING

    def test_query_heads_paired_with_the_neighbours_key_value_head(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crossed(blocks: Any, rank: int, size: int) -> Any:
            is_key_or_value = blocks[0].units == 2
            return pieces_of(blocks, size - 1 - rank if is_key_or_value else rank, size)

        monkeypatch.setattr(linear, "pieces_of", crossed)
        verdict = train("llama", tp=2)
        assert cause_of(verdict) == Cause.SLICE
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms == EVERYTHING

    def test_a_shared_key_value_head_whose_gradient_is_not_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear, "sum_over_sharers", nothing)
        verdict = train("llama with one key-value head", tp=2)
        assert cause_of(verdict) == Cause.ALL_REDUCE
        assert verdict.wrong_gradients == matching(verdict, "k_proj", "v_proj")
        assert verdict.torn == verdict.wrong_gradients

    def test_a_row_parallel_bias_added_by_every_rank(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(layer: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
            return layer.region.leave(layer._multiply(x, layer.bias))

        monkeypatch.setattr(RowParallelLinear, "forward", forward)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.FORWARD
        # Biases start at zero, and each gradient is right by itself: only a later loss can tell.
        assert not verdict.wrong_gradients
        assert verdict.report.first_diverging_step == 2
        assert verdict.alarms == {"loss", "norm", "parameters"}

    def test_weights_drawn_differently_on_each_rank(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _seed_by_rank(monkeypatch)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.STARTING_WEIGHTS
        assert verdict.report.first_diverging_step == 1
        assert verdict.torn >= matching(verdict, "wpe")

    def test_weights_drawn_differently_on_each_stage(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _seed_by_rank(monkeypatch)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.STARTING_WEIGHTS
        assert verdict.report.first_diverging_step == 1
        assert verdict.torn == matching(verdict, "wte")


class TestVocabulary:
    def test_padding_that_takes_part_in_the_softmax(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        class WithPadding(VocabularyShard):
            real_rows = property(lambda shard: shard.rows)  # type: ignore[assignment]

        monkeypatch.setattr(cut, "VocabularyShard", WithPadding)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.FORWARD
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms == EVERYTHING

    def test_a_softmax_in_which_each_rank_subtracts_its_own_largest_score(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def sums_only(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
            if op != dist.ReduceOp.MAX:
                dist.all_reduce(x, op=op, group=group)

        monkeypatch.setattr(vocabulary, "dist", SimpleNamespace(all_reduce=sums_only, ReduceOp=dist.ReduceOp))
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.FORWARD
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms >= EVERYTHING

    def test_a_head_that_lost_its_tie(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def untied(head: nn.Linear, name: str, group: Any, *, tied_to: nn.Parameter) -> None:
            vocabulary.split_head(
                head, name, group, tied_to=mark(nn.Parameter(tied_to.detach().clone()), tied_to.shard)
            )

        monkeypatch.setattr(tensor, "split_head", untied)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.TYING
        assert verdict.wrong_gradients == matching(verdict, "wte")

    def test_looked_up_embeddings_that_are_not_summed(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vocabulary, "reduce_from_tensor_ranks", as_it_is)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.SLICE
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms >= EVERYTHING

    def test_embeddings_looked_up_without_masking(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(embedding: VocabParallelEmbedding, ids: torch.Tensor) -> torch.Tensor:
            local = (ids - embedding.vocabulary.start).clamp(0, embedding.vocabulary.rows - 1)
            return collectives.reduce_from_tensor_ranks(nn.Embedding.forward(embedding, local), embedding.group)

        monkeypatch.setattr(VocabParallelEmbedding, "forward", forward)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.SLICE
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms == EVERYTHING

    def test_a_tied_copy_whose_gradient_is_not_summed_over_the_stages(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(StagePipeline, "get_tied_weights_and_groups", lambda pipeline: [])
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.TYING
        assert verdict.wrong_gradients == verdict.torn == matching(verdict, "wte")


class TestClipping:
    """The gradient is right, and what is done with it is not: the gradients of the first step cannot tell."""

    @pytest.fixture(autouse=True)
    def _clips_by_deepspeeds_norm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The toolkit takes the norm itself where there is no ZeRO, and these faults would not reach it."""
        for module in (deepspeed_engine, pipeline_engine):
            monkeypatch.setattr(module, "repair_norms", lambda engine, cut: None)

    @pytest.mark.parametrize("axis", ["tp", "pp"])
    def test_clipping_by_the_norm_of_what_a_rank_holds(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, axis: str
    ) -> None:
        clip = deepspeed.runtime.engine.clip_grad_norm_

        def alone(parameters: Any, max_norm: float, mpu: Any) -> Any:
            return clip(parameters, max_norm, mpu=None)

        monkeypatch.setattr(deepspeed.runtime.engine, "clip_grad_norm_", alone)
        verdict = train(**{axis: 2})
        assert cause_of(verdict) == Cause.CLIPPING
        assert not verdict.wrong_gradients
        assert verdict.report.first_diverging_step == 2
        assert verdict.alarms == {"loss", "norm", "parameters", "copies"}

    def test_deepspeeds_norm_of_the_first_stage_only(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _mark_stages(monkeypatch, lambda parameter: False)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.CLIPPING
        assert not verdict.wrong_gradients
        assert verdict.report.first_diverging_step == 2

    @pytest.mark.parametrize("zero_stage", [0, 1])
    def test_split_parameters_without_the_mark_that_counts_them(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, zero_stage: int
    ) -> None:
        _mark_tensors(monkeypatch, lambda parameter: False)
        verdict = train(tp=2, zero_stage=zero_stage)
        assert cause_of(verdict) == Cause.CLIPPING
        assert not verdict.wrong_gradients
        # ZeRO-1 reports the norm that it clips by. Without ZeRO we compute the reported one.
        assert verdict.report.first_diverging_step == 2 - zero_stage

    @pytest.mark.parametrize("zero_stage", [0, 1])
    def test_whole_parameters_counted_by_every_rank(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, zero_stage: int
    ) -> None:
        _mark_tensors(monkeypatch, lambda parameter: True)
        verdict = train(tp=2, zero_stage=zero_stage)
        assert cause_of(verdict) == Cause.CLIPPING
        assert not verdict.wrong_gradients
        assert verdict.report.first_diverging_step == 2 - zero_stage

    def test_a_tied_copy_counted_on_both_stages(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _mark_stages(monkeypatch, lambda parameter: True)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.CLIPPING
        assert not verdict.wrong_gradients
        assert verdict.report.first_diverging_step == 2


class TestStages:
    def test_a_later_stage_that_is_not_told_the_positions(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = PipelineStage.forward

        def forgetful(stage: PipelineStage, inputs: Any) -> Any:
            if stage.is_first:
                return forward(stage, inputs)
            return forward(stage, (inputs[0], torch.arange(inputs[1].shape[1]).expand_as(inputs[1])))

        monkeypatch.setattr(PipelineStage, "forward", forgetful)
        verdict = train(ISOLATED, pp=2)
        assert cause_of(verdict) == Cause.SLICE
        assert verdict.report.first_diverging_step == 1
        assert verdict.alarms == EVERYTHING

    def test_a_gradient_that_each_stage_before_the_last_scales_again(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backward = DeepSpeedPipeline._exec_backward_pass

        def scaled(engine: Any, buffer_id: int) -> None:
            if not engine.is_last_stage():
                engine.grad_layer[0].div_(engine.gradient_accumulation_steps())
            backward(engine, buffer_id)

        monkeypatch.setitem(DeepSpeedPipeline._INSTRUCTION_MAP, BackwardPass, scaled)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.STAGES
        assert verdict.wrong_gradients == matching(verdict, "h.0.", "wte", "wpe")
        assert ratios(verdict, "h.0.", "wpe") == pytest.approx(1 / 4)


class TestBatches:
    def test_a_mean_of_micro_batch_means(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def mean(engine: PipelineEngine, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return weighted(engine, logits, labels) / engine._scale / (labels != IGNORE).sum()

        weighted = PipelineEngine._loss
        monkeypatch.setattr(PipelineEngine, "_loss", mean)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.TOKEN_WEIGHTING
        assert not verdict.right_gradients
        assert verdict.alarms == EVERYTHING

    def test_a_pipeline_that_averages_micro_batches_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice(engine: PipelineEngine, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return once(engine, logits, labels) / engine.batch.accumulation

        once = PipelineEngine._loss
        monkeypatch.setattr(PipelineEngine, "_loss", twice)
        verdict = train(pp=2)
        assert cause_of(verdict) == Cause.SCALING
        # One factor everywhere and in the same direction.
        assert ratios(verdict, "") == pytest.approx(1 / 4)
        assert min(row.cosine for row in verdict.rows) == pytest.approx(1.0)
        assert "norm" in verdict.alarms

    def test_tensor_parallel_ranks_that_read_different_samples(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        positions = Feed._positions

        def by_rank(feed: Feed, accumulation_step: int) -> range:
            return positions(feed, (accumulation_step + dist.get_rank()) % feed.batch.accumulation)

        monkeypatch.setattr(Feed, "_positions", by_rank)
        verdict = train(tp=2)
        assert cause_of(verdict) == Cause.DATA_ORDER
        assert verdict.alarms >= EVERYTHING


class TestDropout:
    """No curve shows it: with dropout, layouts draw different masks anyway."""

    def test_ranks_drop_different_activations_inside_a_region(self, ranks: Callable[..., list[Any]]) -> None:
        one, other = ranks(_dropped_inside, 2)
        assert not torch.equal(one, other)

    def test_one_stream_for_all_ranks_is_seen(
        self, ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(region, "_GOLDEN", 0)
        one, other = ranks(_dropped_inside, 2)
        assert torch.equal(one, other)


def _dropped_inside() -> torch.Tensor:
    torch.manual_seed(1)
    block = nn.Identity()
    entered = Region(dist.group.WORLD, sequence_parallel=False, dropout=True).enter(torch.ones(64), block)
    return nn.functional.dropout(entered, 0.5)


def _seed_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    derive = initial.derive_seed
    monkeypatch.setattr(initial, "derive_seed", lambda *parts: derive(*parts, *["other"] * dist.get_rank()))


def _mark_tensors(monkeypatch: pytest.MonkeyPatch, counted: Callable[[nn.Parameter], bool]) -> None:
    def wrongly(parameter: Any, shard: Any) -> nn.Parameter:
        mark(parameter, shard)
        parameter.tensor_model_parallel = parameter.model_parallel = counted(parameter)
        return parameter

    for module in (linear, tensor, vocabulary):
        monkeypatch.setattr(module, "mark", wrongly)


def _mark_stages(monkeypatch: pytest.MonkeyPatch, counted: Callable[[nn.Parameter], bool]) -> None:
    rightly = StagePipeline._mark

    def wrongly(pipeline: StagePipeline, parameter: Any) -> None:
        rightly(pipeline, parameter)
        parameter.model_parallel = parameter.tensor_model_parallel = counted(parameter)

    monkeypatch.setattr(StagePipeline, "_mark", wrongly)
