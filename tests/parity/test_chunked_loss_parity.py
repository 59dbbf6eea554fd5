"""The chunked loss trains what the reference trains, which computes with full logits, in every layout and engine."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from daily import daily

from toolkit.config.recipe import Recipe
from toolkit.engines import compiled_layers
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Ranks = Callable[..., list[Any]]
FAMILIES = ("gpt2", "llama", "gemma2", "cohere")
"""A tied head, one of its own, a soft cap, and a factor."""
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"dp2-z{stage}": {"dp": 2, "zero_stage": stage} for stage in range(4)},
    "tp2": {"tp": 2, "zero_stage": 1},
    "tp2-sp": {"tp": 2, "sequence_parallel": True, "zero_stage": 2},
    "pp2": {"pp": 2, "zero_stage": 1},
    "tp2-pp2": {"tp": 2, "pp": 2, "zero_stage": 1},
    "u2-z3": {"ulysses": 2, "zero_stage": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"train__engine": "ddp"},
    "fsdp": {"train__engine": "fsdp"},
    "compile": {"train__compile": True},
    "lora": {"model": {"lora": {"r": 4, "alpha": 16, "targets": ["all-linear"]}}},
}
"""Each on two replicas, with ZeRO-1 where it has a stage."""
CASES = [
    *(case for case in product(FAMILIES, LAYOUTS) if case != ("gemma2", "u2-z3")),  # which is refused
    *(("llama", option) for option in OPTIONS),
    ("mixtral", "dp2-z1"),
]
DAILY = {("gemma2", "tp2-sp")}
CHUNK = 24
"""Tokens: less than a micro-batch has, and no divisor of it."""


def train_in_chunks(recipe: Recipe) -> ParityRun:
    """Train with chunks of few tokens; fails where the loss was not computed in them, or was in the reference."""
    passes: list[int] = []

    def chunk_tokens(tokens: int, rows: int) -> int:
        passes.append(tokens)
        return CHUNK

    LossInHead.chunk_tokens = staticmethod(chunk_tokens)
    run = train_in_memory(recipe)
    # Of a pipeline the last stage alone has a head.
    assert recipe.parallel.pp > 1 or bool(passes) == (recipe.model.loss == "chunked")
    assert all(tokens > CHUNK for tokens in passes)
    return run


@pytest.mark.parametrize("case", daily(CASES, lambda _, case: case in DAILY), ids="-".join)
def test_chunks_train_what_full_logits_train(
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str],
) -> None:
    family, layout = case
    section, option = LAYOUTS.get(layout, LAYOUTS["dp2-z1"]), dict(OPTIONS.get(layout, {}))
    monkeypatch.setattr(compiled_layers, "_OPTIONS", {"backend": "aot_eager"})
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    config = tiny_config(family, vocab_size=321, **without_dropout)
    if family == "gemma2":
        config.final_logit_softcapping = 1.0  # so that it caps
    config.save_pretrained(tmp_path / family)
    model = {"name_or_path": str(tmp_path / family), "loss": "chunked", **option.pop("model", {})}
    fields: dict[str, Any] = {
        "optimizer__lr": 3e-4,
        "train__steps": 8 if case in DAILY else 30,
        "data__packing": "padded",
        "batch__micro_batch_size": 2,
    }
    recipe = make_recipe(model=model, parallel=section, **fields, **option)
    plain = make_recipe(model=model | {"loss": "plain"}, **fields, train__engine="reference")
    size = math.prod(section.get(axis, 1) for axis in ("dp", "tp", "pp", "ulysses"))
    baseline = ranks(train_in_chunks, 1, plain)[0]
    result = ParityResult.of(ranks(train_in_chunks, size, recipe)[0], baseline)
    has_tied_ends = layout == "pp2" and config.tie_word_embeddings
    result.check(has_replicas=has_tied_ends or layout not in ("dp2-z3", "fsdp", "pp2", "u2-z3"))
    assert result.curves.max_loss_difference < 1e-6
