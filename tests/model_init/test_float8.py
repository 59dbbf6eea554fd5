"""Products in float8, emulated on CPUs: like bf16 up to their rounding, and the same in every layout."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
from daily import daily
from refusals import refused

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError, RunError
from toolkit.parity import ParityRun, Tolerance, compare_curves
from toolkit.parity.run import rounding
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import ENVELOPE_FACTOR

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
LLAMA = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 320,
    },
}


@pytest.fixture(autouse=True)
def _imported() -> None:
    """Before ranks are forked, which would import it each."""
    if importlib.util.find_spec("torchao") is not None:
        importlib.import_module("torchao.float8")


def small(make_recipe: Make, *, float8: str | None, stage: int = 1, **changes: Any) -> Recipe:
    options = {"precision": "bf16", "parallel": {"zero_stage": stage}} | changes
    return make_recipe(model=LLAMA | {"float8": float8}, train__steps=8, **options)


def float8_trial(recipe: Recipe) -> ParityRun:
    """Also the kinds of the linear layers of the model."""
    return train_in_memory(recipe, inspect=lambda engine: [type(part).__name__ for part in engine.model.modules()])


@needs_torchao
@pytest.mark.parametrize("kind", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.whole)])
def test_float8_trains_what_bf16_trains(
    make_recipe: Make, ranks: Ranks, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the spread of reruns in bf16 whose modules' results move by as much as float8 moves a product.

    Two factors with 3 bits after the point are each off by 2^-4 at most, so a sum of products by about 2^-5.
    """
    one = small(make_recipe, float8=None)
    plain = ranks(train_in_memory, 1, one)[0]
    monkeypatch.setattr(rounding, "UNIT_ROUNDOFF", {"bf16": 2.0**-6})
    reruns = [ranks(rerun, 1, one, seed)[0].curve for seed in (1, 2)]
    trained = ranks(float8_trial, 1, small(make_recipe, float8=kind))[0]
    assert trained.inspected.count("Float8Linear") == 2 * 7
    report = compare_curves(
        trained.curve, plain.curve, Tolerance.envelope([plain.curve, *reruns], factor=ENVELOPE_FACTOR)
    )
    assert report.passed, str(report)
    assert trained.curve.losses != plain.curve.losses


def rerun(recipe: Recipe, seed: int) -> ParityRun:
    return train_in_memory(recipe, rounding_seed=seed)


@needs_torchao
@pytest.mark.parametrize(
    "place",
    daily(
        [{"zero_stage": 3}, {"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3, "recompute": "full"}, {"pp": 2}],
        lambda number, _: number == 0,
    ),
    ids=str,
)
@pytest.mark.parametrize("kind", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.whole)])
def test_float8_is_the_same_in_every_layout(make_recipe: Make, ranks: Ranks, place: dict[str, Any], kind: str) -> None:
    """With the same micro-batches, whose scales they share. Without ZeRO there is autocast, and another rounding."""
    batch = {"global_batch_size": 16, "micro_batch_size": 4}
    baseline = {"zero_stage": min(1, place.get("zero_stage", 1))}
    one = ranks(train_in_memory, 1, small(make_recipe, float8=kind, batch=batch, parallel=baseline))[0]
    many = ranks(float8_trial, 2, small(make_recipe, float8=kind, batch=batch, parallel=place))[0]
    gathered = place.get("zero_stage") == 3
    assert ("GatheredFloat8Linear" in many.inspected) == gathered
    report = compare_curves(many.curve, one.curve, Tolerance.constant(2**-8, "one rounding to bf16"))
    assert report.passed, str(report)


@needs_torchao
@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_layers_train_what_eager_ones_train(make_recipe: Make, ranks: Ranks, stage: int) -> None:
    """Within the spread of eager reruns: fused operations leave out roundings to bf16, and float8 magnifies them."""
    recipe, compiled = (
        small(make_recipe, float8="rowwise", stage=stage, train__compile=compiles) for compiles in (False, True)
    )
    eager, trained = (ranks(float8_trial, 1, one)[0].curve for one in (recipe, compiled))
    reruns = [ranks(rerun, 1, recipe, seed)[0].curve for seed in (1, 2)]
    report = compare_curves(trained, eager, Tolerance.envelope([eager, *reruns], factor=ENVELOPE_FACTOR))
    assert report.passed, str(report)
    assert trained.losses != eager.losses


@needs_torchao
def test_zero_3_frees_the_weight_between_the_passes() -> None:
    import torch
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef

    from toolkit.model_init.float8 import multiply_in_float8

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32))])
            self.config = type(
                "Config", (), {"get_text_config": lambda *a, **k: self.config, "to_dict": lambda *a: {}}
            )()

    whole, sharded = Model(), Model()
    sharded.load_state_dict(whole.state_dict())
    for model, gathers in ((whole, False), (sharded, True)):
        multiply_in_float8(model, "rowwise", emulate=True, gathers=gathers)  # type: ignore[arg-type]
    x = torch.randn(16, 32)
    outputs = [model.layers[0](x) for model in (whole, sharded)]
    linear = sharded.layers[0][0]
    memory = StorageWeakRef(linear.weight.untyped_storage())
    held, linear.weight.data = linear.weight.data.clone(), torch.empty(0)
    assert memory.expired()
    linear.weight.data = held
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, whole.layers[0][0].weight.grad, rtol=0, atol=0)


class TestRefusals:
    def test_without_torchao(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from toolkit.model_init.float8 import check_float8

        for name in ("torchao", "torchao.float8"):
            monkeypatch.setitem(sys.modules, name, None)
        with refused(RunError, "model.float8", remedy=("model.float8", None)):
            check_float8("rowwise", torch.device("cpu"))

    @needs_torchao
    def test_a_gpu_that_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from toolkit.model_init.float8 import check_float8

        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with refused(RunError, "model.float8"):
            check_float8("rowwise", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        check_float8("rowwise", torch.device("cuda"))

    @needs_torchao
    def test_a_family_without_linear_layers(self, make_recipe: Make) -> None:
        from toolkit.model_init.build_model import build_model

        with refused(ModelError, "model.float8"):
            build_model(make_recipe(model__float8="rowwise", precision="bf16"))
