"""Liger's kernels train what torch's do. Its kernels run on CPUs in Triton's interpreter."""

import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import liger_interpreter
import pytest
import torch
import torch.nn.functional as F
from allocations import SavedForBackward
from refusals import refused
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError, RunError
from toolkit.model_init.liger import check_liger, take_liger
from toolkit.models.support import LIGER_FAMILIES
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tiny_model import VOCABULARY, tiny_config
from toolkit.parity import ParityRun, Tolerance, compare_curves
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.training import preflight

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
interpreted = pytest.mark.skipif(bool(liger_interpreter.WHY_NOT), reason=liger_interpreter.WHY_NOT or "it can run")


def model_of(family: str, *, liger: bool, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, LossInHead]:
    torch.manual_seed(0)
    config = tiny_config(family)
    if hasattr(config, "final_logit_softcapping"):
        config.final_logit_softcapping = 2.0
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.to(dtype)
    if liger:
        liger_interpreter.interpret()
        take_liger(model)
    loss = LossInHead.of(model, is_liger=liger)
    assert loss is not None
    return model, loss


def passed(model: PreTrainedModel, loss: LossInHead) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch with ignored labels, and those of its samples."""
    chance = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, VOCABULARY, (3, 16), generator=chance) for _ in range(2))
    labels[0, 2:5], labels[2] = IGNORE, IGNORE
    loss.labels = labels
    total: torch.Tensor = model(input_ids=ids, use_cache=False).loss
    return total, loss.take_sample_losses()


def errors(family: str, *, liger: bool) -> dict[str, float]:
    """How far the loss, those of samples, and each gradient are from plain ones in fp64, relative."""
    exact, model = model_of(family, liger=False, dtype=torch.float64), model_of(family, liger=liger)
    wanted, wanted_of_samples = passed(*exact)
    found, of_samples = passed(*model)
    (wanted / 17).backward()
    (found / 17).backward()
    pairs = {"loss": (wanted, found), "samples": (wanted_of_samples, of_samples)}
    gradients = dict(model[0].named_parameters())
    pairs |= {name: (each.grad, gradients[name].grad) for name, each in exact[0].named_parameters()}
    return {name: float((one - other).norm() / one.norm()) for name, (one, other) in pairs.items()}


def daily(cases: Iterable[Any], *, few: Sequence[Any]) -> list[Any]:
    """All cases as parameters, of which `make test` runs a few: the interpreter takes seconds for each."""
    cases = list(cases)
    assert all(case in cases for case in few)
    return [pytest.param(case, marks=[] if case in few else pytest.mark.whole) for case in cases]


@interpreted
@pytest.mark.parametrize("family", daily(LIGER_FAMILIES, few=("llama", "gemma2", "qwen3")))
def test_loss_and_gradients_are_those_of_torchs_kernels(family: str) -> None:
    found, plain = errors(family, liger=True), errors(family, liger=False)
    assert max(plain.values()) < 1e-5, plain
    assert max(found.values()) < max(1e-6, 1.3 * max(plain.values())), found


@interpreted
@pytest.mark.parametrize("family", daily(LIGER_FAMILIES, few=("llama",)))
def test_less_is_kept_for_the_backward_pass(family: str) -> None:
    kept = []
    for liger in (False, True):
        model, loss = model_of(family, liger=liger, dtype=torch.bfloat16)
        with SavedForBackward(model) as saved:
            passed(model, loss)
        kept.append(saved.bytes)
    assert kept[1] < kept[0], kept


SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}


def trial(recipe: Recipe) -> ParityRun:
    preflight.check_liger = lambda device: None
    if recipe.model.kernels == "liger":
        liger_interpreter.interpret()
    return train_in_memory(recipe, inspect=lambda engine: [str(part).split("(")[0] for part in engine.model.modules()])


PLACES: list[dict[str, Any]] = [
    {"model": "qwen3-tiny", "tp": 2},
    {"model": "gemma-2-2b", "tp": 2, "sequence_parallel": True},
    {"model": "olmo-2-1b", "tp": 2},
    {"model": "phi-4", "tp": 2},
    {"zero_stage": 0},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"ulysses": 2, "zero_stage": 3},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"offload_activations": True},
    {"tiled_mlp": True},
    {"lora": True},
]


@interpreted
@pytest.mark.parametrize(
    "place",
    daily(PLACES, few=[{"zero_stage": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]),
    ids=str,
)
def test_it_trains_what_one_plain_process_trains(make_recipe: Make, ranks: Ranks, place: dict[str, Any]) -> None:
    lora = {"lora": {"r": 4}} if place.get("lora") else {}
    name = place.get("model", "llama-tiny")
    sizes = SIZES | ({"head_dim": 8} if name in ("qwen3-tiny", "gemma-2-2b") else {})
    tiny = {"name_or_path": name, "overrides": sizes} | lora
    parallel = {key: value for key, value in place.items() if key not in ("lora", "model")}
    options: dict[str, Any] = {"batch": {"global_batch_size": 4, "micro_batch_size": 1}, "train__steps": 4}
    options |= {"data__seq_len": 16}
    one = ranks(trial, 1, make_recipe(model=tiny, train__engine="reference", **options))[0]
    many = ranks(trial, 2, make_recipe(model=tiny | {"kernels": "liger"}, parallel=parallel, **options))[0]
    assert "LigerRMSNorm" in many.inspected
    report = compare_curves(many.curve, one.curve, Tolerance.constant(1e-6, "fp32"))
    assert report.passed, str(report)


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A liger_kernel with torch's arithmetic that says what it was called for."""
    calls: list[str] = []

    def rope(*arguments: Any) -> Any:
        calls.append("rope")
        return plain_rope(*arguments)

    class LigerRMSNorm(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append("norm")
            return modeling_llama.LlamaRMSNorm.forward(self, hidden)  # type: ignore[arg-type]

    def apply(model: Any, *, cross_entropy: bool, fused_linear_cross_entropy: bool) -> None:
        assert not cross_entropy
        assert not fused_linear_cross_entropy
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", LigerRMSNorm)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rope)
        model.model.norm.forward = LigerRMSNorm.forward.__get__(model.model.norm)

    def fused(
        x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, *, compute_gradients: bool, **keywords: Any
    ) -> Any:
        calls.append(f"loss {compute_gradients} {keywords['softcap']} {keywords['reduction']}")
        losses = F.cross_entropy(x @ w.t(), targets, ignore_index=keywords["ignore_index"], reduction="none")
        slopes = (x @ w.t()).softmax(-1) - F.one_hot(targets.clamp(min=0), len(w))
        slopes *= (targets != keywords["ignore_index"]).unsqueeze(-1)
        return losses, None, None, None, *((slopes @ w, slopes.t() @ x) if compute_gradients else (None, None)), None

    plain_rope = modeling_llama.apply_rotary_pos_emb
    modules = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.ops")}
    modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    modules["liger_kernel.ops"].fused_linear_cross_entropy_forward = fused  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_kernels_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch, fake_liger: list[str]) -> None:
    monkeypatch.setattr(liger_interpreter, "interpret", lambda: None)
    exact = model_of("llama", liger=False)
    wanted, wanted_of_samples = passed(*exact)
    model = model_of("llama", liger=True)
    found, of_samples = passed(*model)
    assert fake_liger == ["rope"] * len(model[0].model.layers) + ["norm", "loss True None none"]
    torch.testing.assert_close((found, of_samples), (wanted, wanted_of_samples))
    (wanted / 17).backward()
    (found / 17).backward()
    for one, other in zip(exact[0].parameters(), model[0].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    fake_liger.clear()
    passed(*model_of("llama", liger=False))
    assert fake_liger == []
    with torch.no_grad():
        passed(*model)
    assert fake_liger[-1] == "loss False None none"


class TestRefusals:
    def test_a_cpu(self) -> None:
        with refused(RunError, "model.kernels", remedy=("model.kernels", "torch")):
            check_liger(torch.device("cpu"))

    @pytest.mark.parametrize("found", ["", "0.5.2"])
    def test_no_liger_and_an_old_one(self, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
        from toolkit.model_init import liger

        def version(name: str) -> str:
            if not found:
                raise liger.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(liger, "version", version)
        with refused(RunError, "model.kernels", remedy=("model.kernels", "torch")):
            check_liger(torch.device("cuda"))
        monkeypatch.setattr(liger, "version", lambda name: "0.8.5")
        check_liger(torch.device("cuda"))

    def test_a_family_that_was_not_tested(self) -> None:
        model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
        with refused(ModelError, "model.kernels", "model_type", remedy=("model.kernels", "torch")):
            take_liger(model)

    def test_another_activation(self) -> None:
        model = AutoModelForCausalLM.from_config(tiny_config("llama", hidden_act="gelu"))
        with refused(ModelError, "model.kernels", "activation", remedy=("model.kernels", "torch")):
            take_liger(model)
