"""Mistakes that any engine can make, planted one by one under ZeRO and DDP: each is found and diagnosed.

Those of tensor parallelism and pipelines are in test_planted_faults.py. The runs are compared as in `dstk compare`,
with bounds measured by reruns of the baseline.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_faults import forget_moments

from toolkit.config.recipe import OptimizerSection
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.samples import Samples
from toolkit.engines import accelerate_engine, deepspeed_engine, deepspeed_patches
from toolkit.engines.base import Engine, Update
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.parallel.loss import IGNORE
from toolkit.parity import Bounds, Cause, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.training import train as training

STEPS = 8
Train = Callable[..., ParityResult]


def changes(optimizer: str = "adamw", **more: Any) -> dict[str, Any]:
    rates = {"adamw": 3e-4, "sgd": 0.1}
    return {
        "optimizer": {"name": optimizer, "lr": rates[optimizer], "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "train__steps": STEPS,
        "train__grad_clip": 0.2,
        "data__packing": "padded",
        "overrides__vocab_size": 321,
    } | more


@pytest.fixture(scope="module")
def baselines(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> dict[str, tuple[ParityRun, Bounds]]:
    """One plain process for each optimizer, and what rounding does to it; before any fault is in."""
    found = {}
    for optimizer in ("adamw", "sgd"):
        recipe = make_recipe(**changes(optimizer, train__engine="reference", batch__micro_batch_size=4))
        first = ranks(train_in_memory, 1, recipe)[0]
        reruns = [ranks(_rounded, 1, recipe, seed)[0] for seed in (1, 2)]
        found[optimizer] = (first, Bounds.measured(first, reruns))
    return found


def _rounded(recipe: Any, seed: int) -> ParityRun:
    return train_in_memory(recipe, rounding_seed=seed)


@pytest.fixture
def train(
    baselines: dict[str, tuple[ParityRun, Bounds]], make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> Train:
    """train("sgd", zero_stage=2) trains on two ranks and holds them against the baseline."""

    def run(optimizer: str = "adamw", engine: str = "deepspeed", **parallel: Any) -> ParityResult:
        recipe = make_recipe(**changes(optimizer, train__engine=engine, parallel=parallel))
        result = ParityResult.of(ranks(train_in_memory, 2, recipe)[0], *baselines[optimizer])
        print(result)  # shown where a test fails
        return result

    return run


def assert_cause(result: ParityResult, cause: Cause, *words: str) -> None:
    """The mistake was found, and the sentence says what it should."""
    assert not result.passed
    assert result.diagnosis is not None
    assert result.diagnosis.cause == cause, result.diagnosis
    for word in words:
        assert word in str(result.diagnosis)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("how", [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_a_correct_run_has_no_diagnosis(train: Train, optimizer: str, how: dict[str, int]) -> None:
    result = train(optimizer, **how)
    assert result.passed
    assert result.diagnosis is None
    assert result.run.replicas_compared > 0 or how == {"zero_stage": 3}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_gradients_summed_over_ranks_instead_of_averaged(
    train: Train, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    backward = DeepSpeedEngine._backward
    monkeypatch.setattr(DeepSpeedEngine, "_backward", lambda engine, loss: backward(engine, loss * engine.dp))
    assert_cause(train(optimizer, zero_stage=1), Cause.SCALING, "2 times")


def test_a_loss_divided_by_the_accumulation_once_more(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = DeepSpeedEngine._backward
    monkeypatch.setattr(DeepSpeedEngine, "_backward", lambda engine, loss: backward(engine, loss / engine.accumulation))
    assert_cause(train("sgd", zero_stage=2), Cause.SCALING, "0.5 times", "1/2")


def test_micro_batches_with_equal_weights(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataParallelEngine, "train_step", _step_of_means)
    assert_cause(train("sgd", zero_stage=1), Cause.TOKEN_WEIGHTING, "mean of the micro-batches' mean losses")


def _step_of_means(engine: Any, micro_batches: Any, *, target_tokens: int, learning_rate: float) -> Any:
    """A step that averages the mean losses of its micro-batches."""
    total = torch.zeros(1, dtype=torch.float64)
    for micro_batch in micro_batches:
        mean = engine._losses(engine._run(micro_batch), micro_batch)[0] / (micro_batch.labels != IGNORE).sum()
        engine._backward(mean / engine.accumulation)
        total += mean.detach() / engine.accumulation / engine.dp
    torch.distributed.all_reduce(total)
    return engine._finish_step(total, total, target_tokens=1, learning_rate=learning_rate)


def test_every_replica_reading_the_same_samples(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = MicroBatchLoader._positions

    def of_the_first(loader: MicroBatchLoader, accumulation_step: int) -> range:
        start = loader.batch.block_start(accumulation_step=accumulation_step, data_rank=0)
        return range(start, start + len(positions(loader, accumulation_step)))

    monkeypatch.setattr(MicroBatchLoader, "_positions", of_the_first)
    assert_cause(train(zero_stage=1), Cause.DATA_ORDER, "step 1")


def test_samples_in_another_order_from_some_step_on(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Samples.batch
    monkeypatch.setattr(Samples, "batch", lambda own, step, at, **seed: batch(own, step + (step > 4), at, **seed))
    assert_cause(train(zero_stage=1), Cause.DATA_ORDER, "step 6")


def test_weights_of_another_seed(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    create = training.create_engine

    def reseeded(job: Any, *arguments: Any, **options: Any) -> Engine:
        other = job.recipe.model_copy(update={"train": job.recipe.train.model_copy(update={"seed": 7})})
        return create(replace(job, recipe=other), *arguments, **options)

    monkeypatch.setitem(train_in_memory.__kwdefaults__, "engine_factory", reseeded)
    assert_cause(train(zero_stage=1), Cause.INITIAL_WEIGHTS, "seed")


def test_one_layer_that_is_frozen(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    build = deepspeed_engine.parameter_groups

    def frozen(named_parameters: Any, section: Any) -> Any:
        named = list(named_parameters)
        for name, parameter in named:
            if ".h.1." in name:
                parameter.register_hook(torch.zeros_like)
        return build(named, section)

    monkeypatch.setattr(deepspeed_engine, "parameter_groups", frozen)
    assert_cause(train(zero_stage=0), Cause.SHARD, "only layer 1")


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_weight_decay_on_norms_and_biases(train: Train, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    for module in (deepspeed_engine, accelerate_engine):
        monkeypatch.setattr(module, "parameter_groups", _one_group)
    assert_cause(
        train(engine=engine, zero_stage=1 if engine == "deepspeed" else 0), Cause.WEIGHT_DECAY, "norms and biases"
    )


def _one_group(named_parameters: Any, section: Any) -> Any:
    return [{"params": [parameter for _, parameter in named_parameters], "weight_decay": section.weight_decay}]


def test_no_weight_decay_at_all(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        deepspeed_engine, "parameter_groups", lambda named, _: _one_group(named, OptimizerSection(lr=1))
    )
    assert_cause(train(zero_stage=1), Cause.WEIGHT_DECAY, "multiple of the weights")


def test_a_scheduler_of_the_engines_own(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rate = DeepSpeedEngine._set_learning_rate
    rates: list[float] = []

    def stepped(engine: DeepSpeedEngine, rate: float) -> None:
        rates.append(rate)
        set_rate(engine, rate if len(rates) < 5 else rate / 2)

    monkeypatch.setattr(DeepSpeedEngine, "_set_learning_rate", stepped)
    assert_cause(train(zero_stage=1), Cause.SCHEDULE, "step 5")


def test_a_gradient_that_is_not_clipped(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    config = training.deepspeed_config

    def unclipped(*arguments: Any) -> Any:
        found = config(*arguments)
        return found and found | {"gradient_clipping": 0.0}

    monkeypatch.setattr(training, "deepspeed_config", unclipped)
    assert_cause(train("sgd", zero_stage=1), Cause.CLIPPING, "times the baseline's everywhere")


def test_a_reported_norm_that_is_not_the_gradients(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = deepspeed_engine.full_grad_norm
    for module in (deepspeed_engine, deepspeed_patches):
        monkeypatch.setattr(
            module, "full_grad_norm", lambda parameters, partition: norm(list(parameters)[:5], partition)
        )
    assert_cause(train(zero_stage=0), Cause.CLIPPING, "gradient norm")


def test_another_beta(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    _optimizer_with(monkeypatch, betas=(0.5, 0.999))
    assert_cause(train(zero_stage=1), Cause.OPTIMIZER, "betas")


def test_another_epsilon(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    _optimizer_with(monkeypatch, eps=1e-3)
    assert_cause(train(zero_stage=1), Cause.OPTIMIZER)


def _optimizer_with(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    config = training.deepspeed_config

    def changed(*arguments: Any) -> Any:
        found = config(*arguments)
        if found is not None:
            found["optimizer"]["params"] |= settings
        return found

    monkeypatch.setattr(training, "deepspeed_config", changed)


def test_moments_that_are_lost_between_steps(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_moments(monkeypatch)
    assert_cause(train(zero_stage=1), Cause.OPTIMIZER, "optimizer state")


def test_a_gradient_that_is_not_finite(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engines stop; one that continues is found by its norm."""
    monkeypatch.setattr(
        deepspeed_patches, "fix_gradient_norms", lambda engine, partition: None
    )  # DeepSpeed clips by its own norm
    monkeypatch.setattr(deepspeed_engine, "full_grad_norm", _nan_norm)
    monkeypatch.setattr(DeepSpeedEngine, "_update", _careless_update)
    assert_cause(train(zero_stage=0), Cause.NOT_FINITE, "gradient norm of step 1")


def _nan_norm(parameters: Any, partition: Any) -> torch.Tensor:
    return torch.tensor(float("nan"))


def _careless_update(engine: DeepSpeedEngine, totals: torch.Tensor) -> Update:
    norm = deepspeed_engine.full_grad_norm(engine.model.parameters(), engine.partition)
    engine.engine.step()
    return Update(totals=totals.tolist(), grad_norm=float(norm))


def test_replicas_that_diverge(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    update = DeepSpeedEngine._update

    def drifting(engine: DeepSpeedEngine, totals: torch.Tensor) -> Any:
        result = update(engine, totals)
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                next(engine.model.parameters()).mul_(1 + 1e-6)
        return result

    monkeypatch.setattr(DeepSpeedEngine, "_update", drifting)
    assert_cause(train(zero_stage=0), Cause.REPLICAS, "diverge")


def test_a_learning_rate_that_amplifies_rounding_is_no_mistake(
    make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    """Against bounds of one step alone, a chaotic run differs; its own reruns show that rounding does that."""
    optimizer = {"name": "adamw", "lr": 0.1, "weight_decay": 0.1}
    wild = changes() | {"optimizer": optimizer, "train__grad_clip": 0.0, "train__steps": 40}
    recipe = make_recipe(**wild, train__engine="reference")
    first = ranks(train_in_memory, 1, recipe)[0]
    other = ranks(train_in_memory, 2, make_recipe(**wild, parallel={"zero_stage": 2}))[0]
    assert_cause(ParityResult.of(other, first), Cause.CHAOS, "cannot tell from rounding at this learning rate")
    reruns = [ranks(_rounded, 1, recipe, seed)[0] for seed in (1, 2, 3)]
    assert ParityResult.of(other, first, Bounds.measured(first, reruns)).passed
