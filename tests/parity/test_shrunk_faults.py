"""What `dstk compare --shrink` must find and name: mistakes planted in shrunken copies of recipes of the gallery.

The samples of a shrunken recipe have unequal numbers of targets, and the baseline looks at each of them alone. So how
much a sample counts, and which labels it gets, is told from everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipeline
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from transformers import PreTrainedModel

from toolkit.config import load_recipe, recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.loader import training_samples
from toolkit.data.tokens.corpora import prepare_all
from toolkit.engines import dropout
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.pipeline_engine import PipelineEngine
from toolkit.engines.reference_engine import ReferenceEngine
from toolkit.engines.ulysses_engine import UlyssesEngine
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tensor import region
from toolkit.parity import Bounds, Cause, ParityResult, ParityRun
from toolkit.parity.first_batch import Split
from toolkit.parity.run.compare_strategies import for_comparison
from toolkit.parity.run.shrink import shrink
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.seeds import derive_seed
from toolkit.training.loop import TrainingRun

RECIPES = {
    "text": ("gpt2-pretrain", []),
    "chat": ("llama/llama-3.2-1b-finetune", ["model.init=random"]),
}
Train = Callable[..., ParityResult]
MasksOf = Callable[[str], ParityRun]


def shrunken(kind: str, *, steps: int = 3, drops: bool = False) -> Recipe:
    name, overrides = RECIPES[kind]
    return for_comparison(shrink(load_recipe(name, [*overrides, "precision=fp32"])), steps=steps, dropout=drops)


@pytest.fixture(scope="module")
def baselines(ranks: Callable[..., list[Any]]) -> dict[str, ParityRun]:
    """One plain process for each recipe, before any fault is in."""
    return {
        kind: ranks(train_in_memory, 1, Strategy.parse("reference").apply(shrunken(kind), 1))[0] for kind in RECIPES
    }


@pytest.fixture
def train(baselines: dict[str, ParityRun], ranks: Callable[..., list[Any]]) -> Train:
    """train("z1") trains the shrunken recipe on two ranks and holds it against the baseline."""

    def run(text: str, kind: str = "text") -> ParityResult:
        strategy = Strategy.parse(text)
        recipe = strategy.apply(shrunken(kind), 2)
        result = ParityResult.of(ranks(train_in_memory, strategy.world_size(2), recipe)[0], baselines[kind])
        print(result)  # shown where a test fails
        return result

    return run


@pytest.fixture
def masks_of(ranks: Callable[..., list[Any]]) -> MasksOf:
    """masks_of("tp2") trains the shrunken text recipe with dropout."""

    def run(text: str) -> ParityRun:
        strategy = Strategy.parse(text)
        recipe = strategy.apply(shrunken("text", steps=2, drops=True), 2)
        first: ParityRun = ranks(train_in_memory, strategy.world_size(2), recipe)[0]
        print(*first.mask_faults, sep="\n")  # shown where a test fails
        return first

    return run


def assert_cause(result: ParityResult, cause: Cause, *words: str) -> None:
    assert not result.passed
    assert result.diagnosis is not None
    assert result.diagnosis.cause == cause, result.diagnosis
    for word in words:
        assert word in str(result.diagnosis)


class TestSamples:
    @pytest.mark.parametrize("kind", RECIPES)
    def test_a_recipe_of_any_format_can_be_shrunk(self, kind: str) -> None:
        recipe = shrunken(kind)
        assert recipe_problems(recipe) == []
        # Documents that do not attend to each other stay so.
        assert recipe.data.masks_documents == (kind == "chat")

    @pytest.mark.parametrize("kind", RECIPES)
    @pytest.mark.parametrize(("size", "replicas"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)])
    def test_micro_batches_and_ranks_have_unequal_numbers_of_targets(self, kind: str, size: int, replicas: int) -> None:
        recipe = shrunken(kind)
        samples = training_samples(recipe, prepare_all(recipe.data, progress=False))
        counts = np.array([samples.target_count(0, [place]) for place in range(recipe.batch.global_batch_size)])
        split = Split(samples=len(counts), micro_batch_size=size, replicas=replicas)
        assert len(set(np.bincount(split.micro_batches, weights=counts))) > 1
        assert len(set(np.bincount(split.ranks, weights=counts))) > 1 or replicas == 1

    @pytest.mark.parametrize("kind", RECIPES)
    @pytest.mark.parametrize("strategy", ["z1", "pp2"])
    def test_what_trains_right_is_the_same(self, train: Train, kind: str, strategy: str) -> None:
        train(strategy, kind).check()


class TestHowMuchASampleCounts:
    @pytest.mark.parametrize("kind", RECIPES)
    def test_a_mean_of_micro_batch_means(self, train: Train, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        monkeypatch.setattr(DataParallelEngine, "train_step", _step_of_means)
        assert_cause(train("z1", kind), Cause.TOKEN_WEIGHTING, "mean of the micro-batches' mean losses")

    @pytest.mark.parametrize("kind", RECIPES)
    def test_a_mean_over_ranks(self, train: Train, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        monkeypatch.setattr(DataParallelEngine, "train_step", _step_of_rank_means)
        assert_cause(train("z1", kind), Cause.TOKEN_WEIGHTING, "mean of the data-parallel ranks' mean losses")

    def test_a_mean_of_micro_batches_in_a_pipeline(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        weighted = PipelineEngine._loss

        def mean(engine: PipelineEngine, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return weighted(engine, output, labels) / engine._scale / (labels != IGNORE).sum()

        monkeypatch.setattr(PipelineEngine, "_loss", mean)
        # The reported loss stays right: it is summed before.
        assert_cause(
            train("pp2"), Cause.TOKEN_WEIGHTING, "mean of the micro-batches' mean gradients", "reported loss is right"
        )

    def test_a_micro_batch_that_counts_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _scale_micro_batches(monkeypatch, lambda number, rank: 2.0 if number == 1 else 1.0)
        assert_cause(train("z1"), Cause.ACCUMULATION, "micro-batch 1 counts once, micro-batch 2 counts 2 times")

    def test_a_micro_batch_whose_gradient_is_lost(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _scale_micro_batches(monkeypatch, lambda number, rank: 0.0 if number == 0 else 1.0)
        assert_cause(train("z2"), Cause.ACCUMULATION, "micro-batch 1 does not count")

    def test_ranks_that_do_not_count_alike(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        _scale_micro_batches(monkeypatch, lambda number, rank: 2.0 - 2.0 * rank)
        assert_cause(
            train("z2"),
            Cause.ALL_REDUCE,
            "data-parallel rank 0 counts 2 times, data-parallel rank 1 does not count",
        )


class TestLabels:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda labels: labels.flip(0), "a micro-batch's samples in reverse order"),
            (lambda labels: labels.flip(1), "a sample's positions in reverse order"),
            (lambda labels: labels.roll(1, 0), "the previous sample of the micro-batch"),
            (
                lambda labels: torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1),
                "shifted twice",
            ),
        ],
    )
    @pytest.mark.parametrize("strategy", ["z1", "tp2"])
    def test_labels_in_another_order(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, strategy: str, change: Any, words: str
    ) -> None:
        compute = LossInHead.compute

        def wrongly(loss: LossInHead, *arguments: Any) -> torch.Tensor:
            assert loss.labels is not None
            loss.labels = change(loss.labels).contiguous()
            return compute(loss, *arguments)

        monkeypatch.setattr(LossInHead, "compute", wrongly)
        assert_cause(train(strategy), Cause.LABELS, words)

    def test_labels_of_another_micro_batch_in_a_pipeline(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        run = PipelineEngine._run

        def behind(engine: PipelineEngine, micro_batches: Any, **options: Any) -> None:
            labels = [micro_batch.labels for micro_batch in micro_batches]
            for micro_batch, wrong in zip(micro_batches, labels[1:] + labels[:1], strict=True):
                object.__setattr__(micro_batch, "labels", wrong)
            run(engine, micro_batches, **options)

        monkeypatch.setattr(PipelineEngine, "_run", behind)
        assert_cause(train("pp2"), Cause.LABELS, "those of the next micro-batch")


def _step_of_means(engine: Any, micro_batches: Any, *, target_tokens: int, learning_rate: float) -> Any:
    """A step that averages the mean losses of its micro-batches."""
    total = torch.zeros(1, dtype=torch.float64)
    for micro_batch in micro_batches:
        mean = engine._losses(engine._run(micro_batch), micro_batch)[0] / (micro_batch.labels != IGNORE).sum()
        engine._backward(mean / engine.accumulation)
        total += mean.detach() / engine.accumulation / engine.dp
    dist.all_reduce(total)
    return engine._finish_step(total, total, target_tokens=1, learning_rate=learning_rate)


def _step_of_rank_means(engine: Any, micro_batches: Any, *, target_tokens: int, learning_rate: float) -> Any:
    """A step that averages the mean losses of its ranks."""
    every = list(micro_batches)
    targets = sum(int((micro_batch.labels != IGNORE).sum()) for micro_batch in every)
    total = torch.zeros(1, dtype=torch.float64)
    for micro_batch in every:
        share = engine._losses(engine._run(micro_batch), micro_batch)[0] / targets
        engine._backward(share)
        total += share.detach() / engine.dp
    dist.all_reduce(total)
    return engine._finish_step(total, total, target_tokens=1, learning_rate=learning_rate)


def _scale_micro_batches(monkeypatch: pytest.MonkeyPatch, factor: Callable[[int, int], float]) -> None:
    """Scale the gradient of each micro-batch, by its number in the step and its rank; the loss stays as it is."""
    backward = DeepSpeedEngine._backward
    done = [0]

    def scaled(engine: DeepSpeedEngine, loss: torch.Tensor) -> None:
        number = done[0] % engine.accumulation
        done[0] += 1
        backward(engine, loss * factor(number, dist.get_rank()))

    monkeypatch.setattr(DeepSpeedEngine, "_backward", scaled)


class TestDropout:
    """No curve shows it, because layouts draw other masks anyway: masks are compared by what they are applied to."""

    @pytest.mark.parametrize(
        "strategy", ["z1", "z1-recompute", "tp2", "tp2-sp", "tp2-sp-recompute", "pp2-tp2", "u2", "reference", "fsdp"]
    )
    def test_no_alarm_is_raised(self, masks_of: MasksOf, strategy: str) -> None:
        run = masks_of(strategy)
        assert run.masks_compared > 0
        assert run.mask_faults == ()

    def test_one_stream_for_the_heads_of_all_tensor_parallel_ranks(
        self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(region, "_GOLDEN", 0)
        (fault,) = masks_of("tp2").mask_faults
        assert fault.startswith("ranks 0 and 1 draw the same masks for different activations in transformer.h.0")

    def test_one_stream_for_the_positions_of_all_ranks_under_sequence_parallelism(
        self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DropoutStream, "_seed_rank", lambda *_: None)
        monkeypatch.setattr(dropout, "derive_seed", lambda *parts: derive_seed(*parts[:-1], 0))
        faults = masks_of("tp2-sp").mask_faults
        assert any(fault.startswith("ranks 0 and 1 draw the same masks for different") for fault in faults)

    def test_one_stream_for_all_replicas(self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch) -> None:
        start = DropoutStream.start
        monkeypatch.setattr(DropoutStream, "start", lambda stream, seed: start(stream, 7))
        faults = masks_of("z1").mask_faults
        assert any(fault.startswith("ranks 0 and 1 draw the same masks") for fault in faults)
        assert any(fault.startswith("rank 0 draws the same masks for micro-batches 1 and 2 in") for fault in faults)
        assert any(fault.startswith("rank 0 draws the same masks in steps 1 and 2 in") for fault in faults)

    def test_replicated_activations_that_tensor_parallel_ranks_drop_differently(
        self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = DropoutStream.start
        monkeypatch.setattr(DropoutStream, "start", lambda stream, seed: start(stream, seed + dist.get_rank()))
        faults = masks_of("tp2").mask_faults
        assert any("ranks 0 and 1 draw different masks where they must agree" in fault for fault in faults)

    def test_recomputation_that_draws_other_masks(self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch) -> None:
        enable = PreTrainedModel.gradient_checkpointing_enable

        def careless(model: PreTrainedModel, gradient_checkpointing_kwargs: Any = None) -> None:
            enable(model, {**(gradient_checkpointing_kwargs or {}), "preserve_rng_state": False})

        monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", careless)
        faults = masks_of("z1-recompute").mask_faults
        assert any(fault.startswith("rank 0 draws other masks when it recomputes transformer.h") for fault in faults)

    def test_a_comparison_names_it(self, masks_of: MasksOf, monkeypatch: pytest.MonkeyPatch) -> None:
        right = masks_of("z1")
        monkeypatch.setattr(region, "_GOLDEN", 0)
        result = ParityResult.of(masks_of("tp2"), right, Bounds.fixed(1.0))
        assert result.failed_checks == {"dropout"}
        assert_cause(result, Cause.DROPOUT, "ranks 0 and 1 draw the same masks", "check from what each rank seeds")


class TestOtherFaults:
    """Mistakes that people make with DeepSpeed and Megatron-LM."""

    def test_a_tied_gradient_that_is_summed_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        reduce = DeepSpeedPipeline._exec_reduce_tied_grads

        def twice(engine: Any) -> None:
            reduce(engine)
            reduce(engine)

        monkeypatch.setitem(DeepSpeedPipeline._INSTRUCTION_MAP, ReduceTiedGrads, twice)
        result = train("pp2")
        assert_cause(result, Cause.TYING, "2 times")

    def test_a_schedule_that_advances_with_micro_batches(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = TrainingRun.__init__

        def by_micro_batch(run: TrainingRun, *arguments: Any, **keywords: Any) -> None:
            begin(run, *arguments, **keywords)
            rate = run.learning_rate
            run.learning_rate = lambda step: rate(min(step * run.job.batch.accumulation, run.recipe.train.steps - 1))

        monkeypatch.setattr(TrainingRun, "__init__", by_micro_batch)
        assert_cause(train("z1"), Cause.SCHEDULE, "step 2")

    @pytest.mark.parametrize("kind", RECIPES)
    def test_positions_that_start_again_in_each_slice(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        slices = UlyssesEngine._local_micro_batch

        def restarted(engine: UlyssesEngine, micro_batch: Any) -> Any:
            local = slices(engine, micro_batch)
            assert local.position_ids is not None
            positions = torch.arange(local.input_ids.shape[1]).expand_as(local.position_ids)
            return replace(local, position_ids=positions.contiguous())

        monkeypatch.setattr(UlyssesEngine, "_local_micro_batch", restarted)
        assert_cause(train("u2", kind), Cause.POSITIONS)

    def test_gradients_that_are_not_zeroed(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        step = ReferenceEngine.train_step
        kept: dict[int, torch.Tensor] = {}

        def adding(engine: ReferenceEngine, *arguments: Any, **keywords: Any) -> Any:
            for number, parameter in enumerate(engine.model.parameters()):
                if number in kept:
                    parameter.grad = kept[number]
            before = engine.before_update

            def keep() -> None:
                before()
                for number, parameter in enumerate(engine.model.parameters()):
                    if parameter.grad is not None:
                        kept[number] = parameter.grad.clone()

            engine.before_update = keep
            result = step(engine, *arguments, **keywords)
            engine.before_update = before
            return result

        monkeypatch.setattr(ReferenceEngine, "train_step", adding)
        assert_cause(
            train("reference"), Cause.ACCUMULATION, "that of step 2 is the right one plus 1 times that of step 1"
        )

    def test_a_forward_pass_in_bf16(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = DeepSpeedEngine._forward

        def lower(engine: DeepSpeedEngine, batch: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(engine, batch)

        monkeypatch.setattr(DeepSpeedEngine, "_forward", lower)
        assert_cause(train("z1"), Cause.PRECISION)
