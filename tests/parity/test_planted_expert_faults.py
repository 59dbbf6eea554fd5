"""Known mistakes of expert parallelism, put in one by one: what raises the alarm, and the cause that is named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.engines import deepspeed_patches
from toolkit.engines.routing import Routing
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.experts import dispatch, sharding
from toolkit.parallel.shard import shard_of
from toolkit.parallel.tensor import collectives
from toolkit.parity import Cause, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

MIXTRAL = {
    "name_or_path": "mixtral-8x7b",
    "router_aux_loss": {"coefficient": 0.5},
    "overrides": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "vocab_size": 321,
        "max_position_embeddings": 64,
    },
}
Train = Callable[..., ParityResult]


def changes(**more: Any) -> dict[str, Any]:
    return {
        "model": MIXTRAL,
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        "schedule": {"name": "constant"},
        "train__steps": 3,
        "train__grad_clip": 0.2,
        "data__packing": "padded",
        # A mean over micro-batches, so it depends on their size.
        "batch__micro_batch_size": 4,
    } | more


@pytest.fixture(scope="module")
def baseline(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> ParityRun:
    run: ParityRun = ranks(train_in_memory, 1, make_recipe(**changes(train__engine="reference")))[0]
    return run


@pytest.fixture
def train(baseline: ParityRun, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Train:
    """train(ep=2) trains on two ranks and holds them against the baseline, which balances its experts."""

    def run(**parallel: Any) -> ParityResult:
        dp = parallel.get("ep", 1)
        recipe = make_recipe(**changes(parallel={"zero_stage": 1, "dp": dp} | parallel))
        runs = ranks(train_in_memory, dp * parallel.get("tp", 1), recipe)
        result = ParityResult.of(runs[0], baseline)
        print(result)
        return result

    return run


def named(result: ParityResult) -> tuple[Cause | None, str]:
    """The cause that the diagnosis names, and its sentence."""
    found = result.diagnosis
    return (found.cause, found.sentence) if found else (None, "")


def test_no_alarm_is_raised_without_a_fault(train: Train) -> None:
    train(ep=2).check()


class TestGradients:
    def test_experts_scaled_by_the_number_of_expert_parallel_ranks(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group = sharding.ExpertSharder._group

        def scaled(sharder: Any, parameter: Any) -> None:
            group(sharder, parameter)
            parameter.register_hook(lambda gradient: 2 * gradient)

        monkeypatch.setattr(sharding.ExpertSharder, "_group", scaled)
        cause, says = named(train(ep=2))
        assert cause == Cause.EXPERTS
        assert "all 2 times" in says

    @pytest.mark.whole
    def test_experts_that_deepspeed_takes_for_replicas(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharding.ExpertSharder, "_group", lambda *_: None)
        cause, says = named(train(ep=2))
        assert cause == Cause.EXPERTS
        assert "start from other weights" in says

    def test_routers_that_know_the_gradient_of_their_own_ranks_experts_only(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without = SimpleNamespace(**vars(collectives) | {"copy_to_tensor_ranks": lambda x, group: x})
        monkeypatch.setattr(dispatch, "c", without)
        result = train(tp=2)
        assert named(result)[0] == Cause.ROUTER
        assert any("mlp.gate" in name for name in result.run.diverged)


class TestAuxiliaryLoss:
    @pytest.mark.parametrize("factor", [0, pytest.param(2, marks=pytest.mark.whole)])
    def test_one_that_is_missing_or_has_another_factor(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, factor: int
    ) -> None:
        loss = Routing.loss
        monkeypatch.setattr(Routing, "loss", lambda routing: factor * loss(routing))
        result = train(ep=2)
        assert named(result)[0] == Cause.BALANCING
        assert result.wrong_gradients >= {row.name for row in result.gradients if ".gate." in row.name}


class TestExchange:
    def test_rows_that_come_in_another_order(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        exchange = dispatch.exchange
        monkeypatch.setattr(dispatch, "exchange", lambda *arguments: exchange(*arguments).roll(1, 0))
        cause, says = named(train(ep=2))
        assert cause == Cause.EXPERTS
        assert "another order" in says

    @pytest.mark.whole
    def test_weights_of_the_router_that_are_applied_twice(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = dispatch.ShardedExperts.forward

        def twice(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return forward(experts, hidden, index, weights * weights.detach())

        monkeypatch.setattr(dispatch.ShardedExperts, "forward", twice)
        cause, says = named(train(ep=2))
        assert cause == Cause.EXPERTS
        assert "applied twice" in says


class TestNorm:
    def test_one_that_counts_no_experts(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = ModelPartition.counts
        without = lambda partition, p: counts(partition, p) and not shard_of(p).over_experts  # noqa: E731
        monkeypatch.setattr(ModelPartition, "counts", without)
        cause, says = named(train(ep=2, zero_stage=0))
        assert cause == Cause.CLIPPING
        assert "counts no experts" in says

    @pytest.mark.whole
    def test_one_that_is_a_mean_over_ranks(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed_patches, "fix_gradient_norms", lambda engine, partition: None)
        result = train(ep=2, zero_stage=0)
        assert named(result)[0] == Cause.CLIPPING

    @pytest.mark.whole
    def test_experts_without_the_mark_of_tensor_parallelism(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mark = sharding.mark

        def unmarked(parameter: Any, shard: Any) -> Any:
            found = mark(parameter, shard)
            found.tensor_model_parallel = found.model_parallel = False
            return found

        monkeypatch.setattr(sharding, "mark", unmarked)
        cause, says = named(train(tp=2))
        assert cause == Cause.CLIPPING
        assert "of one of 2 ranks" in says
