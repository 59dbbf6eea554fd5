"""The estimate of activations under torch.autocast: fp32 weights, products in bf16, their operands kept in bf16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daily import daily
from measured_activations import EAGER_ONLY, NEVER_RECOMPUTED, Case, kept_bytes, peak_bytes
from torch.overrides import TorchFunctionMode

from toolkit.config.recipe import Recipe
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.worst_moment import casts_to_come
from toolkit.models.shape import ModelShape, families, find_config
from toolkit.planner.run_memory import estimate_for_run
from toolkit.recorder.parameters import record_parameters

DAILY = ("gpt2", "gpt_neo", "llama", "qwen3", "olmo2", "gemma3_text")
KINDS = [(family, kind) for family in DAILY for kind in ("eager", "sdpa") if (family, kind) != ("gpt_neo", "sdpa")]
WHOLE = [(family, kind) for family in families() for kind in ("eager", "sdpa")]


def held(case: Case) -> RankParameters:
    """What the model holds."""
    return record_parameters(config_text(case.config().to_dict())).rank_parameters()


def check_kept(case: Case) -> None:
    measured = kept_bytes(case, case.model())
    # Autocast's copies of weights are kept too: a matrix once, however often it is used.
    predicted = case.predicted_kept() + 2 * held(case).matrices
    assert predicted == pytest.approx(measured, rel=0.01), f"{case}: {predicted / measured - 1:+.2%}"


def case_of(family: str, attention: str, **more: Any) -> Case:
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("eager only")
    return Case(family=family, attention=attention, dtype=torch.float32, autocast=True, **more)


@pytest.mark.parametrize(("family", "attention"), KINDS[::2])
def test_what_a_forward_pass_keeps_is_known_within_a_percent(family: str, attention: str) -> None:
    check_kept(case_of(family, attention))


@pytest.mark.whole
@pytest.mark.parametrize(("family", "attention"), WHOLE)
def test_what_any_familys_forward_pass_keeps_is_known_within_a_percent(family: str, attention: str) -> None:
    check_kept(case_of(family, attention))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_selective_recomputation_keeps_rotated_queries_and_keys(attention: str) -> None:
    check_kept(case_of("llama", attention, recompute="selective"))


class _AsOnGpu(TorchFunctionMode):
    """Hands fp32 to what autocast runs in fp32 on a GPU alone."""

    _RAISED = (F.softmax, torch.softmax, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.square, F.layer_norm)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._RAISED and kwargs.get("dtype") is None:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


_RAISED_DAILY = (("gpt2", "eager"), ("llama", "sdpa"), ("gemma3_text", "eager"), ("phi", "eager"), ("stablelm", "sdpa"))


@pytest.mark.parametrize(
    "kind",
    daily(
        [*KINDS, ("phi", "eager"), ("stablelm", "sdpa"), ("openai-gpt", "eager")],
        lambda _, kind: kind in _RAISED_DAILY,
    ),
)
def test_on_a_gpu_softmax_norms_and_powers_run_in_fp32(kind: tuple[str, str]) -> None:
    family, attention = kind
    changes = {"qk_layernorm": True} if family in ("phi", "stablelm") else {}
    case = case_of(family, attention, drops=False, device="cuda", changes=changes)
    with _AsOnGpu():
        check_kept(case)


def check_peak(case: Case, tolerance: float) -> None:
    measured, estimate, layers = peak_bytes(case, case.model()), case.estimate(), range(case.layers())
    casts = 2 * held(case).matrices
    if case.recompute == "full":
        each = [2 * size for size in held(case).layer_matrices]
        again = casts - sum(each) + max(each)
        predicted = max(estimate.worst_moment(layers).total + again, estimate.forward_peak(layers, casts=each))
    else:
        predicted = estimate.worst_moment(layers, casts_to_come=casts_to_come(held(case))).total + casts
    assert predicted == pytest.approx(measured, rel=tolerance), f"{case}: {predicted / measured - 1:+.2%}"


@pytest.mark.parametrize(("family", "attention"), KINDS[1::2])
def test_the_peak_of_a_pass_is_known_within_three_percent(family: str, attention: str) -> None:
    check_peak(case_of(family, attention), 0.03)


@pytest.mark.parametrize(("family", "attention"), KINDS[::2])
def test_the_peak_of_a_recomputed_pass_is_known_within_three_percent(family: str, attention: str) -> None:
    check_peak(case_of(family, attention, recompute="full"), 0.03)


@pytest.mark.whole
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("family", "attention"), WHOLE)
def test_the_peak_of_any_familys_pass_is_known(family: str, attention: str, recompute: str) -> None:
    """Recomputed tiny layers are so small that the copies of the head's weight and what names still hold count."""
    if recompute == "full" and family in NEVER_RECOMPUTED:
        pytest.skip("transformers recomputes none of it")
    check_peak(case_of(family, attention, recompute=recompute), 0.03 if recompute == "none" else 0.1)


def run_of(engine: str, precision: str, recompute: str = "none", micro_batch_size: int = 2) -> MemoryBreakdown:
    """The estimate of GPT-2 XL on four ranks, without ZeRO."""
    document = {
        "model": {"name_or_path": "gpt2-xl", "loss": "plain"},
        "data": {"seq_len": 1024},
        "parallel": {"dp": 4, "zero_stage": 0, "recompute": recompute},
        "batch": {"global_batch_size": 8 * micro_batch_size, "micro_batch_size": micro_batch_size},
        "precision": precision,
        "optimizer": {"lr": 1e-4},
        "train": {"steps": 1, "engine": engine},
    }
    recipe = Recipe.model_validate(document)
    layout = recipe.layout(4)
    return estimate_for_run(recipe, layout, recipe.resolve_batch(layout))[0]


def test_ddp_and_deepspeed_zero_0_need_the_same_activations_in_bf16() -> None:
    ddp, zero = run_of("ddp", "bf16"), run_of("deepspeed", "bf16")
    assert (ddp.activations, ddp.logits, ddp.gathered) == (zero.activations, zero.logits, zero.gathered)


def test_activations_under_autocast_lie_between_those_in_bf16_and_in_fp32() -> None:
    cast, full = (sum(run_of("ddp", precision).activations.values()) for precision in ("bf16", "fp32"))
    assert full / 2 < cast < full


def test_recomputed_layers_cast_weights_one_layer_at_a_time() -> None:
    config = find_config("gpt2-xl")
    assert config is not None
    shape = ModelShape.from_config(config)
    layer, head = 12 * shape.hidden**2, shape.vocab * shape.hidden
    assert run_of("deepspeed", "bf16").gathered == 2 * (shape.layers * layer + head)
    # With few samples the worst moment is before the loss, when all casts of the forward pass live.
    assert run_of("deepspeed", "bf16", "full").gathered == 2 * (shape.layers * layer + head)
    assert run_of("deepspeed", "bf16", "full", micro_batch_size=16).gathered == 2 * (layer + head)
