"""Activations where not all parameters train: recordings against models that peft itself prepared, on this CPU."""

import sys
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from daily import daily
from measured_activations import Case, kept_bytes, peak_bytes

from toolkit.errors import RunError
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.trainable import Trainable
from toolkit.recorder.frozen import freeze

FP32, BF16 = torch.float32, torch.bfloat16
LORA = "lora:r=4,targets=all-linear"
QUERIES = "lora:r=4,targets=q_proj+v_proj,dropout=0.1"


def model_of(case: Case) -> Any:
    """As a script prepares it for training."""
    model: Any = case.model()
    if not case.trainable.startswith("lora"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad = fnmatch(name, case.trainable)
        return model
    peft = pytest.importorskip("peft")
    options = dict(word.split("=") for word in case.trainable.removeprefix("lora:").split(","))
    targets: Any = options["targets"].split("+")
    config = peft.LoraConfig(
        r=int(options["r"]),
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        lora_dropout=float(options.get("dropout", 0)),
        task_type="CAUSAL_LM",
    )
    return case.prepared(peft.get_peft_model(model, config, autocast_adapter_dtype=options.get("fp32") != "no"))


CASES = [
    Case(family=family, dtype=dtype, attention=attention, recompute=recompute, trainable=trainable)
    for family, trainable in (
        ("llama", LORA),
        ("llama", QUERIES),
        ("llama", f"{LORA},fp32=no"),
        ("gpt2", LORA),
        ("qwen3", "*layers.3.*"),
        ("llama", "*norm*"),
        ("llama", "lm_head.weight"),
    )
    for dtype, attention, recompute in ((BF16, "sdpa", "none"), (FP32, "eager", "none"), (BF16, "eager", "full"))
]


@pytest.mark.parametrize("case", daily(CASES, lambda i, _: i % 2 == 0), ids=str)
def test_kept_and_peak_of_a_model_with_frozen_parameters(case: Case) -> None:
    if case.recompute == "full" and not case.trainable.startswith("lora"):
        pytest.skip("the same in every layer")
    assert case.predicted_kept() == pytest.approx(kept_bytes(case, model_of(case)), rel=0.01)
    assert case.predicted_peak() == pytest.approx(peak_bytes(case, model_of(case)), rel=0.03)


def held(case: Case) -> RankParameters:
    return parameters(config_text(case.config().to_dict()), case.trainable).rank_parameters()


@pytest.mark.parametrize("trainable", [LORA, "*layers.3.*"])
def test_autocasts_copies_of_weights_that_gradients_pass(trainable: str) -> None:
    case = Case(family="llama", dtype=FP32, autocast=True, trainable=trainable)
    model = model_of(case)
    # The input of the first layer that trains needs no gradient: its projections' copies are freed at once.
    first = next(name.partition("self_attn")[0] for name, p in model.named_parameters() if p.requires_grad)
    frozen = [p for name, p in model.named_parameters() if name.startswith(f"{first}self_attn") and not p.requires_grad]
    copies = held(case).matrices - sum(p.numel() for p in frozen[:3])
    assert case.predicted_kept() + 2 * copies == pytest.approx(kept_bytes(case, model), rel=0.01)


def test_autocast_with_recomputation_copies_one_layers_frozen_weights() -> None:
    case = Case(family="llama", dtype=FP32, autocast=True, recompute="full", trainable=LORA)
    params, estimate, layers = held(case), case.estimate(), range(case.layers())
    again = 2 * (params.matrices - sum(params.layer_matrices) + max(params.layer_matrices))
    cached = [2 * size for size in params.trained_matrices]
    predicted = max(estimate.worst_moment(layers).total + again, estimate.forward_peak(layers, casts=cached))
    assert predicted == pytest.approx(peak_bytes(case, model_of(case)), rel=0.1)


def test_adapters_are_recorded_beside_sharded_layers() -> None:
    case = Case(family="llama", trainable=f"{LORA},fp32=no")
    assert case.predicted_kept() / 2 < case.predicted_kept(tp=2) < case.predicted_kept()


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RunError, match="pip install"):
        freeze(Case(family="llama").model(), Trainable.parse("lora"))
