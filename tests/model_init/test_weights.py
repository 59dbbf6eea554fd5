"""Weights: stored ones as transformers itself reads them, drawn ones from the family's initialisation; and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError

Make = Callable[..., Recipe]
Tensors = dict[str, torch.Tensor]

FAMILIES = (
    "gpt2",  # Conv1D
    "llama",
    "qwen3",
    "gemma3_text",
    "opt",
    "bloom",
    "phi",
    "phi3",  # fused projections
    "falcon",
    "gpt_neox",  # its head has another name in files
    "mixtral",  # each expert is stored by itself
    "gpt_oss",  # experts with biases and sinks
    "deepseek_v3",  # a buffer that is learnt
)


@pytest.fixture
def read(make_recipe: Make) -> Callable[..., Any]:
    """`build_model` on a folder with weights."""

    def build(folder: Path, **options: Any) -> Any:
        from toolkit.model_init.build_model import build_model

        section = {"name_or_path": str(folder), "init": "pretrained", "attn_implementation": "eager"}
        return build_model(make_recipe(model=section | options))

    return build


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """A tiny model of a family, saved by transformers; `change` edits the tensors in the file."""

    def save(family: str, change: Callable[[Tensors], Any] = lambda tensors: None, **config: Any) -> Path:
        from family_check import tiny_model

        model = tiny_model(family)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in model.state_dict() and buffer.is_floating_point():
                    buffer.add_(0.25)
        model.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return tmp_path

    return save


def theirs(folder: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def same(ours: Tensors, others: Tensors) -> bool:
    return ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_weights_are_those_that_transformers_reads(
    saved: Callable[..., Path], read: Callable[..., Any], family: str
) -> None:
    folder = saved(family)
    assert same(dict(read(folder).state_dict()), theirs(folder))


def test_names_may_lack_the_prefix_of_the_base_model(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    folder = saved("gpt2", strip)
    assert "wte.weight" in load_file(folder / "model.safetensors")
    assert same(dict(read(folder).state_dict()), theirs(folder))


def test_a_tied_model_needs_no_head_of_its_own(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    folder = saved("gpt2")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = read(folder)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_tied_model_may_be_stored_under_the_name_of_its_head(
    saved: Callable[..., Path], read: Callable[..., Any]
) -> None:
    folder = saved("gpt2", lambda tensors: tensors.update({"lm_head.weight": tensors.pop("transformer.wte.weight")}))
    assert same(dict(read(folder).state_dict()), theirs(folder))


def test_a_tied_model_that_is_stored_as_untied_is_refused(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    folder = saved("gpt2", lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))
    with refused(ModelError, "model.name_or_path", remedy=("model.overrides.tie_word_embeddings", False)):
        read(folder)
    assert read(folder, overrides={"tie_word_embeddings": False}).lm_head.weight.shape == (99, 64)


def test_weights_do_not_change_with_the_file(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    folder = saved("gpt2")
    model = read(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-(file.stat().st_size // 2), 2)
        stream.write(bytes(file.stat().st_size // 2))
    assert same(dict(model.state_dict()), before)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            drop("transformer.ln_f.bias"),
            "no weights for transformer.ln_f.bias. Save the model with the transformers version in use, or set",
        ),
        (
            lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(5)}),
            r"transformer.ln_f.bias is stored as \[5\], but the config makes it \[64\]. Correct its config.json, or",
        ),
        (
            lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(64).to(torch.float8_e4m3fn)}),
            "transformer.ln_f.bias is stored as F8_E4M3. Quantized weights cannot be trained",
        ),
    ],
)
def test_what_is_stored_wrongly_is_one_line(
    saved: Callable[..., Path], read: Callable[..., Any], change: Callable[[Tensors], Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read(saved("gpt2", change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "advice"),
    [
        ("gpt2", {"n_layer": 5}, "It stores 4 layers: remove the model.overrides that add some, or set"),
        ("llama", {"attention_bias": True}, "version in use, remove model.overrides that add parameters, or set"),
        ("gpt2", {"n_embd": 128}, "Remove the model.overrides that change sizes"),
    ],
)
def test_parameters_that_overrides_add_are_blamed_on_them(
    saved: Callable[..., Path], read: Callable[..., Any], name: str, overrides: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ModelError, match=advice) as caught:
        read(saved(name), overrides=overrides)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_cut_off_is_one_line(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    folder = saved("gpt2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .* Download the model again") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_several_is_named(saved: Callable[..., Path], read: Callable[..., Any]) -> None:
    folder = saved("gpt2")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-1\.safetensors is missing, but its index names it"):
        read(folder)


def test_what_only_a_constructor_sets_keeps_its_value(make_recipe: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from toolkit.model_init.build_model import build_model
    from toolkit.parallel.tiny_model import tiny_config

    config = tiny_config("apertus")
    config.save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers[0].mlp.act_fn
    ours = build_model(make_recipe(model={"name_or_path": str(tmp_path)})).model.layers[0].mlp.act_fn
    assert torch.equal(ours.alpha_p, wanted.alpha_p)
    assert torch.equal(ours.alpha_n, wanted.alpha_n)


def test_openai_gpt_keeps_what_its_layers_draw_on_construction(make_recipe: Make, tmp_path: Path) -> None:
    from toolkit.model_init.build_model import build_model
    from toolkit.parallel.tiny_model import tiny_config

    tiny_config("openai-gpt").save_pretrained(tmp_path)
    section = {"name_or_path": str(tmp_path), "attn_implementation": "eager"}
    block = build_model(make_recipe(model=section)).transformer.h[0]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attn.c_attn.bias.abs().max().item() == 0.0


def test_an_uninitialized_parameter_is_an_error(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel

    from toolkit.model_init.build_model import build_model

    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", lambda model, module: None)
    with refused(ModelError, "model.init", "model_type", remedy=("model.init", "pretrained")):
        build_model(make_recipe())


def test_vectors_that_a_constructor_fills_after_it_has_registered_them_are_remembered() -> None:
    """As nn.LayerNorm does: what is remembered at once would be memory that nobody has written."""
    from toolkit.model_init.model_modules import constructed_values, parameters_on_meta

    for _ in range(20):
        torch.full((4096,), torch.nan)  # what a fresh vector would find in its memory
        with parameters_on_meta():
            norm = torch.nn.LayerNorm(4096)
        assert norm.weight.is_meta
        assert constructed_values(norm.weight).eq(1).all()
        assert constructed_values(norm.bias).eq(0).all()


def test_a_shard_is_taken_in_runs_and_comes_out_whole() -> None:
    from toolkit.parallel.shard import Shard

    whole = torch.arange(30_000.0).reshape(10_000, 3)
    pieces = ((100, 8000), (9000, 1000))
    shard = Shard(name="w", shape=(10_000, 3), dim=0, pieces=pieces, padding=2)
    wanted = torch.cat([*(whole[start : start + length] for start, length in pieces), torch.zeros(2, 3)])
    assert torch.equal(shard.take(whole), wanted)
