"""parallel.ulysses against the rest of a recipe and against the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.dsconfig import build, merge_user_config
from toolkit.errors import ConfigError, RecipeError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file import problems
from toolkit.recipe_file.ulysses import VERIFIED


def recipe(**changes: object) -> Recipe:
    """A recipe on Llama with ulysses=2 and fields changed: `data__seq_len=127`."""
    values: dict[str, Any] = {
        "model": {"name_or_path": "llama-tiny"},
        "data": {"seq_len": 128},
        "parallel": {"ulysses": 2},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        values[section][field] = value
    return Recipe.model_validate_json(json.dumps(values))


REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"parallel__tp": 2},
        (
            "parallel.ulysses=2 with tp=2: DeepSpeed-Ulysses goes with dp and any zero_stage alone. "
            "Set parallel.ulysses=1, or tp=1 and pp=1."
        ),
    ),
    ({"parallel__pp": 2}, "parallel.ulysses=2 with pp=2: "),
    ({"parallel__tp": 2, "parallel__pp": 2}, "parallel.ulysses=2 with tp=2 pp=2: "),
    ({"parallel__tp": 2, "parallel__sequence_parallel": True}, "parallel.ulysses=2 with tp=2: "),
    ({"parallel__sequence_parallel": True}, "sequence_parallel=true with tp=1: "),
    (
        {"parallel__ulysses": 3, "data__seq_len": 126},
        (
            "parallel.ulysses=3 with model.name_or_path=llama-tiny: 4 attention heads cannot be shared equally by 3 "
            "ranks. Set parallel.ulysses to 1, 2 or 4."
        ),
    ),
    (
        {
            "parallel__ulysses": 4,
            "model__overrides": {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
        },
        (
            "parallel.ulysses=4 with model.name_or_path=llama-tiny: 6 key-value heads can neither be shared equally by "
            "4 ranks nor be repeated equally often on them. Set parallel.ulysses to 1, 2, 3, 6 or 12."
        ),
    ),
    (
        {"data__seq_len": 127},
        (
            "data.seq_len=127 with parallel.ulysses=2: each rank takes an equal part of a sequence. "
            "Set data.seq_len=126 or 128, or parallel.ulysses=1."
        ),
    ),
    (
        {"data__packing": "isolated"},
        (
            "data.packing=isolated with parallel.ulysses=2: DeepSpeed-Ulysses drops the mask that keeps documents "
            "apart. Set data.packing to packed or padded, or parallel.ulysses=1."
        ),
    ),
    (
        {"model__attn_implementation": "eager"},
        "model.attn_implementation=eager with parallel.ulysses=2: eager attention needs the mask",
    ),
    ({"train__compile": True}, "train.compile=true with parallel.ulysses=2: "),
    (
        {"model__name_or_path": "bloom-560m"},
        "parallel.ulysses=2 with model.name_or_path=bloom-560m: the family bloom was not found to train the same",
    ),
    (
        {"model__name_or_path": "mistral-7b", "model__overrides": {"sliding_window": 64}},
        (
            "parallel.ulysses=2 with model.name_or_path=mistral-7b: DeepSpeed-Ulysses drops the mask of its sliding "
            "window of 64 tokens. Set parallel.ulysses=1, or data.seq_len=64 or less."
        ),
    ),
    (
        {
            "model__name_or_path": "qwen3-tiny",
            "model__overrides": {"layer_types": ["chunked_attention"] + ["full_attention"] * 3},
        },
        "parallel.ulysses=2 with model.name_or_path=qwen3-tiny: DeepSpeed-Ulysses drops the masks of its layers",
    ),
    *(
        (
            {"model__overrides": {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}}},
            f"parallel.ulysses=2 with model.name_or_path=llama-tiny: its rotary embedding ({kind}) depends on the len",
        )
        for kind in ("dynamic", "longrope")
    ),
    *(
        ({"train__engine": engine}, f"parallel.ulysses=2 with train.engine={engine}: only the engine deepspeed shares")
        for engine in ("ddp", "fsdp", "reference")
    ),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_what_cannot_run_gives_one_line(changes: dict[str, object], problem: str) -> None:
    (given,) = problems(recipe(**changes))
    assert given.startswith(problem)


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
def test_what_runs_gives_no_line(changes: dict[str, object]) -> None:
    assert problems(recipe(**changes), 8) == []


def test_code_of_a_models_own_is_refused_under_any_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (given,) = problems(recipe(model__name_or_path=str(tmp_path)))
    assert "brings its own code" in given


def test_a_model_known_only_at_launch_is_refused_before_it_is_built(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model of the hub: validating cannot see its config, training does."""
    import torch
    from transformers import BloomConfig, MistralConfig

    from toolkit.train import preflight

    unseen = make_recipe(model={"name_or_path": "org/unknown"}, parallel={"ulysses": 2}, data__tokenizer="org/unknown")
    assert problems(unseen) == []
    for config, message in (
        (BloomConfig(n_head=4, hidden_size=64), "the family bloom"),
        (MistralConfig(sliding_window=8), "sliding window of 8 tokens"),
    ):
        monkeypatch.setattr(preflight, "load_config", lambda *_, _config=config, **__: _config)
        with pytest.raises(RecipeError, match=message):
            preflight.check_model(unseen, torch.device("cpu"))


def test_the_default_window_of_a_family_counts(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the verified families only Mistral has one unless its config says so."""
    import torch

    from toolkit.families.tiny import default_config
    from toolkit.train import preflight

    windows = {name for name in VERIFIED if getattr(default_config(name), "sliding_window", None)}
    assert windows == {"mistral"}
    monkeypatch.setattr(preflight, "load_config", lambda *_, **__: default_config("mistral"))
    long = make_recipe(
        model={"name_or_path": "org/unknown"}, parallel={"ulysses": 2}, data__seq_len=4098, data__tokenizer="org/x"
    )
    with pytest.raises(RecipeError, match="sliding window of 4096 tokens"):
        preflight.check_model(long, torch.device("cpu"))


class TestUserConfig:
    """A DeepSpeed JSON beside a recipe with ulysses."""

    @pytest.mark.parametrize(
        ("user", "message"),
        [
            ({"seq_parallel_communication_data_type": "bf16"}, "the toolkit makes it"),
            ({"zero_optimization": {"reduce_scatter": False}}, "the toolkit makes it true"),
            ({"sequence_parallel_size": 4}, "parallel.ulysses leaves it out"),
            ({"data_parallel_size": 2}, "parallel.dp leaves it out"),
        ],
    )
    def test_what_changes_the_gradients_is_refused(self, user: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            merge_user_config(self.built(recipe(parallel__zero_stage=3)), user)

    def test_without_ulysses_gradients_may_be_reduced_either_way(self) -> None:
        built = self.built(recipe(parallel__zero_stage=3, parallel__ulysses=1))
        user = {"zero_optimization": {"reduce_scatter": False}}
        assert not merge_user_config(built, user)["zero_optimization"]["reduce_scatter"]

    @staticmethod
    def built(given: Recipe) -> dict[str, Any]:
        layout = Layout(dp=1, **given.parallel.model_dump(exclude={"dp"}))
        return build(given, layout, given.resolve_batch(layout), hidden_size=64)
