"""Hugging Face's Trainer as a strategy: what it trains is held against one process, right and with known mistakes.

The mistakes are of kinds that were reported: losses that count tensor-parallel copies (transformers #39674), clipping
by a part of the norm where gradients live on several meshes (accelerate #4219, Automodel #3817), parameters that ranks
share and whose gradients they do not sum or sum too often (Megatron-LM #7452), experts whose gradients are divided by
too few ranks (Megatron-LM #5956), parameters that tensor-parallel ranks hold as copies and update apart (Automodel
#3822).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.parity import Cause, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.run.trainer_run import ObservedTrainer, _Updates, train_with_transformers

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 322,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"name_or_path": "llama-tiny", "overrides": SMALL | {"head_dim": 12, "intermediate_size": 96}},
    "tied llama": {
        "name_or_path": "llama-tiny",
        "overrides": SMALL | {"head_dim": 12, "intermediate_size": 96, "tie_word_embeddings": True, "vocab_size": 321},
    },
    "qwen3_moe": {
        "name_or_path": "qwen3-30b-a3b",
        "overrides": SMALL
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96},
    },
}
STEPS = 4
Compare = Callable[..., ParityResult]


def changes(model: str) -> dict[str, Any]:
    return {
        "model": MODELS[model],
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        "schedule": {"name": "constant"},
        "train__steps": STEPS,
        # Below every norm of a gradient, so that each step is clipped.
        "train__grad_clip": 0.2,
        "data__packing": "padded",
        "batch__micro_batch_size": 4,
    }


@pytest.fixture(scope="module")
def baseline(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]) -> Callable[[str], ParityRun]:
    runs: dict[str, ParityRun] = {}

    def run(model: str) -> ParityRun:
        if model not in runs:
            runs[model] = ranks(train_in_memory, 1, make_recipe(**changes(model), train__engine="reference"))[0]
        return runs[model]

    return run


@pytest.fixture
def compare(
    baseline: Callable[[str], ParityRun],
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> Compare:
    """compare("llama", "trainer:tp2", 2) trains on two ranks and holds them against one process of ours."""

    def run(model: str, text: str, world_size: int) -> ParityResult:
        reference = baseline(model)
        (strategy,) = Strategy.parse_list(text)
        recipe = strategy.apply(make_recipe(**changes(model)), world_size)
        result = ParityResult.of(ranks(train_with_transformers, world_size, recipe, strategy, tmp_path)[0], reference)
        print(result)
        return result

    return run


@pytest.mark.parametrize(
    ("model", "text", "world_size"),
    [
        pytest.param("llama", "trainer:ddp", 2, marks=pytest.mark.whole),
        pytest.param("llama", "trainer:fsdp2", 2, marks=pytest.mark.whole),
        ("llama", "trainer:tp2", 2),
        pytest.param("llama", "trainer:fsdp2-tp2", 4, marks=pytest.mark.whole),
        pytest.param("qwen3_moe", "trainer:ep2", 2, marks=pytest.mark.whole),
    ],
)
def test_the_trainer_trains_what_one_process_trains(compare: Compare, model: str, text: str, world_size: int) -> None:
    compare(model, text, world_size).check(has_replicas=text in ("trainer:ddp", "trainer:tp2"))


@pytest.mark.whole
def test_tied_embeddings_under_fsdp2_compute_with_stale_weights(compare: Compare) -> None:
    """Not planted: so transformers 5.23 trains a vocabulary that the ranks do not divide."""
    result = compare("tied llama", "trainer:fsdp2", 2)
    assert result.diagnosis is not None
    assert result.diagnosis.cause == Cause.STALE


@pytest.mark.whole
class TestPlantedFaults:
    def test_a_loss_that_counts_tensor_parallel_copies(self, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Trainer, "get_tp_size", lambda trainer: 1)
        monkeypatch.setattr(Trainer, "_get_num_items_in_batch", divided_by(Trainer._get_num_items_in_batch, 2))
        result = compare("llama", "trainer:tp2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.SCALING

    def test_clipping_by_the_norm_of_one_mesh(self, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Trainer, "_mixed_mesh_grad_norm", clip_by_shards_alone)
        result = compare("llama", "trainer:tp2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.CLIPPING

    def test_clipping_of_experts_by_the_norm_of_this_rank(
        self, compare: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Trainer, "_mixed_mesh_grad_norm", clip_by_local_experts)
        result = compare("qwen3_moe", "trainer:ep2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.CLIPPING

    def test_norms_whose_gradients_ranks_sum_twice(self, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Trainer, "create_optimizer", doubling_norms(Trainer.create_optimizer))
        result = compare("llama", "trainer:tp2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.ALL_REDUCE

    def test_experts_whose_gradients_are_as_many_times_too_large_as_ranks_share_them_out(
        self, compare: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ObservedTrainer, "_clip_grad_norm", doubling_experts(ObservedTrainer._clip_grad_norm))
        result = compare("qwen3_moe", "trainer:ep2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.EXPERTS

    def test_copies_that_differ_at_first(self, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_Updates, "on_train_begin", moving_norms(_Updates.on_train_begin))
        result = compare("llama", "trainer:tp2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.INITIAL_WEIGHTS
        assert "model.norm.weight" in result.run.diverged_at_start

    def test_norms_that_drift_apart_on_tensor_parallel_ranks(
        self, compare: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Trainer, "create_optimizer", drifting_norms(Trainer.create_optimizer))
        result = compare("llama", "trainer:tp2", 2)
        assert result.diagnosis is not None
        assert result.diagnosis.cause == Cause.REPLICAS
        assert "model.norm.weight" in result.run.diverged


def divided_by(function: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """The right number of target tokens where the Trainer is made to forget tensor parallelism."""

    def counted(*arguments: Any) -> Any:
        return function(*arguments) / ranks

    return counted


def clip_by_shards_alone(trainer: Any, model: Any, max_norm: float) -> torch.Tensor:
    """Clip by the norm of the gradients that are DTensors, and leave the others out of it."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([gradient for gradient in gradients if isinstance(gradient, DTensor)])
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).item())
    return norm


def clip_by_local_experts(trainer: Any, model: Any, max_norm: float) -> torch.Tensor:
    """Clip by a norm that has the experts of this rank alone."""
    squares = torch.zeros(())
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    for name, gradient in gradients:
        is_expert = "experts" in name
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        square = local.square().sum()
        if isinstance(gradient, DTensor) and not is_expert:
            dist.all_reduce(square)
        squares += square
    norm = squares.sqrt()
    for _, gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).item())
    return norm


def doubling_experts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Double the gradients of experts before they are clipped, as a mean over the wrong ranks leaves them.

    Hooks of these parameters never run: transformers computes with the tensor inside of the DTensor.
    """

    def clip(trainer: Any, model: Any) -> Any:
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.grad.mul_(2)
        return function(trainer, model)

    return clip


def doubling_norms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Double the gradients of norms, as if ranks that compute all of it each had summed them."""

    def create(trainer: Any, *arguments: Any) -> Any:
        for name, parameter in trainer.model.named_parameters():
            if "norm" in name:
                parameter.register_hook(lambda gradient: 2 * gradient)
        return function(trainer, *arguments)

    return create


def moving_norms(function: Callable[..., None]) -> Callable[..., None]:
    """Let training begin with other norms on rank 1, as if each rank drew the copies that it holds."""

    @torch.no_grad()
    def begin(callback: Any, *arguments: Any, **keywords: Any) -> None:
        for name, parameter in keywords["model"].named_parameters():
            if "norm" in name and dist.get_rank() == 1:
                parameter.add_(0.05)
        function(callback, *arguments, **keywords)

    return begin


def drifting_norms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Move the norms of rank 1 after each update, as if the ranks updated their copies by other gradients."""

    def create(trainer: Any, *arguments: Any) -> Any:
        optimizer = function(trainer, *arguments)
        norms = [parameter for name, parameter in trainer.model.named_parameters() if "norm" in name]

        @torch.no_grad()
        def drift(optimizer: Any, arguments: Any, options: Any) -> None:
            for parameter in norms:
                parameter.add_(1e-3)

        if dist.get_rank() == 1:
            optimizer.register_step_post_hook(drift)
        return optimizer

    return create
