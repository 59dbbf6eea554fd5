"""Activations where not all parameters train: recordings against models that peft itself prepared, on this CPU."""

from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from measured_activations import Case, kept_bytes, peak_bytes

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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_and_peak_of_a_model_with_frozen_parameters(case: Case) -> None:
    if case.recompute == "full" and not case.trainable.startswith("lora"):
        pytest.skip("the same in every layer")
    assert case.predicted_kept() == pytest.approx(kept_bytes(case, model_of(case)), rel=0.01)
    assert case.predicted_peak() == pytest.approx(peak_bytes(case, model_of(case)), rel=0.03)
