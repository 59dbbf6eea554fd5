"""No false alarm: harmless changes pass within the bounds that `dstk compare` measures.

Fifty of them: micro-batches, ranks, communication buckets, recomputing, attention kernels, ZeRO stages and their like.
"""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.parity import Bounds, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.training import train as training

STEPS = 20
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"overrides__vocab_size": 321},
    "llama": {
        "model": {
            "name_or_path": "llama-tiny",
            "overrides": {
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "intermediate_size": 96,
                "vocab_size": 321,
                "num_key_value_heads": 2,
            },
        }
    },
}
HARMLESS = (
    *("reference-m1", "reference-m2", "reference-m8", "reference-m16", "reference-recompute"),
    *("dp1-z0", "dp1-z3-m1", "z0-m2", "z1-m8", "z2-m1", "z3-m2", "dp4-z1", "dp4-z2-m1", "dp4-z3"),
    *("z1-recompute", "z3-recompute", "ddp-m1", "fsdp-m2", "ddp-dp4"),
    *("tp2-z1-m1", "tp2-sp", "tp2-recompute", "pp2-m1", "tp4-z2"),
)
BUCKETS = (64, 1_000, 50_000)
DAILY = {"reference-m1", "dp4-z2-m1", "tp2-sp", "pp2-m1"}


def changes(model: str) -> dict[str, Any]:
    return MODELS[model] | {
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "train__steps": STEPS,
        "train__grad_clip": 0.2,
        "data__packing": "padded",
    }


@pytest.fixture(scope="module")
def baseline(
    make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> Callable[[str], tuple[ParityRun, Bounds]]:
    """As `dstk compare` makes it: the reference, three other ways to round, another micro-batch."""
    known: dict[str, tuple[ParityRun, Bounds]] = {}

    def of(model: str) -> tuple[ParityRun, Bounds]:
        if model not in known:
            recipe = make_recipe(**changes(model), train__engine="reference")
            first = ranks(train_in_memory, 1, recipe)[0]
            reruns = [ranks(_rounded, 1, recipe, seed)[0] for seed in (1, 2, 3)]
            reruns.append(ranks(train_in_memory, 1, Strategy.parse("reference-m1").apply(recipe, 1))[0])
            known[model] = first, Bounds.measured(first, reruns)
        return known[model]

    return of


def _rounded(recipe: Recipe, seed: int) -> ParityRun:
    return train_in_memory(recipe, rounding_seed=seed)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.whole]) for name in HARMLESS]
)
def test_a_harmless_strategy_passes(
    name: str,
    model: str,
    baseline: Callable[[str], tuple[ParityRun, Bounds]],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes(model)), 2)
    result = ParityResult.of(ranks(train_in_memory, strategy.world_size(2), recipe)[0], *baseline(model))
    assert result.passed, str(result)


@pytest.mark.parametrize("size", BUCKETS)
def test_any_bucket_size_passes(
    size: int,
    baseline: Callable[[str], tuple[ParityRun, Bounds]],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = training.deepspeed_config

    def with_buckets(*arguments: Any) -> Any:
        found = config(*arguments)
        found["zero_optimization"] |= {"reduce_bucket_size": size, "allgather_bucket_size": size}
        return found

    first, bounds = baseline("gpt2")
    monkeypatch.setattr(training, "deepspeed_config", with_buckets)
    result = ParityResult.of(
        ranks(train_in_memory, 2, make_recipe(**changes("gpt2"), parallel={"zero_stage": 2}))[0], first, bounds
    )
    assert result.passed, str(result)


def test_there_are_fifty_harmless_changes() -> None:
    assert len(HARMLESS) * len(MODELS) + len(BUCKETS) >= 50
