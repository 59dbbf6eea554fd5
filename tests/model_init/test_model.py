"""Building models: the family's own initial distribution, the same draw everywhere, ties, special tokens, refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import refused

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError
from toolkit.model_init.build_model import build_model, load_config
from toolkit.parallel.tiny_model import tiny_config
from toolkit.seeds import derive_seed

Make = Callable[..., Recipe]
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 320}
WIDE = {"n_embd": 256, "n_head": 4, "n_layer": 8, "vocab_size": 2000, "n_positions": 64}


def test_weights_have_the_distribution_that_transformers_gives(make_recipe: Make) -> None:
    from transformers import AutoModelForCausalLM

    recipe = make_recipe(model={"name_or_path": "gpt2-tiny", "overrides": WIDE})
    ours = dict(build_model(recipe).named_parameters())
    theirs = dict(AutoModelForCausalLM.from_config(load_config(recipe.model)).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.mean().item() == pytest.approx(theirs[name].mean().item(), abs=1e-3), name
        assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05, abs=1e-6), name


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("llama", "sdpa"), ("gpt2", "sdpa"), ("gemma2", "eager"), ("bloom", "eager"), ("gptj", "eager")],
)
def test_attention_is_by_default_what_the_family_has(
    make_recipe: Make, tmp_path: Path, family: str, chosen: str
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    model = build_model(make_recipe(model={"name_or_path": str(tmp_path)}))
    assert model.config._attn_implementation == chosen


def test_attention_that_a_family_lacks_is_a_short_line(make_recipe: Make, tmp_path: Path) -> None:
    tiny_config("gemma2").save_pretrained(tmp_path)
    with refused(ModelError, "model.name_or_path") as found:
        build_model(make_recipe(model={"name_or_path": str(tmp_path), "attn_implementation": "sdpa"}))
    assert len(str(found[0]).replace(str(tmp_path), "")) < 330


def test_no_two_layers_draw_the_same_weights(make_recipe: Make) -> None:
    layers = build_model(make_recipe()).transformer.h
    assert not torch.equal(layers[0].mlp.c_fc.weight, layers[1].mlp.c_fc.weight)


def test_the_global_random_state_is_left_alone(make_recipe: Make) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build_model(make_recipe())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_as_the_config_says(make_recipe: Make, tied: bool) -> None:
    model = build_model(make_recipe(overrides__tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.transformer.wte.weight) is tied


def test_a_new_model_takes_its_special_tokens_from_the_tokenizer(make_recipe: Make) -> None:
    config = build_model(make_recipe(), eos_id=7).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, 7, None)


@pytest.mark.parametrize("family", ["roberta", "camembert", "xlm-roberta-xl", "data2vec-text", "xlm"])
def test_a_new_model_of_a_family_that_looks_for_padding_numbers_every_token(
    make_recipe: Make, tmp_path: Path, family: str
) -> None:
    """RoBERTa's positions begin after the padding token's id, which would also be a token like all others here."""
    tiny_config(family).save_pretrained(tmp_path)
    model = build_model(make_recipe(model={"name_or_path": str(tmp_path)})).eval()
    ids = torch.arange(2 * 24).reshape(2, 24)  # the padding token's id of the family's default among them
    positions = torch.arange(24).expand(2, 24)
    logits = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, model(input_ids=ids, position_ids=positions, use_cache=False).logits)


def test_every_embedding_is_trained(make_recipe: Make) -> None:
    model = build_model(make_recipe(model={"name_or_path": "llama-tiny", "overrides": SMALL}), eos_id=0)
    assert model.get_input_embeddings().padding_idx is None


def test_every_embedding_is_trained_where_the_config_insists_on_a_padding_token(
    make_recipe: Make, tmp_path: Path
) -> None:
    tiny_config("modernbert-decoder").save_pretrained(tmp_path)
    embedding = build_model(make_recipe(model={"name_or_path": str(tmp_path)}), eos_id=0).get_input_embeddings()
    assert embedding.padding_idx is None
    assert embedding.weight.any(dim=1).all()


def test_what_has_parameters_is_handed_over_once_and_the_model_last(make_recipe: Make) -> None:
    seen: list[str] = []
    build_model(make_recipe(), on_layer=lambda module: seen.append(type(module).__name__))
    assert seen == [
        *["GPT2Block"] * 2,
        *["Embedding"] * 2,  # tokens and positions
        "LayerNorm",
        "Linear",
        "GPT2LMHeadModel",
    ]


def test_only_one_layer_is_materialised_before_it_is_handed_over(make_recipe: Make) -> None:
    """What lets a rank shard as it goes: when a layer arrives, the later ones are still without memory."""
    recipe = make_recipe(overrides__n_layer=4)
    counts: list[int] = []

    def on_layer(module: torch.nn.Module) -> None:
        if isinstance(module, GPT2Block):
            counts.append(sum(parameter.is_meta for parameter in roots[0].parameters()))

    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    from toolkit.model_init import build_model as module_under_test

    roots: list[torch.nn.Module] = []
    original = module_under_test.initialize

    def spy(model: torch.nn.Module, **options: object) -> None:
        roots.append(model)
        original(model, **options)  # type: ignore[arg-type]

    module_under_test.initialize = spy  # type: ignore[assignment]
    try:
        build_model(recipe, on_layer=on_layer)
    finally:
        module_under_test.initialize = original
    a_layer = counts[0] - counts[1]
    assert counts == [counts[0] - i * a_layer for i in range(4)]
    assert a_layer == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_cast_and_buffers_are_not(make_recipe: Make, dtype: torch.dtype) -> None:
    model = build_model(make_recipe(model={"name_or_path": "llama-tiny", "overrides": SMALL}), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_an_override_that_the_family_does_not_have_names_the_nearest(make_recipe: Make) -> None:
    with refused(ModelError, "model.overrides.resid_prop", remedy="Did you mean resid_pdrop?"):
        load_config(make_recipe(overrides__resid_prop=0.0).model)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3-tiny", {"num_hidden_layers": 6}),
        ("llama-3-8b", {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 320}),
        ("llama-tiny", {"hidden_size": 192, "num_attention_heads": 8}),
        ("gpt2-tiny", {"hidden_size": 64}),
    ],
)
def test_what_a_config_derives_follows_an_override(make_recipe: Make, name: str, overrides: dict) -> None:
    from toolkit.models.shape import ModelShape, find_config, with_overrides

    recipe = make_recipe(model={"name_or_path": name, "overrides": overrides})
    config = load_config(recipe.model)
    assert len(getattr(config, "layer_types", None) or [0] * config.num_hidden_layers) == config.num_hidden_layers
    described = ModelShape.from_config(with_overrides(find_config(name), overrides))
    assert described == ModelShape.from_config(config.to_dict())
    build_model(recipe)


def test_an_unknown_name_is_refused_with_the_nearest(make_recipe: Make) -> None:
    with refused(ModelError, "model.name_or_path") as found:
        load_config(make_recipe(model={"name_or_path": "gpt2-mediun"}).model)
    assert found[0].remedy[0].startswith("Did you mean gpt2-medium or")


@pytest.mark.parametrize(("init", "read"), [("pretrained", ["openai-community/gpt2"]), ("random", [])])
def test_published_weights_come_with_the_config_of_the_hub(make_recipe: Make, monkeypatch, init, read) -> None:
    from transformers import AutoConfig

    asked: list[str] = []
    monkeypatch.setattr(
        "toolkit.model_init.build_model.AutoConfig.from_pretrained",
        lambda name, **_: asked.append(name) or AutoConfig.for_model("gpt2", bos_token_id=7),
    )
    config = load_config(make_recipe(model={"name_or_path": "openai-community/gpt2", "init": init}).model)
    assert asked == read
    assert (config.bos_token_id == 7) == bool(read)


def test_a_hub_name_that_cannot_be_reached_is_one_line(make_recipe: Make) -> None:
    with refused(ModelError, "model.name_or_path"):
        load_config(make_recipe(model={"name_or_path": "someone/some-model"}).model)


def test_pretrained_without_weights_is_one_line(make_recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}))
    recipe = make_recipe(model={"name_or_path": str(tmp_path), "init": "pretrained"})
    with refused(ModelError, "model.init", "model.name_or_path", remedy=("model.init", "random")):
        build_model(recipe)


def test_derived_seeds_are_the_same_in_every_process_and_differ_by_purpose() -> None:
    assert derive_seed("dropout", 1, 2) == 262519663188852751
    assert len({derive_seed("dropout", 0, step) for step in range(1000)}) == 1000
    assert derive_seed("a", 12) != derive_seed("a", 1, 2)


@pytest.mark.parametrize(
    ("family", "buffer", "dtype"),
    [
        ("openai-gpt", "attn.bias", torch.bfloat16),
        ("xglm", "embed_positions.weights", torch.bfloat16),
        ("minimax", "slope_rate", torch.bfloat16),
        ("minimax", "inv_freq", torch.float32),
    ],
)
def test_weights_in_16_bits_meet_no_buffers_in_32(
    make_recipe: Make, tmp_path: Path, family: str, buffer: str, dtype: torch.dtype
) -> None:
    """Layers of these families multiply activations by buffers; rotary frequencies are too coarse in 16 bits."""
    tiny_config(family).save_pretrained(tmp_path)
    model = build_model(make_recipe(model={"name_or_path": str(tmp_path)}), dtype=torch.bfloat16)
    assert {value.dtype for name, value in model.named_buffers() if name.endswith(buffer)} == {dtype}
    ids = torch.arange(12).reshape(1, 12)
    assert model(input_ids=ids, use_cache=False).logits.isfinite().all()
