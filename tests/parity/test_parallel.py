"""Tensor parallelism and pipelines on what the regression matrix does not have: document masking, shared heads, text
that is held out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import daily
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import LossCurve, ParityResult, ParityRun, Tolerance, compare_curves
from toolkit.parity.run.train_in_memory import train_in_memory

ACTIVE_CLIP = 0.2
"""Below every gradient norm of these runs, so that each step is clipped."""

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, fewer key-value heads than ranks": ("llama-tiny", {"num_key_value_heads": 1}, {"tp": 2, "zero_stage": 1}),
    "llama, two key-value heads on four ranks": ("llama-tiny", {"num_key_value_heads": 2}, {"tp": 4, "zero_stage": 2}),
    "llama with sequence parallelism in stages": (
        "llama-tiny",
        {"num_key_value_heads": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
    ),
    "qwen3, whose heads have norms": ("qwen3-tiny", {}, {"tp": 2, "zero_stage": 3}),
    "qwen3 with sequence parallelism": ("qwen3-tiny", {}, {"tp": 2, "zero_stage": 1, "sequence_parallel": True}),
    "qwen3 in stages": ("qwen3-tiny", {}, {"pp": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize("name", daily(FAMILIES, lambda i, _: i % 2 == 1))
def test_masked_documents_train_what_one_process_trains(
    name: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    shape, extra, parallel = FAMILIES[name]
    small = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "vocab_size": 321}
    changes = {
        "model": {"name_or_path": shape, "overrides": small | extra},
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        "data__document_masking": True,
        "train__grad_clip": ACTIVE_CLIP,
        "train__steps": 10,
    }
    baseline = ranks(train_in_memory, 1, make_recipe(**changes, train__engine="reference"))[0]
    size = parallel.get("tp", 1) * parallel.get("pp", 1)
    runs = ranks(train_in_memory, size, make_recipe(**changes, parallel=parallel))
    assert min(baseline.curve.grad_norms) > ACTIVE_CLIP
    ParityResult.of(runs[0], baseline).check()


@pytest.mark.parametrize("family", ["roberta", "modernbert-decoder"])
def test_a_new_model_without_the_padding_token_of_its_family_trains_in_stages(
    family: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    tiny_config(family, vocab_size=321, max_position_embeddings=40).save_pretrained(tmp_path)
    changes = {"model": {"name_or_path": str(tmp_path)}, "train__steps": 3}
    baseline = ranks(train_in_memory, 1, make_recipe(**changes, train__engine="reference"))[0]
    run = ranks(train_in_memory, 2, make_recipe(**changes, parallel={"pp": 2, "zero_stage": 1}))[0]
    assert ParityResult.of(run, baseline).passed


def _with_split_sums(recipe: Any, parts: int) -> ParityRun:
    """The same training in one process, with every product of GPT-2's layers rounded to bf16 in `parts` partial sums.

    Another micro-batch size changes only how gradients are summed; this changes the forward pass, as tp does.
    """

    def forward(self: Conv1D, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.tensor_split(parts, dim=-1), self.weight.tensor_split(parts, dim=0), strict=True)
        return sum((piece @ weight for piece, weight in pieces), start=torch.zeros((), dtype=x.dtype)) + self.bias

    Conv1D.forward = forward
    return train_in_memory(recipe)


IN_BF16 = {"precision": "bf16", "overrides__n_layer": 4, "train__steps": 20}


@pytest.fixture(scope="module")
def bf16_curves(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> list[LossCurve]:
    """The uncut model with other micro-batches, and with other sums: what rounding alone does to the curve."""
    whole = [
        ranks(train_in_memory, 1, make_recipe(**IN_BF16, batch__micro_batch_size=size))[0].curve for size in (16, 4, 1)
    ]
    return whole + [ranks(_with_split_sums, 1, make_recipe(**IN_BF16), parts)[0].curve for parts in (2, 3, 4)]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"tp": 2, "zero_stage": 1}, marks=pytest.mark.whole),
        {"tp": 2, "zero_stage": 3},
        pytest.param({"pp": 2, "zero_stage": 1}, marks=pytest.mark.whole),
        {"tp": 2, "pp": 2, "zero_stage": 1, "sequence_parallel": True},
    ],
    ids=["tp2-z1", "tp2-z3", "pp2-z1", "tp2-pp2-z1-sp"],
)
def test_bf16_stays_within_the_envelope_of_its_own_rounding(
    parallel: dict[str, Any],
    bf16_curves: list[LossCurve],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
) -> None:
    size = parallel.get("tp", 1) * parallel.get("pp", 1)
    run = ranks(train_in_memory, size, make_recipe(**IN_BF16, parallel=parallel))[0]
    report = compare_curves(run.curve, bf16_curves[0], Tolerance.envelope(bf16_curves))
    assert report.passed, str(report)


def test_a_validation_loss_does_not_depend_on_the_stages(
    make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    changes = {"train__steps": 2, "train__eval_every": 2, "train__eval_samples": 11, "overrides__n_layer": 4}
    alone = ranks(train_in_memory, 1, make_recipe(**changes, train__engine="reference"))[0].eval_loss
    for parallel in ({"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}):
        size = 2 * len(parallel)
        split = ranks(train_in_memory, size, make_recipe(**changes, parallel=parallel))[0].eval_loss
        assert split == pytest.approx(alone, rel=1e-6)
