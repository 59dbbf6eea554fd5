"""Peaks of layers in which attention is the worst moment: the estimate of context parallelism, against rehearsals."""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.recorder.rehearsal.rehearse import rehearse

SIZES = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 64}
POSITIONS = 4096
"""Positions of a sample on a rank."""


@pytest.mark.parametrize(
    ("layout", "exchange", "kv_heads", "model"),
    [
        ("cp2-z1-recompute", "ring", 8, "llama-tiny"),
        ("cp4-z1-recompute", "ring", 8, "llama-tiny"),
        ("cp4-z1", "gather", 8, "llama-tiny"),
        ("u2-cp2-z1-recompute", "ring", 8, "llama-tiny"),
        ("cp2-z1-recompute", "ring", 2, "mistral-7b"),
    ],
)
def test_a_rank_allocates_what_is_estimated(
    make_recipe: Callable[..., Recipe], layout: str, exchange: str, kv_heads: int, model: str
) -> None:
    overrides: dict[str, Any] = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
    strategy = Strategy.parse(layout)
    seq_len = POSITIONS * strategy.world_size(1)
    overrides["max_position_embeddings"] = seq_len
    if model == "mistral-7b":
        overrides["sliding_window"] = 1024
    recipe = make_recipe(
        model={"name_or_path": model, "overrides": overrides},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        data__seq_len=seq_len,
        precision="bf16",
        parallel={"cp_exchange": exchange},
    )
    job = Job.of(strategy.apply(recipe, 1), strategy.world_size(1))
    rehearsal = rehearse(job, on_gpu=True)
    assert not rehearsal.problem
    for kind in rehearsal.kinds:
        assert kind.estimated == pytest.approx(kind.peak, rel=0.01)
