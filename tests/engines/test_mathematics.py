"""What the layout must not change: initial weights, dropout, validation loss, low precision beyond its own rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nonempty import nonempty

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve, ParityRun, Tolerance, compare_curves
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
DROPOUT = {"overrides__resid_pdrop": 0.2, "overrides__embd_pdrop": 0.2, "overrides__attn_pdrop": 0.2}


def curve(ranks: Ranks, recipe: Recipe, world_size: int = 1) -> LossCurve:
    run: ParityRun = ranks(train_in_memory, world_size, recipe)[0]
    return run.curve


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 4), (2, 2), (3, 2)])
def test_initial_weights_are_bitwise_the_same_in_every_layout(
    make_recipe: Make, ranks: Ranks, stage: int, world_size: int
) -> None:
    def weights(recipe: Recipe, size: int) -> dict[str, np.ndarray]:
        return ranks(_initial_weights, size, recipe)[0]

    alone = weights(make_recipe(train__engine="reference"), 1)
    parallel = weights(make_recipe(parallel={"zero_stage": stage}), world_size)
    assert alone.keys() == parallel.keys()
    assert all(np.array_equal(alone[name], parallel[name]) for name in alone)


def test_another_seed_gives_other_initial_weights(make_recipe: Make, ranks: Ranks) -> None:
    one, two = (ranks(_initial_weights, 1, make_recipe(train__seed=seed))[0] for seed in (1, 2))
    assert not np.array_equal(one["transformer.wte.weight"], two["transformer.wte.weight"])


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 4), (3, 2)])
def test_dropout_drops_the_same_activations_in_every_layout(
    make_recipe: Make, ranks: Ranks, stage: int, world_size: int
) -> None:
    changes = DROPOUT | {"batch__micro_batch_size": 2, "train__steps": 8}
    reference = curve(ranks, make_recipe(train__engine="reference", **changes))
    parallel = curve(ranks, make_recipe(parallel={"zero_stage": stage}, **changes), world_size)
    report = compare_curves(parallel, reference, Tolerance.fp32())
    assert report.passed, str(report)


def test_dropout_is_really_on(make_recipe: Make, ranks: Ranks) -> None:
    changes = {"train__engine": "reference", "train__steps": 2}
    off = curve(ranks, make_recipe(**changes))
    on = curve(ranks, make_recipe(**changes, **DROPOUT))
    assert not compare_curves(on, off, Tolerance.fp32()).passed


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 2), (1, 4)])
def test_the_validation_loss_is_the_same_in_every_layout(
    make_recipe: Make, ranks: Ranks, stage: int, world_size: int
) -> None:
    # 13 samples do not divide by any of the batch sizes: the last batch is filled up, and the filling must not count.
    changes = {"train__steps": 3, "train__eval_every": 3, "train__eval_samples": 13, "data__packing": "padded"}
    alone = ranks(train_in_memory, 1, make_recipe(train__engine="reference", **changes))[0]
    parallel = ranks(train_in_memory, world_size, make_recipe(parallel={"zero_stage": stage}, **changes))[0]
    assert parallel.eval_loss == pytest.approx(alone.eval_loss, rel=1e-6)


def test_masked_documents_match_the_reference(make_recipe: Make, ranks: Ranks) -> None:
    changes = {"data__document_masking": True, "train__steps": 5, "train__eval_every": 5, "train__eval_samples": 13}
    alone = ranks(train_in_memory, 1, make_recipe(train__engine="reference", **changes))[0]
    parallel = ranks(train_in_memory, 2, make_recipe(parallel={"zero_stage": 2}, **changes))[0]
    assert parallel.curve.losses == pytest.approx(alone.curve.losses, rel=1e-6)
    assert parallel.curve.grad_norms == pytest.approx(alone.curve.grad_norms, rel=1e-6)
    assert parallel.eval_loss == pytest.approx(alone.eval_loss, rel=1e-6)


def test_document_masking_changes_the_loss(make_recipe: Make, ranks: Ranks) -> None:
    changes = {"train__engine": "reference", "train__steps": 2}
    packed = curve(ranks, make_recipe(**changes))
    masked = curve(ranks, make_recipe(data__document_masking=True, **changes))
    assert not compare_curves(masked, packed, Tolerance.fp32()).passed


@pytest.mark.parametrize("engine", ["reference", "deepspeed"])
def test_recomputation_changes_nothing(make_recipe: Make, ranks: Ranks, engine: str) -> None:
    changes = DROPOUT | {"train__steps": 5, "train__engine": engine}
    plain = curve(ranks, make_recipe(**changes))
    recomputed = curve(ranks, make_recipe(**changes, parallel={"recompute": "full"}))
    assert recomputed.losses == plain.losses


@pytest.mark.parametrize("name", ["adam", "lion"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_optimizers_match_the_reference(make_recipe: Make, ranks: Ranks, name: str, stage: int) -> None:
    changes = {"optimizer": {"name": name, "lr": 3e-4, "weight_decay": 0.1}, "train__steps": 15}
    reference = curve(ranks, make_recipe(train__engine="reference", **changes))
    report = compare_curves(
        curve(ranks, make_recipe(parallel={"zero_stage": stage}, **changes), 2), reference, Tolerance.fp32()
    )
    assert report.passed, str(report)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_accelerates_launcher_leaves_in_the_environment_changes_nothing(
    make_recipe: Make, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    reference = curve(ranks, make_recipe(train__engine="reference", train__steps=3))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    report = compare_curves(
        curve(ranks, make_recipe(train__engine=engine, train__steps=3), 2), reference, Tolerance.fp32()
    )
    assert report.passed, str(report)


@pytest.mark.whole
class TestBf16:
    """bf16 rounds; how much that moves a curve is measured by reruns in other summation orders, then held against."""

    @pytest.fixture(scope="class")
    def envelopes(self, make_recipe: Make, ranks: Ranks) -> dict[str, tuple[LossCurve, Tolerance]]:
        """Per kind of bf16 (weights in bf16; autocast over fp32 weights) a baseline and its measured envelope."""
        kinds = {"weights": {"parallel": {"zero_stage": 1}}, "autocast": {"parallel": {"zero_stage": 0}}}
        kinds["fsdp"] = {"train__engine": "fsdp"}
        out = {}
        for kind, changes in kinds.items():
            reruns = [
                curve(ranks, make_recipe(precision="bf16", batch__micro_batch_size=micro, **changes))
                for micro in (16, 8, 4, 2, 1)
            ]
            out[kind] = (reruns[0], Tolerance.envelope(reruns))
        return out

    @pytest.mark.parametrize(
        ("kind", "changes", "world_size"),
        [
            ("weights", {"parallel": {"zero_stage": 1}}, 2),
            ("weights", {"parallel": {"zero_stage": 2}}, 2),
            ("weights", {"parallel": {"zero_stage": 3}}, 4),
            ("weights", {"parallel": {"zero_stage": 2, "offload_optimizer": "cpu"}}, 2),
            ("autocast", {"parallel": {"zero_stage": 0}}, 2),
            ("autocast", {"train__engine": "ddp"}, 2),
            ("fsdp", {"train__engine": "fsdp"}, 4),
        ],
    )
    def test_a_strategy_stays_within_the_measured_envelope(
        self,
        make_recipe: Make,
        ranks: Ranks,
        envelopes: dict[str, tuple[LossCurve, Tolerance]],
        kind: str,
        changes: dict[str, Any],
        world_size: int,
    ) -> None:
        baseline, envelope = envelopes[kind]
        run = curve(ranks, make_recipe(precision="bf16", **changes), world_size)
        report = compare_curves(run, baseline, envelope)
        assert report.passed, str(report)

    def test_the_envelope_is_far_tighter_than_a_wrong_scale(
        self, envelopes: dict[str, tuple[LossCurve, Tolerance]]
    ) -> None:
        for _, envelope in nonempty(envelopes.values()):
            assert envelope.at(29)[0] < 1e-2
            assert envelope.at(29)[1] < 5e-2

    def test_bf16_learns_what_fp32_learns(
        self, make_recipe: Make, ranks: Ranks, envelopes: dict[str, tuple[LossCurve, Tolerance]]
    ) -> None:
        exact = curve(ranks, make_recipe(train__engine="reference"))
        for baseline, _ in nonempty(envelopes.values()):
            # 8 bits of mantissa: a relative rounding of 2^-9 = 0.2 % on each value.
            assert baseline.losses[-1] == pytest.approx(exact.losses[-1], rel=2**-8)

    def test_rotary_frequencies_stay_in_fp32(self, make_recipe: Make, ranks: Ranks) -> None:
        overrides = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 320}
        recipe = make_recipe(model={"name_or_path": "llama-tiny", "overrides": overrides}, precision="bf16")
        dtypes = ranks(_buffer_dtypes, 1, recipe)[0]
        assert dtypes
        assert set(dtypes.values()) == {torch.float32}


def _initial_weights(recipe: Recipe) -> dict[str, np.ndarray]:
    return {name: value.float().numpy().copy() for name, value in _engine(recipe).full_parameters()}


def _buffer_dtypes(recipe: Recipe) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in _engine(recipe).model.named_buffers() if buffer.is_floating_point()}


def _engine(recipe: Recipe) -> Any:
    import torch.distributed as dist

    from toolkit.engines.factory import create_engine
    from toolkit.training.preflight import check_model, deepspeed_config

    device = torch.device("cpu")
    job = Job.of(recipe, dist.get_world_size())
    config = deepspeed_config(job, check_model(recipe, device), device)
    return create_engine(job, device, config)
