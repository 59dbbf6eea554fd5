"""parallel.ulysses against the rest of a recipe and against the model."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checked_recipes import check_conflict
from checked_recipes import recipe as any_recipe
from refusals import refused

from toolkit.config import recipe_problems
from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.parallel_rules import ULYSSES_FAMILIES
from toolkit.config.recipe import Recipe
from toolkit.dsconfig import build, merge_user_config
from toolkit.errors import ConfigError, RecipeError

recipe = partial(any_recipe, model__name_or_path="llama-tiny", parallel__ulysses=2)

REFUSED: list[tuple[dict[str, object], list[str], list[object]]] = [
    (
        {"parallel__tp": 2},
        ["parallel.ulysses", "parallel.tp"],
        [("parallel.ulysses", 1), "set parallel.tp=1"],
    ),
    ({"parallel__pp": 2}, ["parallel.ulysses", "parallel.pp"], [("parallel.ulysses", 1), "set parallel.pp=1"]),
    (
        {"parallel__tp": 2, "parallel__pp": 2},
        ["parallel.ulysses", "parallel.tp", "parallel.pp"],
        [("parallel.ulysses", 1), "set parallel.tp=1 and parallel.pp=1"],
    ),
    (
        {"parallel__tp": 2, "parallel__sequence_parallel": True},
        ["parallel.ulysses", "parallel.tp"],
        [("parallel.ulysses", 1), "set parallel.tp=1"],
    ),
    (
        {"parallel__sequence_parallel": True},
        ["parallel.sequence_parallel", "parallel.tp"],
        [("parallel.tp", "2 or more"), ("parallel.sequence_parallel", False)],
    ),
    (
        {"parallel__ulysses": 3, "data__seq_len": 126},
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", "1, 2 or 4")],
    ),
    (
        {
            "parallel__ulysses": 4,
            "model__overrides": {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
        },
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", "1, 2, 3, 6 or 12")],
    ),
    (
        {"data__seq_len": 127},
        ["data.seq_len", "parallel.ulysses"],
        [("data.seq_len", "126 or 128"), ("parallel.ulysses", 1)],
    ),
    (
        {"model__attn_implementation": "eager"},
        ["model.attn_implementation", "parallel.ulysses"],
        [("model.attn_implementation", "sdpa or flash_attention_2"), ("parallel.ulysses", 1)],
    ),
    (
        {"model__name_or_path": "bloom-560m"},
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", 1), "take a model of another family, such as llama or qwen3 (dstk families lists them)"],
    ),
    (
        {"model__name_or_path": "mistral-7b", "model__overrides": {"sliding_window": 64}},
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", 1), ("data.seq_len", "64 or less")],
    ),
    (
        {
            "model__name_or_path": "qwen3-tiny",
            "model__overrides": {
                "layer_types": ["chunked_attention", "full_attention", "full_attention", "full_attention"]
            },
        },
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", 1), "take a model of another family, such as llama or qwen3 (dstk families lists them)"],
    ),
    (
        {"model__overrides": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}},
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", 1), "take a model with another one"],
    ),
    (
        {"model__overrides": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}}},
        ["parallel.ulysses", "model.name_or_path"],
        [("parallel.ulysses", 1), "take a model with another one"],
    ),
    (
        {"train__engine": "ddp"},
        ["parallel.ulysses", "train.engine"],
        [("parallel.ulysses", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "fsdp"},
        ["parallel.ulysses", "train.engine"],
        [("parallel.ulysses", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "reference"},
        ["parallel.ulysses", "train.engine"],
        [("parallel.ulysses", 1), ("train.engine", "deepspeed")],
    ),
]


@pytest.mark.parametrize(("changes", "fields", "remedy"), REFUSED)
def test_what_cannot_run_is_one_conflict(changes: dict[str, object], fields: list[str], remedy: list[object]) -> None:
    check_conflict(recipe(**changes), fields, remedy)


RUNS: list[dict[str, object]] = [
    {},
    {"parallel__ulysses": 4},
    {"parallel__zero_stage": 0},
    {"parallel__zero_stage": 3, "parallel__offload_optimizer": "cpu", "parallel__offload_params": "cpu"},
    {"parallel__recompute": "full"},
    {"data__packing": "padded"},
    {"model__attn_implementation": "flash_attention_2"},
    {"model__name_or_path": "gpt2"},
    {"model__name_or_path": "mistral-7b", "model__overrides": {"sliding_window": 128}},
    {"model__name_or_path": "mistral-7b", "model__overrides": {"sliding_window": None}},
    {"model__name_or_path": "qwen2.5-0.5b"},
    {"model__name_or_path": "org/unknown"},
]


@pytest.mark.parametrize("changes", RUNS)
def test_what_runs_has_no_conflict(changes: dict[str, object]) -> None:
    assert recipe_problems(recipe(**changes), 8) == []


def test_code_of_a_models_own_is_refused_under_any_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (given,) = recipe_problems(recipe(model__name_or_path=str(tmp_path)))
    assert "brings its own code" in given


def test_a_model_known_only_at_launch_is_refused_before_it_is_built(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model of the hub: validating cannot see its config, training does."""
    import torch
    from transformers import BloomConfig, MistralConfig

    from toolkit.training import preflight

    unseen = make_recipe(model={"name_or_path": "org/unknown"}, parallel={"ulysses": 2}, data__tokenizer="org/unknown")
    assert recipe_problems(unseen) == []
    for config, remedy in (
        (BloomConfig(n_head=4, hidden_size=64), ("parallel.ulysses", 1)),
        (MistralConfig(sliding_window=8), ("data.seq_len", "8 or less")),
    ):
        monkeypatch.setattr(preflight, "load_config", lambda *_, _config=config, **__: _config)
        with refused(RecipeError, "parallel.ulysses", "model.name_or_path", remedy=remedy):
            preflight.check_model(unseen, torch.device("cpu"))


def test_the_default_window_of_a_family_counts(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the verified families only Mistral has one unless its config says so."""
    import torch

    from toolkit.parallel.tiny_model import default_config
    from toolkit.training import preflight

    windows = {name for name in ULYSSES_FAMILIES if getattr(default_config(name), "sliding_window", None)}
    assert windows == {"mistral"}
    monkeypatch.setattr(preflight, "load_config", lambda *_, **__: default_config("mistral"))
    long = make_recipe(
        model={"name_or_path": "org/unknown"}, parallel={"ulysses": 2}, data__seq_len=4098, data__tokenizer="org/x"
    )
    remedy = ("data.seq_len", "4096 or less")
    with refused(RecipeError, "parallel.ulysses", "model.name_or_path", remedy=remedy):
        preflight.check_model(long, torch.device("cpu"))


class TestUserConfig:
    """A DeepSpeed JSON beside a recipe with ulysses."""

    @pytest.mark.parametrize(
        ("user", "key", "decided_by"),
        [
            ({"seq_parallel_communication_data_type": "bf16"}, "seq_parallel_communication_data_type", "toolkit"),
            ({"zero_optimization": {"reduce_scatter": False}}, "zero_optimization.reduce_scatter", "toolkit"),
            ({"sequence_parallel_size": 4}, "sequence_parallel_size", "parallel.ulysses"),
            ({"data_parallel_size": 2}, "data_parallel_size", "parallel.dp"),
        ],
    )
    def test_what_changes_the_gradients_is_refused(self, user: dict[str, Any], key: str, decided_by: str) -> None:
        with refused(ConfigError, key) as found:
            merge_user_config(self.built(recipe(parallel__zero_stage=3)), user)
        assert decided_by in found[0].reason

    def test_without_ulysses_gradients_may_be_reduced_either_way(self) -> None:
        built = self.built(recipe(parallel__zero_stage=3, parallel__ulysses=1))
        user = {"zero_optimization": {"reduce_scatter": False}}
        assert not merge_user_config(built, user)["zero_optimization"]["reduce_scatter"]

    @staticmethod
    def built(given: Recipe) -> dict[str, Any]:
        layout = Layout(**given.parallel.layout_fields | {"dp": 1})
        job = Job(recipe=given, layout=layout, batch=given.resolve_batch(layout))
        return build(job, hidden_size=64)
