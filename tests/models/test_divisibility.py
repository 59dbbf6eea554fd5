"""How many ranks and stages a model's shape allows."""

import pytest

from toolkit.models.shape import ModelShape, families, find_config, names
from toolkit.models.support import misfits, tensor_parallel_sizes


def shape(**facts: int) -> ModelShape:
    config = {"num_attention_heads": 12, "num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 384}
    return ModelShape.from_config({"model_type": "llama", **config, **facts})


def named(name: str) -> ModelShape:
    config = find_config(name)
    assert config is not None
    return ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("facts", "sizes"),
    [
        ({}, [1, 2, 3, 4, 6, 12]),
        ({"num_key_value_heads": 4}, [1, 2, 4, 12]),
        ({"num_key_value_heads": 3}, [1, 3, 6, 12]),
        ({"num_key_value_heads": 2}, [1, 2, 4, 6, 12]),
        ({"num_key_value_heads": 1}, [1, 2, 3, 4, 6, 12]),
        ({"intermediate_size": 100}, [1, 2, 4]),
        ({"num_attention_heads": 1}, [1]),
        ({"hidden_size": 84, "vocab_size": 101}, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_heads_and_mlp_are_sharded_and_few_key_value_heads_replicated(facts: dict[str, int], sizes: list[int]) -> None:
    assert tensor_parallel_sizes(shape(**facts)) == sizes


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", [1, 2, 3, 4, 6, 12]), ("gpt2-xl", [1, 5, 25]), ("smollm2-135m", [1, 3])]
)
def test_tp_sizes_of_known_models(name: str, sizes: list[int]) -> None:
    assert tensor_parallel_sizes(named(name)) == sizes


@pytest.mark.parametrize("name", [name for name in names() if (find_config(name) or {})["model_type"] in families()])
def test_every_model_allows_one_rank_and_one_stage_per_layer(name: str) -> None:
    assert [*misfits(named(name), tp=1, pp=named(name).layers)] == []


@pytest.mark.parametrize(
    ("facts", "tp", "reason", "allowed"),
    [
        ({}, 5, "12 attention heads cannot be shared equally by 5 ranks", "1, 2, 3, 4, 6 or 12"),
        ({}, 24, "12 attention heads cannot be shared equally by 24 ranks", "1, 2, 3, 4, 6 or 12"),
        ({"num_attention_heads": 1}, 2, "1 attention head cannot be shared equally by 2 ranks", "1"),
        (
            {"num_key_value_heads": 4},
            6,
            "4 key-value heads can neither be shared equally by 6 ranks nor be repeated equally often on them",
            "1, 2, 4 or 12",
        ),
        ({"intermediate_size": 100}, 3, "an MLP of width 100 cannot be shared equally by 3 ranks", "1, 2 or 4"),
    ],
)
def test_a_tp_that_is_not_allowed_names_those_that_are(
    facts: dict[str, int], tp: int, reason: str, allowed: str
) -> None:
    assert [*misfits(shape(**facts), tp=tp)] == [("tp", reason, allowed)]


def test_of_many_sizes_the_nearest_are_named() -> None:
    (misfit,) = misfits(shape(num_attention_heads=96), tp=10)
    assert misfit.allowed == "3, 4, 6, 8, 12 or 16"


@pytest.mark.parametrize(("layers", "allowed"), [(4, "4 or less"), (1, "1")])
def test_every_stage_needs_a_layer(layers: int, allowed: str) -> None:
    (misfit,) = misfits(shape(num_hidden_layers=layers), pp=layers + 1)
    assert (misfit.axis, misfit.allowed) == ("pp", allowed)


def test_layers_need_not_divide_by_stages() -> None:
    assert [*misfits(shape(), pp=3)] == []


def test_misfits_of_both_axes_are_reported() -> None:
    assert [misfit.axis for misfit in misfits(shape(), tp=5, pp=5)] == ["tp", "pp"]
