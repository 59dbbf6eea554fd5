"""fp16 where it can be tried without a GPU.

DeepSpeed refuses fp16 on CPUs because they are slow at it, not because PyTorch cannot: the tests lift the refusal.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daily import daily
from nonempty import nonempty

from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve, ParityRun, Tolerance, compare_curves
from toolkit.parity.run.observe import FIRST_LOSS_SCALE, lower_loss_scale
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import UNIT_ROUNDOFF

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


def allow_fp16() -> None:
    import torch
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]


def fp16_trial(recipe: Recipe) -> ParityRun:
    allow_fp16()
    return train_in_memory(recipe)


@pytest.fixture(scope="module")
def fp32_curve(make_recipe: Make, ranks: Ranks) -> LossCurve:
    curve: LossCurve = ranks(train_in_memory, 1, make_recipe(train__engine="reference"))[0].curve
    return curve


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_learns_what_fp32_learns(make_recipe: Make, ranks: Ranks, fp32_curve: LossCurve, stage: int) -> None:
    half = ranks(fp16_trial, 2, make_recipe(parallel={"zero_stage": stage}, precision="fp16"))[0].curve
    # 11 bits of mantissa: a relative rounding of 2^-11 on each value.
    assert half.losses[-1] == pytest.approx(fp32_curve.losses[-1], rel=2**-10)
    assert half.grad_norms[-1] == pytest.approx(fp32_curve.grad_norms[-1], rel=2**-7)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_fp16_overflow_skips_the_step_and_training_goes_on(
    make_recipe: Make, ranks: Ranks, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engines.deepspeed_engine import DeepSpeedEngine

    update, results = DeepSpeedEngine._update, []
    backward, calls = DeepSpeedEngine._backward, []

    def overflowing(self: Any, loss: Any) -> None:
        calls.append(1)
        backward(self, loss * 1e30 if len(calls) == 5 else loss)  # step 3: two micro-batches a step

    def recorded(self: Any, loss: float) -> Any:
        results.append(update(self, loss))
        if len(results) == 5:
            assert [result.skipped for result in results] == [False, False, True, False, False]
        return results[-1]

    monkeypatch.setattr(DeepSpeedEngine, "_backward", overflowing)
    monkeypatch.setattr(DeepSpeedEngine, "_update", recorded)
    recipe = make_recipe(parallel={"zero_stage": stage}, precision="fp16", train__steps=5)
    losses = ranks(fp16_trial, 2, recipe)[0].curve.losses
    assert all(nonempty(map(math.isfinite, losses)))


def first_loss_scale(recipe: Recipe) -> float:
    allow_fp16()
    scales: dict[str, float] = train_in_memory(recipe, inspect=lambda engine: engine.loss_scale()).inspected
    return next(scales[name] for name in ("scale", "cur_scale") if name in scales)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_compared_runs_begin_with_a_loss_scale_that_does_not_overflow(
    make_recipe: Make, ranks: Ranks, stage: int
) -> None:
    """Jais 2 with 2 layers overflows at 65,536 on two replicas, which have twice the gradient each, and not on one."""
    recipe = make_recipe(parallel={"zero_stage": stage}, precision="fp16", train__steps=2)
    assert ranks(first_loss_scale, 2, recipe) == [FIRST_LOSS_SCALE, FIRST_LOSS_SCALE]


def test_a_lower_loss_scale_than_that_stays() -> None:
    loaded: list[Any] = []
    engine: Any = SimpleNamespace(
        loss_scale=lambda: {"cur_scale": 32.0, "cur_iter": 0.0}, load_loss_scale=loaded.append
    )
    lower_loss_scale(engine)
    assert loaded == []


EXCHANGES = ("gather", "ring", "gather", "ring")
"""How context-parallel ranks see each other's keys and values, by stage of ZeRO."""


def mixture(folder: Path) -> dict[str, Any]:
    """Sections of a recipe of a tiny mixture of experts."""
    from toolkit.parallel.tiny_model import tiny_config

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 320}
    tiny_config("mixtral", num_local_experts=4, **sizes).save_pretrained(folder)
    return {"model": {"name_or_path": str(folder)}}


@pytest.mark.parametrize(
    "case",
    daily(
        [
            ({"pp": 2}, 2),
            ({"pp": 2, "dp": 2}, 4),
            ({"pp": 2, "tp": 2, "sequence_parallel": True}, 4),
            *(({"ep": 2, "zero_stage": stage}, 2) for stage in range(4)),
            ({"pp": 2, "ep": 2}, 4),
            *(({"cp": 2, "cp_exchange": exchange, "zero_stage": stage}, 2) for stage, exchange in enumerate(EXCHANGES)),
            ({"cp": 2, "tp": 2, "sequence_parallel": True}, 4),
            ({"cp": 2, "pp": 2}, 4),
            ({"pp": 2, "schedule": "1f1b"}, 2),
            ({"pp": 2, "schedule": "zb-h1"}, 2),
            ({"pp": 2, "schedule": "zb-v"}, 2),
            ({"pp": 2, "tp": 2, "schedule": "interleaved", "chunks": 2}, 4),
        ],
        lambda number, _: number == 0,
    ),
)
def test_fp16_in_pipelines_and_with_experts_is_that_of_one_rank(
    make_recipe: Make, ranks: Ranks, tmp_path: Path, case: tuple[dict[str, Any], int]
) -> None:
    """With tied embeddings, whose gradients of two stages are added; experts: without."""
    place, world_size = case
    changes = {"precision": "fp16", "train__steps": 10} | (mixture(tmp_path) if "ep" in place else {})
    if place.get("schedule") in ("zb-v", "interleaved"):
        changes["overrides__n_layer"] = 4
    baseline = {"zero_stage": min(place.get("zero_stage", 1), 1)}
    one = ranks(fp16_trial, 1, make_recipe(**changes, parallel=baseline))[0]
    many = ranks(fp16_trial, world_size, make_recipe(**changes, parallel=place))[0]
    assert not many.diverged
    tolerance = Tolerance.constant(UNIT_ROUNDOFF["fp16"], "one rounding to fp16")
    report = compare_curves(many.curve, one.curve, tolerance)
    assert report.passed, str(report)


def overflow_trial(recipe: Recipe, rank: int) -> tuple[list[list[Any]], frozenset[str]]:
    """Steps 3 and 4 overflow in one gradient of `rank`. Return of each rank, by step: was it skipped, and the scale."""
    import torch
    import torch.distributed as dist

    from toolkit.engines.deepspeed_engine import DeepSpeedEngine
    from toolkit.engines.pipeline_engine import PipelineEngine

    allow_fp16()
    steps: list[tuple[bool, dict[str, float]]] = []

    def gradients(engine: Any) -> Iterator[torch.Tensor]:
        """Those that no other rank has a copy of: a tied one is equal on both of its stages."""
        groups = getattr(engine.optimizer, "averaged_gradients", None)
        if groups is None:
            yield from (p.grad for name, p in engine.model.named_parameters() if ".experts." in name)
            return
        partitions = getattr(engine.optimizer, "params_in_partition", None)  # None: ZeRO-3, which has no pipelines
        for number, group in groups.items():
            held = list(group or ())
            for gradient, parameter in zip(held, partitions[number] if partitions else held, strict=False):
                if gradient is not None and not getattr(parameter, "ds_pipe_replicated", False):
                    yield gradient

    def overflowing(update: Any) -> Any:
        def call(engine: Any, loss: float) -> Any:
            if len(steps) in (2, 3) and dist.get_rank() == rank:
                next(gradients(engine)).fill_(math.inf)
            result = update(engine, loss)
            steps.append((result.skipped, engine.loss_scale()))
            return result

        return call

    for kind in (DeepSpeedEngine, PipelineEngine):
        kind._update = overflowing(kind._update)  # type: ignore[method-assign]
    diverged = train_in_memory(recipe).diverged
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, steps)
    return every, diverged


@pytest.mark.parametrize(
    "case",
    daily(
        [
            ({"pp": 2}, 0),
            ({"ep": 2, "zero_stage": 0}, 1),
            ({"pp": 2}, 1),
            *(({"ep": 2, "zero_stage": stage}, 1) for stage in (1, 2, 3)),
            ({"pp": 2, "schedule": "zb-h1"}, 0),
        ],
        lambda number, _: number < 2,
    ),
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    make_recipe: Make, ranks: Ranks, tmp_path: Path, case: tuple[dict[str, Any], int]
) -> None:
    place, rank = case
    changes = {"precision": "fp16", "train__steps": 5} | (mixture(tmp_path) if "ep" in place else {})
    (first, second), diverged = ranks(overflow_trial, 2, make_recipe(**changes, parallel=place), rank)[0]
    assert [skipped for skipped, _ in first] == [False, False, True, True, False]
    assert first == second
    assert not diverged
    before, after = (next(iter(first[step][1].values())) for step in (1, 4))
    assert after < before
