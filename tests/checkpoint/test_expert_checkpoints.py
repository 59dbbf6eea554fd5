"""Checkpoints of a mixture: whole experts under Hugging Face names, written and read in any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import daily
from interrupted_runs import SETTINGS, STEPS, timeless
from safetensors.torch import load_file

from toolkit.config.strategy import Strategy

INTERRUPTED = 5
MIXTURE = {
    "name_or_path": "qwen3-30b-a3b",
    "overrides": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "vocab_size": 321,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
PAIRS = [("dp4-ep2-z1", "tp2-pp2-z1"), ("tp2-dp2-ep2-z3", "dp4-ep4-z2"), ("tp2-pp2-z1", "dp4-ep2-z3")]


def _parallel(name: str) -> tuple[dict[str, Any], int]:
    strategy = Strategy.parse(name)
    return strategy.sections(strategy.dp)["parallel"], strategy.world_size(1)


@pytest.mark.parametrize("pair", daily(PAIRS, lambda i, pair: i == 0), ids=" to ".join)
def test_a_mixture_resumes_in_another_layout_with_the_same_curve(
    pair: tuple[str, str], train: Callable[..., str], tmp_path: Path
) -> None:
    (before, ranks_before), (after, ranks_after) = map(_parallel, pair)
    train("run_dir=run", *SETTINGS, parallel=before, world_size=ranks_before, model=MIXTURE)
    start = f"run/step-{INTERRUPTED:08d}"
    train("run_dir=on", *SETTINGS, "--resume", start, parallel=after, world_size=ranks_after, model=MIXTURE)
    uninterrupted, resumed = timeless(tmp_path / "run"), timeless(tmp_path / "on")
    assert [step["step"] for step in resumed] == list(range(INTERRUPTED + 1, STEPS + 1))
    for step, expected in zip(resumed, uninterrupted[INTERRUPTED:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    _check_model(tmp_path / "on" / f"step-{STEPS:08d}")


def _check_model(checkpoint: Path) -> None:
    """It is a Hugging Face model: every weight, whole."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    stored = {name: value for file in checkpoint.glob("*.safetensors") for name, value in load_file(file).items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
