"""The parity tests are worth what they catch: known mistakes of tensor parallelism and pipelines, put in one by one.

Each test names what raises the alarm, and the cause that the diagnosis must give. Some mistakes leave the loss of the
first step, its whole gradient or even every copy untouched, so no single comparison would do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

from toolkit.config.pipeline_messages import Message
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.engines import deepspeed_patches
from toolkit.engines.context_slices import ContextSlices
from toolkit.engines.pipeline_engine import PipelineEngine
from toolkit.engines.scheduled_pipeline import ScheduledPipeline
from toolkit.model_init import random_weights as initial
from toolkit.models.families.registry import FAMILIES
from toolkit.parallel import chunked_loss
from toolkit.parallel.context import attention, exchange
from toolkit.parallel.context.exchange import RingExchange
from toolkit.parallel.groups import ModelParallelUnit
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.pipeline.pipeline_module import StagePipeline
from toolkit.parallel.pipeline.stage import PipelineStage, _Chunk
from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parallel.shard import mark, pieces_of
from toolkit.parallel.tensor import collectives, linear, region, vocabulary
from toolkit.parallel.tensor import parallelize as tensor
from toolkit.parallel.tensor.linear import RowParallelLinear
from toolkit.parallel.tensor.parallelize import TensorParallelizer
from toolkit.parallel.tensor.region import Region
from toolkit.parallel.tensor.vocabulary import VocabParallelEmbedding
from toolkit.parity import Cause, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import FP32_RELATIVE

CLIP = 0.2
"""Below every gradient norm of the baselines; a test checks that."""
SMALL = {"hidden_size": 48, "head_dim": 12, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 321}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 321}
MASKED = "llama with document masking"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-tiny", GPT2),
    "gpt2 of four layers": ("gpt2-tiny", GPT2 | {"n_layer": 4}),
    "qwen3": ("qwen3-tiny", SMALL),
    "llama": ("llama-tiny", SMALL | {"tie_word_embeddings": True}),
    "llama with one key-value head": ("llama-tiny", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    MASKED: ("llama-tiny", SMALL | {"tie_word_embeddings": True}),
}
EVERYTHING = {"loss", "norm", "gradient", "parameters"}
Train = Callable[..., ParityResult]


def changes(model: str, **more: Any) -> dict[str, Any]:
    shape, overrides = MODELS[model]
    return {
        "model": {"name_or_path": shape, "overrides": overrides},
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        # No warm-up from zero: the first step must move the weights, or it would hide what is wrong with it.
        "schedule": {"name": "constant"},
        "train__steps": 5,
        "train__grad_clip": CLIP,
        **({"data__document_masking": True} if model == MASKED else {"data__packing": "padded"}),
    } | more


@pytest.fixture(scope="module")
def baselines(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> dict[str, ParityRun]:
    """One plain process for each model; all of them now, before any fault is in."""
    return {
        model: ranks(
            train_in_memory, 1, make_recipe(**changes(model, train__engine="reference", batch__micro_batch_size=16))
        )[0]
        for model in MODELS
    }


@pytest.fixture
def train(baselines: dict[str, ParityRun], make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Train:
    """train("gpt2", tp=2) trains on two ranks and holds them against the baseline."""

    def run(model: str = "gpt2", **parallel: Any) -> ParityResult:
        recipe = make_recipe(**changes(model, parallel={"zero_stage": 0} | parallel))
        runs = ranks(train_in_memory, recipe.parallel.model_size, recipe)
        result = ParityResult.of(runs[0], baselines[model])
        print(result)  # shown where a test fails
        return result

    return run


def cause_of(result: ParityResult) -> Cause | None:
    """What the diagnosis names; None where nothing is wrong."""
    return result.diagnosis and result.diagnosis.cause


def nothing(*_: Any, **__: Any) -> None:
    """What a forgotten call does."""


def as_it_is(x: Any, *_: Any, **__: Any) -> Any:
    """What a forgotten collective does."""
    return x


def matching(result: ParityResult, *parts: str) -> set[str]:
    """The parameters whose name has one of these parts."""
    return {row.name for row in result.gradients if any(part in row.name for part in parts)}


def right_gradients(result: ParityResult) -> set[str]:
    """The parameters whose first gradient is the baseline's."""
    return {row.name for row in result.gradients} - result.wrong_gradients


def ratios(result: ParityResult, *parts: str) -> Any:
    """How many times too long the gradients of these parameters are."""
    return np.array([row.ratio for row in result.gradients if any(part in row.name for part in parts)])


class TestWithoutAFault:
    @pytest.mark.parametrize("model", MODELS)
    def test_no_alarm_is_raised_under_tensor_parallelism(self, train: Train, model: str) -> None:
        train(model, tp=2).check()

    def test_no_alarm_is_raised_with_zero(self, train: Train) -> None:
        train(tp=2, zero_stage=1).check()

    def test_no_alarm_is_raised_under_sequence_parallelism(self, train: Train) -> None:
        train(tp=2, sequence_parallel=True).check()

    @pytest.mark.parametrize("model", ["gpt2", MASKED])
    def test_no_alarm_is_raised_in_a_pipeline(self, train: Train, model: str) -> None:
        train(model, pp=2).check()

    @pytest.mark.parametrize("model", MODELS)
    def test_every_step_of_the_baseline_is_clipped(self, baselines: dict[str, ParityRun], model: str) -> None:
        assert min(baselines[model].curve.grad_norms) > CLIP

    @pytest.mark.parametrize("model", MODELS)
    def test_no_parameter_has_a_gradient_too_small_to_be_seen(
        self, baselines: dict[str, ParityRun], model: str
    ) -> None:
        norms = [float(np.linalg.norm(gradient)) for gradient in baselines[model].first_gradients.values()]
        assert min(norms) > 100 * FP32_RELATIVE * float(np.linalg.norm(norms))


class TestCollectives:
    def test_norms_of_heads_whose_gradient_is_not_summed(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensor, "sum_over_ranks", nothing)
        result = train("qwen3", tp=2)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert result.wrong_gradients == matching(result, "q_norm", "k_norm")
        assert result.run.diverged == result.wrong_gradients

    def test_layer_norms_under_sequence_parallelism_whose_gradient_is_not_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor, "sum_over_ranks", nothing)
        result = train(tp=2, sequence_parallel=True)
        assert cause_of(result) == Cause.ALL_REDUCE
        # The final norm sees the whole sequence again.
        assert result.wrong_gradients == matching(result, "ln_1", "ln_2", "c_proj.bias")
        assert result.run.diverged == result.wrong_gradients

    def test_a_missing_f(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collectives, "copy_to_tensor_ranks", as_it_is)
        result = train(tp=2)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert right_gradients(result) == matching(result, "h.1.mlp", "ln_f")
        assert result.run.diverged

    def test_a_missing_f_in_front_of_the_head(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunked_loss, "copy_to_tensor_ranks", as_it_is)
        result = train(tp=2)
        assert cause_of(result) == Cause.BACKWARD
        assert not right_gradients(result)

    def test_a_g_that_sums_backward_too(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(collectives._PAIRS, "reduce", (collectives.all_reduce, collectives.all_reduce))
        result = train(tp=2)
        assert cause_of(result) == Cause.ALL_REDUCE
        # Each factor of two adds to those of the blocks behind it.
        assert right_gradients(result) == matching(result, "ln_f", "h.1.mlp.c_proj.bias")

    def test_a_gather_of_the_sequence_without_reduce_scatter_backward(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slice_of(x: Any, group: Any, dim: int, *, meanwhile: Callable[[], None] = nothing) -> Any:
            meanwhile()
            return collectives._own_slice(x, group, dim)

        monkeypatch.setitem(collectives._PAIRS, "gather_sequence", (collectives._all_gather, slice_of))
        result = train(tp=2, sequence_parallel=True)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert right_gradients(result) == matching(result, "h.1.mlp", "ln_f")

    def test_a_gathered_sequence_whose_repeated_gradient_is_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(collectives, "gather_from_tensor_ranks", collectives.gather_sequence)
        result = train(tp=2, sequence_parallel=True)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert right_gradients(result) == matching(result, "ln_f")
        assert ratios(result, "h.") == pytest.approx(2.0)

    def test_layer_norms_summed_though_every_rank_has_all_of_their_gradient(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = TensorParallelizer.parallelize_layer

        def summed(parallelizer: TensorParallelizer, index: int, *rest: Any) -> None:
            layer(parallelizer, index, *rest)
            for name, parameter in parallelizer.structure.layer_list(parallelizer.model)[index].named_parameters():
                if name.startswith("ln_"):
                    linear.sum_over_ranks(parameter, parallelizer.group)

        monkeypatch.setattr(TensorParallelizer, "parallelize_layer", summed)
        result = train(tp=2)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert result.wrong_gradients == matching(result, "ln_1", "ln_2")
        assert ratios(result, "ln_1", "ln_2") == pytest.approx(2.0)
        assert not result.run.diverged

    def test_tensor_parallel_ranks_taken_for_replicas(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ModelParallelUnit, "get_data_parallel_group", lambda unit: dist.group.WORLD)
        result = train(tp=2)
        assert cause_of(result) == Cause.INITIAL_WEIGHTS
        # It begins with rank 0 giving all replicas its weights.
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks >= EVERYTHING

    def test_zero_3_that_shards_over_all_ranks(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        init = deepspeed.zero.Init

        def over_all(**settings: Any) -> Any:
            return init(**settings | {"data_parallel_group": dist.group.WORLD})

        monkeypatch.setattr(deepspeed.zero, "Init", over_all)
        result = train(tp=2, zero_stage=3)
        assert cause_of(result) == Cause.INITIAL_WEIGHTS
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks >= EVERYTHING


class TestSlices:
    def test_a_fused_projection_sharded_without_regard_to_query_key_and_value(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = FAMILIES["gpt2"]
        assert spec.tensor_plan is not None
        monkeypatch.setitem(FAMILIES, "gpt2", replace(spec, tensor_plan=replace(spec.tensor_plan, fused={})))
        result = train(tp=2)
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks == EVERYTHING

    def test_query_heads_paired_with_the_neighbors_key_value_head(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crossed(blocks: Any, rank: int, size: int) -> Any:
            is_key_or_value = blocks[0].units == 2
            return pieces_of(blocks, size - 1 - rank if is_key_or_value else rank, size)

        monkeypatch.setattr(linear, "pieces_of", crossed)
        result = train("llama", tp=2)
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks == EVERYTHING

    def test_a_shared_key_value_head_whose_gradient_is_not_summed(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear, "sum_over_sharers", nothing)
        result = train("llama with one key-value head", tp=2)
        assert cause_of(result) == Cause.ALL_REDUCE
        assert result.wrong_gradients == matching(result, "k_proj", "v_proj")
        assert result.run.diverged == result.wrong_gradients

    def test_a_row_parallel_bias_added_by_every_rank(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(layer: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
            return layer.region.leave(layer._multiply(x, layer.bias), layer)

        monkeypatch.setattr(RowParallelLinear, "forward", forward)
        result = train(tp=2)
        assert cause_of(result) == Cause.BIAS
        assert "every one of 2 tensor-parallel ranks adds the bias" in str(result.diagnosis)
        # Biases start at zero, and each gradient is right by itself: only a later loss can tell.
        assert not result.wrong_gradients
        assert result.curves.first_diverging_step == 2
        assert result.failed_checks == {"loss", "norm", "parameters"}

    def test_weights_drawn_differently_on_each_rank(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _seed_by_rank(monkeypatch)
        result = train(tp=2)
        assert cause_of(result) == Cause.INITIAL_WEIGHTS
        assert result.curves.first_diverging_step == 1
        assert result.run.diverged >= matching(result, "wpe")

    def test_weights_drawn_differently_on_each_stage(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _seed_by_rank(monkeypatch)
        result = train(pp=2)
        assert cause_of(result) == Cause.INITIAL_WEIGHTS
        assert result.curves.first_diverging_step == 1
        assert result.run.diverged == matching(result, "wte")


class TestVocabulary:
    def test_padding_that_takes_part_in_the_softmax(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        compute = chunked_loss._losses_and_grad_logits

        def with_padding(products: torch.Tensor, targets: torch.Tensor, how: Any, *others: Any) -> Any:
            shard = replace(how.shard, size=how.shard.start + how.shard.rows)
            return compute(products, targets, replace(how, shard=shard), *others)

        monkeypatch.setattr(chunked_loss, "_losses_and_grad_logits", with_padding)
        result = train(tp=2)
        assert cause_of(result) == Cause.FORWARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks == EVERYTHING

    def test_a_softmax_in_which_each_rank_subtracts_its_own_largest_score(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def sums_only(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
            if op != dist.ReduceOp.MAX:
                dist.all_reduce(x, op=op, group=group)

        monkeypatch.setattr(chunked_loss, "dist", SimpleNamespace(all_reduce=sums_only, ReduceOp=dist.ReduceOp))
        result = train(tp=2)
        assert cause_of(result) == Cause.FORWARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks >= EVERYTHING

    def test_a_head_that_lost_its_tie(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def untied(head: nn.Linear, name: str, group: Any, *, tied_to: nn.Parameter) -> None:
            vocabulary.shard_head(
                head, name, group, tied_to=mark(nn.Parameter(tied_to.detach().clone()), tied_to.shard)
            )

        monkeypatch.setattr(tensor, "shard_head", untied)
        result = train(tp=2)
        assert cause_of(result) == Cause.TYING
        assert result.wrong_gradients == matching(result, "wte")

    def test_looked_up_embeddings_that_are_not_summed(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vocabulary, "reduce_from_tensor_ranks", as_it_is)
        result = train(tp=2)
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks >= EVERYTHING

    def test_embeddings_looked_up_without_masking(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(embedding: VocabParallelEmbedding, ids: torch.Tensor) -> torch.Tensor:
            local = (ids - embedding.vocabulary.start).clamp(0, embedding.vocabulary.rows - 1)
            return collectives.reduce_from_tensor_ranks(nn.Embedding.forward(embedding, local), embedding.group)

        monkeypatch.setattr(VocabParallelEmbedding, "forward", forward)
        result = train(tp=2)
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks == EVERYTHING

    def test_a_tied_copy_whose_gradient_is_not_summed_over_the_stages(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(StagePipeline, "get_tied_weights_and_groups", lambda pipeline: [])
        result = train(pp=2)
        assert cause_of(result) == Cause.TYING
        assert result.wrong_gradients == result.run.diverged == matching(result, "wte")


class TestClipping:
    """The gradient is right, and what is done with it is not: the gradients of the first step cannot tell."""

    @pytest.fixture(autouse=True)
    def _clips_by_deepspeeds_norm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The toolkit takes the norm itself where there is no ZeRO, and these faults would not reach it."""
        monkeypatch.setattr(deepspeed_patches, "fix_gradient_norms", lambda engine, partition: None)
        monkeypatch.setattr(deepspeed_patches, "known_norm", lambda engine, norm: nullcontext())

    @pytest.mark.parametrize("axis", ["tp", "pp"])
    def test_clipping_by_the_norm_of_what_a_rank_holds(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, axis: str
    ) -> None:
        clip = deepspeed.runtime.engine.clip_grad_norm_

        def alone(parameters: Any, max_norm: float, mpu: Any) -> Any:
            return clip(parameters, max_norm, mpu=None)

        monkeypatch.setattr(deepspeed.runtime.engine, "clip_grad_norm_", alone)
        result = train(**{axis: 2})
        assert cause_of(result) == Cause.CLIPPING
        assert not result.wrong_gradients
        assert result.curves.first_diverging_step == 2
        assert result.failed_checks == {"loss", "norm", "parameters", "replicas"}

    def test_deepspeeds_norm_of_the_first_stage_only(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _mark_stages(monkeypatch, lambda parameter: False)
        result = train(pp=2)
        assert cause_of(result) == Cause.CLIPPING
        assert not result.wrong_gradients
        assert result.curves.first_diverging_step == 2

    @pytest.mark.parametrize("zero_stage", [0, 1])
    def test_split_parameters_without_the_mark_that_counts_them(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, zero_stage: int
    ) -> None:
        _mark_tensors(monkeypatch, lambda parameter: False)
        result = train(tp=2, zero_stage=zero_stage)
        assert cause_of(result) == Cause.CLIPPING
        assert not result.wrong_gradients
        # ZeRO-1 reports the norm that it clips by. Without ZeRO we compute the reported one.
        assert result.curves.first_diverging_step == 2 - zero_stage

    @pytest.mark.parametrize("zero_stage", [0, 1])
    def test_whole_parameters_counted_by_every_rank(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, zero_stage: int
    ) -> None:
        _mark_tensors(monkeypatch, lambda parameter: True)
        result = train(tp=2, zero_stage=zero_stage)
        assert cause_of(result) == Cause.CLIPPING
        assert not result.wrong_gradients
        assert result.curves.first_diverging_step == 2 - zero_stage

    def test_a_tied_copy_counted_on_both_stages(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _mark_stages(monkeypatch, lambda parameter: True)
        result = train(pp=2)
        assert cause_of(result) == Cause.CLIPPING
        assert not result.wrong_gradients
        assert result.curves.first_diverging_step == 2


class TestStages:
    def test_a_later_stage_that_is_not_told_the_positions(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = PipelineStage.forward

        def forgetful(stage: PipelineStage, inputs: Any) -> Any:
            if stage.is_first:
                return forward(stage, inputs)
            return forward(stage, (inputs[0], torch.arange(inputs[1].shape[1]).expand_as(inputs[1])))

        monkeypatch.setattr(PipelineStage, "forward", forgetful)
        result = train(MASKED, pp=2)
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert result.failed_checks == EVERYTHING

    def test_a_gradient_that_each_stage_before_the_last_scales_again(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backward = DeepSpeedPipeline._exec_backward_pass

        def scaled(engine: Any, buffer_id: int) -> None:
            if not engine.is_last_stage():
                engine.grad_layer[0].div_(engine.gradient_accumulation_steps())
            backward(engine, buffer_id)

        monkeypatch.setitem(DeepSpeedPipeline._INSTRUCTION_MAP, BackwardPass, scaled)
        result = train(pp=2)
        assert cause_of(result) == Cause.STAGES
        assert result.wrong_gradients == matching(result, "h.0.", "wte", "wpe")
        assert ratios(result, "h.0.", "wpe") == pytest.approx(1 / 4)


class TestSchedules:
    """Mistakes of schedules whose ranks have several chunks, or a pass of its own for the gradients of weights."""

    @pytest.mark.parametrize(("times", "counts"), [(0, "does not count"), (2, "counts 2 times")])
    def test_weight_gradients_of_a_micro_batch_that_are_lost_or_doubled(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, times: int, counts: str
    ) -> None:
        compute = WeightGradients.compute

        def planted(queue: WeightGradients, stage: int, micro_batch: int) -> None:
            again = list(queue._pending[stage, micro_batch])
            for _ in range(times if micro_batch == 1 else 1):
                queue._pending[stage, micro_batch] = list(again)
                compute(queue, stage, micro_batch)
            queue._pending.pop((stage, micro_batch), None)

        monkeypatch.setattr(WeightGradients, "compute", planted)
        result = train(pp=2, schedule="zb-h1")
        assert cause_of(result) == Cause.ACCUMULATION
        assert f"micro-batch 2 {counts}" in str(result.diagnosis)
        assert result.wrong_gradients == matching(result, "c_attn.weight", "c_proj.weight", "c_fc.weight")

    def test_gradients_that_come_back_to_another_micro_batch(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = ScheduledPipeline._take
        waiting: list[Any] = []

        def exchanged(engine: ScheduledPipeline, message: Message) -> Any:
            """The gradients of two micro-batches that are there, under GPipe, each in the place of the other."""
            if message.carries == "activation":
                return take(engine, message)
            if message.micro_batch % 2:
                return waiting.pop()
            first = take(engine, message)
            second = take(engine, message._replace(micro_batch=message.micro_batch + 1))
            waiting.append(first)
            return second

        monkeypatch.setattr(ScheduledPipeline, "_take", exchanged)
        result = train("qwen3", pp=2, schedule="gpipe")
        assert cause_of(result) == Cause.MESSAGES
        assert matching(result, "layers.0.") <= result.wrong_gradients
        assert matching(result, "layers.1.", "model.norm") <= right_gradients(result)

    def test_chunks_of_a_rank_in_the_place_of_each_other(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        as_layers = _Chunk.as_layers

        @contextmanager
        def exchanged(chunk: _Chunk, layers: nn.ModuleList) -> Iterator[None]:
            own = layers._modules
            layers._modules = own | {"0": own["2"], "2": own["0"]}
            try:
                with as_layers(chunk, layers):
                    yield
            finally:
                layers._modules = own

        monkeypatch.setattr(_Chunk, "as_layers", exchanged)
        result = train("gpt2 of four layers", pp=2, schedule="interleaved")
        assert cause_of(result) == Cause.SHARD
        assert result.curves.first_diverging_step == 1
        assert "loss" in result.failed_checks


class TestBatches:
    def test_a_mean_of_micro_batch_means(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def mean(engine: PipelineEngine, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return weighted(engine, logits, labels) / engine._scale / (labels != IGNORE).sum()

        weighted = PipelineEngine._loss
        monkeypatch.setattr(PipelineEngine, "_loss", mean)
        result = train(pp=2)
        assert cause_of(result) == Cause.TOKEN_WEIGHTING
        assert not right_gradients(result)
        assert result.failed_checks == EVERYTHING

    def test_a_pipeline_that_averages_micro_batches_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice(engine: PipelineEngine, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return once(engine, logits, labels) / engine.batch.accumulation

        once = PipelineEngine._loss
        monkeypatch.setattr(PipelineEngine, "_loss", twice)
        result = train(pp=2)
        assert cause_of(result) == Cause.SCALING
        # One factor everywhere and in the same direction.
        assert ratios(result, "") == pytest.approx(1 / 4)
        assert min(row.cosine for row in result.gradients) == pytest.approx(1.0)
        assert "norm" in result.failed_checks

    def test_tensor_parallel_ranks_that_read_different_samples(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        positions = MicroBatchLoader._positions

        def by_rank(loader: MicroBatchLoader, accumulation_step: int) -> range:
            return positions(loader, (accumulation_step + dist.get_rank()) % loader.batch.accumulation)

        monkeypatch.setattr(MicroBatchLoader, "_positions", by_rank)
        result = train(tp=2)
        assert cause_of(result) == Cause.DATA_ORDER
        assert result.failed_checks >= EVERYTHING


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


class TestContextParallelism:
    """Mistakes of ranks that share sequences."""

    def test_no_alarm_is_raised(self, train: Train) -> None:
        train("llama", cp=2).check()

    def test_positions_that_restart_in_a_slice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        take = ContextSlices.take

        def from_zero(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            return replace(part, position_ids=torch.arange(part.input_ids.shape[1]).expand_as(part.input_ids))

        monkeypatch.setattr(ContextSlices, "take", from_zero)
        result = train("llama", cp=2)
        assert cause_of(result) == Cause.POSITIONS

    def test_labels_that_are_shifted_in_a_slice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        take = ContextSlices.take

        def shifted(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            following = torch.full_like(part.labels, IGNORE)
            following[:, :-1] = part.input_ids[:, 1:]
            return replace(part, labels=torch.where(part.labels == IGNORE, IGNORE, following))

        monkeypatch.setattr(ContextSlices, "take", shifted)
        result = train("llama", cp=2)
        assert cause_of(result) == Cause.LABELS
        assert "slices of 2 context-parallel ranks" in str(result.diagnosis)

    def test_chunks_in_the_order_of_ranks(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def in_order_of_ranks(every: torch.Tensor, _: Any) -> torch.Tensor:
            return torch.cat(list(every), dim=2)

        monkeypatch.setattr(exchange, "_in_order", in_order_of_ranks)
        result = train("llama", cp=2)
        assert cause_of(result) == Cause.CONTEXT
        assert "in another order than their positions" in str(result.diagnosis)

    def test_a_block_that_is_merged_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = RingExchange.parts

        def first_again(ring: Any, key: Any, value: Any, sequence: Any) -> Any:
            for step, held in enumerate(parts(ring, key, value, sequence)):
                yield held
                if step == 0:
                    yield held

        monkeypatch.setattr(RingExchange, "parts", first_again)
        monkeypatch.setattr(RingExchange, "gradients", as_in_one_block)
        result = train("llama", cp=2, cp_exchange="ring")
        assert cause_of(result) == Cause.CONTEXT
        assert "is merged 2 times" in str(result.diagnosis)

    def test_blocks_that_merge_without_their_log_sum_exp(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        def average(merged: Any, tile: Any, output: torch.Tensor, sums: torch.Tensor) -> None:
            at = (tile.rows, slice(None), tile.queries)
            is_first = torch.isneginf(merged._sums[at])[..., None]
            merged._output[at] = torch.where(is_first, output, (merged._output[at] + output) / 2)
            merged._sums[at] = torch.logaddexp(merged._sums[at], sums)

        monkeypatch.setattr(attention._Merged, "add", average)
        result = train("llama", cp=2)
        assert cause_of(result) == Cause.CONTEXT
        assert "without their log-sum-exp" in str(result.diagnosis)


def as_in_one_block(_: Any, key: torch.Tensor, value: torch.Tensor, *__: Any) -> Any:
    """Gradients that nobody looks at: the forward pass is wrong already."""
    return torch.zeros_like(key), torch.zeros_like(value)
