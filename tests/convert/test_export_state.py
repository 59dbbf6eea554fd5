"""Whole training states out and in again, in every format and family: bit for bit. And what is refused."""

import argparse
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from daily import daily
from plain_deepspeed import load_universal
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, TrainingArguments

from toolkit.cli.main import main
from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.convert.distributed_checkpoint import DistributedCheckpoint
from toolkit.convert.distributed_writer import Box, write_distributed
from toolkit.convert.export_model import export_checkpoint
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run
from toolkit.convert.import_weights import find_step, import_weights, open_step
from toolkit.convert.megatron_states import MegatronForm
from toolkit.convert.training_state import MASTER
from toolkit.convert.weight_map import halves_to_pairs
from toolkit.errors import CheckpointError
from toolkit.parallel.tiny_model import tiny_config

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 321}
WIDE = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64},
    "llama": WIDE,
    "mistral": WIDE,
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 48},
    "qwen3": WIDE | {"tie_word_embeddings": True},
    "mixtral": WIDE | {"num_local_experts": 4},
    "qwen3_moe": WIDE | {"num_experts": 4, "moe_intermediate_size": 24},
}
FORMATS = ("dcp", "titan-hf", "megatron", "universal")
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
STEP = 4
Truth = dict[str, dict[str, torch.Tensor]]


def draw(config: PretrainedConfig) -> Truth:
    """Weights and moments of a model, every value another one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {
        name: {kind: torch.randn(parameter.shape) for kind in KINDS} for name, parameter in model.named_parameters()
    }


def save_as_accelerate(folder: Path, config: PretrainedConfig, truth: Truth) -> Path:
    """What `Trainer` leaves with FSDP, written by PyTorch."""
    states: dict[str, Any] = {
        name: {"step": torch.tensor(float(STEP)), **{kind: values[kind] for kind in KINDS[1:]}}
        for name, values in truth.items()
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    weights = {name: values[MASTER] for name, values in truth.items()}
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    optimizer = {"state": states, "param_groups": [group]}
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    config.save_pretrained(folder)
    return folder


def make_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **SIZES, **FAMILIES[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)


def recipe_of(make_recipe: Callable[..., Recipe], model: Path) -> Recipe:
    return make_recipe(model={"name_or_path": str(model)}, schedule={"name": "constant"})


def assert_same(folder: Path, config: PretrainedConfig, truth: Truth) -> None:
    step = find_step(folder)
    assert step is not None
    state = open_step(step, config)
    assert (state.step, state.updates, state.kinds) == (STEP, STEP, KINDS[1:])
    for name, values in truth.items():
        for kind, value in values.items():
            assert torch.equal(state.read(kind, name), value), f"{kind} of {name}"


@pytest.mark.daily
@pytest.mark.parametrize("family", daily(list(FAMILIES), lambda i, family: family in ("llama", "mixtral")))
def test_a_state_comes_back_from_every_format_bit_for_bit(
    make_recipe: Callable[..., Recipe], tmp_path: Path, family: str
) -> None:
    config = make_config(family)
    truth = draw(config)
    theirs = save_as_accelerate(tmp_path / "theirs", config, truth)
    assert_same(theirs, config, truth)
    import_run(theirs, tmp_path / "ours", recipe_of(make_recipe, theirs))
    for form in FORMATS:
        if (family, form) == ("gpt2", "titan-hf"):
            continue  # torchtitan does not train it
        export_state(tmp_path / "ours", tmp_path / form, form=form, megatron=MegatronForm(vocabulary_multiple=64))
        assert_same(tmp_path / form, config, truth)
        import_weights(tmp_path / form, tmp_path / f"{form}-back")
        back = load_file(tmp_path / f"{form}-back" / "model.safetensors")
        assert all(torch.equal(back[name], values[MASTER]) for name, values in truth.items())


def test_shifted_masters_of_megatron_are_refused(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    config = make_config("llama")
    theirs = save_as_accelerate(tmp_path / "theirs", config, draw(config))
    import_run(theirs, tmp_path / "ours", recipe_of(make_recipe, theirs))
    export_state(tmp_path / "ours", tmp_path / "out", form="megatron")
    step = tmp_path / "out" / f"iter_{STEP:07d}"
    values = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in dcp.FileSystemReader(step).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(values, checkpoint_id=step, no_dist=True)
    last = values["optimizer.state.param.decoder.final_layernorm.weight"].view(-1)
    last[:-8] = last[8:].clone()
    last[-8:] = 0.0
    dcp.save(values, checkpoint_id=step, no_dist=True)
    with pytest.raises(CheckpointError, match=r"final_layernorm.weight is not decoder.final_layernorm.weight in fp32"):
        import_weights(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def load_into_deepspeed(folder: str, stage: int) -> Truth:
    """An engine with other weights, after it has loaded the universal checkpoint in `folder`."""
    config = AutoConfig.from_pretrained(folder)
    return load_universal(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_itself_loads_a_universal_checkpoint(
    make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], tmp_path: Path, stage: int
) -> None:
    config = make_config("llama")
    truth = draw(config)
    theirs = save_as_accelerate(tmp_path / "theirs", config, truth)
    import_run(theirs, tmp_path / "ours", recipe_of(make_recipe, theirs))
    export_state(tmp_path / "ours", tmp_path / "out", form="universal")
    loaded = ranks(load_into_deepspeed, 2, str(tmp_path / "out"), stage)[0]
    for name, values in truth.items():
        for kind, value in values.items():
            assert torch.equal(loaded[name][kind], value), f"{kind} of {name}"


def test_pytorch_itself_reads_what_is_written(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    config = make_config("llama")
    truth = draw(config)
    theirs = save_as_accelerate(tmp_path / "theirs", config, truth)
    import_run(theirs, tmp_path / "ours", recipe_of(make_recipe, theirs))
    export_state(tmp_path / "ours", tmp_path / "out", form="dcp")
    name = "layers.1.feed_forward.w2.weight"
    wanted: dict[str, Any] = {name: torch.empty(32, 48), "train_state.step": torch.tensor(0, dtype=torch.int32)}
    wanted["optimizer"] = {"state": {name: {"exp_avg": torch.empty(32, 48), "step": torch.tensor(0.0)}}}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(wanted[name], truth["model.layers.1.mlp.down_proj.weight"][MASTER])
    moment = wanted["optimizer"]["state"][name]["exp_avg"]
    assert torch.equal(moment, truth["model.layers.1.mlp.down_proj.weight"]["exp_avg"])
    assert int(wanted["train_state.step"]) == STEP


class NamedWeights(nn.Module):
    """Parameters with these names and shapes, in the order of the names."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def test_the_optimizer_of_torchtitan_loads_every_key(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    config = make_config("llama")
    truth = draw(config)
    theirs = save_as_accelerate(tmp_path / "theirs", config, truth)
    recipe = recipe_of(make_recipe, theirs)
    import_run(theirs, tmp_path / "ours", recipe)
    export_state(tmp_path / "ours", tmp_path / "out", form="dcp")
    entries = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    weights = NamedWeights(
        {
            key: entry.size
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(("optimizer.", "train_state."))
        }
    )
    optimizer = torch.optim.AdamW(weights.parameters(), lr=0.5, weight_decay=0.25)
    LambdaLR(optimizer, lambda step: 1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(weights, optimizer, options=options)
    # The loader raises where a key is missing.
    wanted: dict[str, Any] = {**weights.state_dict(), "optimizer": flat}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    set_optimizer_state_dict(weights, optimizer, wanted["optimizer"], options=options)
    matrix = "layers.1.feed_forward.w2.weight"
    state = optimizer.state[weights.get_parameter(matrix)]
    assert torch.equal(state["exp_avg_sq"], truth["model.layers.1.mlp.down_proj.weight"]["exp_avg_sq"])
    assert float(state["step"]) == STEP
    settings = recipe.optimizer
    loaded = wanted["optimizer"]
    assert loaded[f"param_groups.{matrix}.weight_decay"] == settings.weight_decay
    assert loaded["param_groups.norm.weight.weight_decay"] == 0.0
    assert loaded[f"param_groups.{matrix}.betas"] == tuple(settings.betas)
    assert loaded[f"param_groups.{matrix}.initial_lr"] == settings.lr
    assert loaded[f"param_groups.{matrix}.decoupled_weight_decay"]


def test_rows_of_query_and_key_turn_alike_under_both_conventions() -> None:
    """Rotate pairs as torchtitan does, by complex numbers, and halves as Hugging Face does: the same attention."""
    heads, width, positions = 2, 8, 5
    torch.manual_seed(0)
    inputs = torch.randn(positions, 6, dtype=torch.float64)
    query, key = torch.randn(2, heads * width, 6, dtype=torch.float64)
    angles = torch.outer(torch.arange(positions), 100.0 ** (-torch.arange(0, width, 2) / width)).double()

    def by_halves(weight: torch.Tensor) -> torch.Tensor:
        first, second = (inputs @ weight.T).view(positions, heads, 2, width // 2).unbind(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def by_pairs(weight: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((inputs @ weight.T).view(positions, heads, width // 2, 2))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(2)

    expected = torch.einsum("qhd,khd->hqk", by_halves(query), by_halves(key))
    found = torch.einsum(
        "qhd,khd->hqk", by_pairs(halves_to_pairs(query, heads=heads)), by_pairs(halves_to_pairs(key, heads=heads))
    )
    torch.testing.assert_close(found, expected)


def test_an_import_has_one_part_and_one_tensor_in_memory(tmp_path: Path) -> None:
    tensor = torch.randn(64, 32)
    dcp.save({"large": torch.randn(512, 512), "small": tensor}, checkpoint_id=tmp_path, no_dist=True)
    read: list[int] = []
    checkpoint = DistributedCheckpoint(tmp_path, observe=read.append)
    assert read == []
    assert torch.equal(checkpoint.read("small"), tensor)
    (nbytes,) = read
    assert tensor.nbytes <= nbytes < tensor.nbytes + 4096, "more was read than the part of this tensor"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    config = make_config("llama")
    return save_as_accelerate(tmp_path / "theirs", config, draw(config))


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def truncate(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[:40] = bytes(40)
    file.write_bytes(content)


def flip_a_value(file: Path, values: torch.Tensor) -> None:
    content = bytearray(file.read_bytes())
    begin = content.index(values.numpy().tobytes())
    content[begin] ^= 0xFF
    file.write_bytes(content)


def write_payload(file: Path) -> None:
    file.write_bytes(pickle.dumps(Payload(file.parent / "ran")))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (".metadata", Path.unlink, r"pytorch_model_fsdp_0: \.metadata is missing, .* Copy all files"),
        (".metadata", lambda file: truncate(file, 300), "not an index of torch.distributed.checkpoint"),
        (".metadata", lambda file: file.write_bytes(b"text"), "not an index of torch.distributed.checkpoint"),
        (".metadata", lambda file: file.write_bytes(pickle.dumps({"a": 1})), "it is not an index"),
        (".metadata", write_payload, r"it asks for posix\.mkdir, which could run anything"),
        ("__0_0.distcp", Path.unlink, "is missing"),
        ("__0_0.distcp", lambda file: truncate(file, 5000), "it is truncated"),
        ("__0_0.distcp", flip, "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_line(theirs: Path, tmp_path: Path, file: str, damage: Any, message: str) -> None:
    damage(theirs / "pytorch_model_fsdp_0" / file)
    with pytest.raises(CheckpointError, match=message) as raised:
        import_weights(theirs, tmp_path / "out")
    assert str(raised.value).isprintable()
    assert not (tmp_path / "out").exists()
    assert not (theirs / "pytorch_model_fsdp_0" / "ran").exists()


@pytest.mark.parametrize("kind", ["exp_avg", MASTER])
@pytest.mark.parametrize("form", ["fsdp", "universal"])
def test_a_flipped_value_is_refused_with_the_name_of_its_file(
    make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path, form: str, kind: str
) -> None:
    recipe = recipe_of(make_recipe, theirs)
    name = "model.layers.1.mlp.down_proj.weight"
    values = draw(make_config("llama"))[name][kind]
    if form == "fsdp":
        source = theirs
        file = theirs / ("pytorch_model_fsdp_0" if kind == MASTER else "optimizer_0") / "__0_0.distcp"
    else:
        source = tmp_path / "universal"
        import_run(theirs, tmp_path / "ours", recipe)
        export_state(tmp_path / "ours", source, form="universal")
        file = source / f"global_step{STEP}_universal" / "zero" / name / f"{kind}.pt"
    flip_a_value(file, values)
    with pytest.raises(CheckpointError, match=f"{file.name}: .* damaged.* are not those that were saved") as raised:
        import_run(source, tmp_path / "again", recipe)
    assert str(raised.value).isprintable()
    assert not (tmp_path / "again").exists()


def test_a_part_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(64, 32)
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"small": tensor}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(has_checksums)
    assert torch.equal(DistributedCheckpoint(tmp_path).read("small"), tensor)


@pytest.mark.parametrize(
    ("form", "source", "step"),
    [("megatron", f"iter_{STEP:07d}", f"iter_{STEP:07d}"), ("dcp", "step-4", "step-4"), ("dcp", ".", "step-4")],
)
def test_a_step_without_its_index_is_refused_as_that(
    make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path, form: str, source: str, step: str
) -> None:
    import_run(theirs, tmp_path / "ours", recipe_of(make_recipe, theirs))
    out = tmp_path / "out"
    export_state(tmp_path / "ours", out if form == "megatron" else out / step, form=form)
    torch.save({}, out / step / "rng_state.pth")
    (out / step / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=rf"{step}: \.metadata is missing, .* Copy all files") as raised:
        import_weights(out / source, tmp_path / "again", model=theirs)
    assert str(raised.value).isprintable()


def test_another_model_is_refused_by_the_tensor_that_differs(theirs: Path, tmp_path: Path) -> None:
    make_config("gpt2").save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"it has no transformer\.wte\.weight"):
        import_weights(theirs, tmp_path / "out", model=tmp_path / "other")


def test_a_missing_moment_is_named(theirs: Path, tmp_path: Path) -> None:
    config = make_config("llama")
    truth = draw(config)
    name = "model.norm.weight"
    del truth[name]["exp_avg_sq"]
    states = {
        other: {"step": torch.tensor(4.0), **{kind: value for kind, value in values.items() if kind != MASTER}}
        for other, values in truth.items()
    }
    dcp.save({"optimizer": {"state": states}}, checkpoint_id=tmp_path / "new", no_dist=True)
    for file in (tmp_path / "new").iterdir():
        file.replace(theirs / "optimizer_0" / file.name)
    with pytest.raises(CheckpointError, match=f"it has no exp_avg_sq of {name}, which other parameters have"):
        import_weights(theirs, tmp_path / "out")


def test_an_optimizer_without_its_index_is_refused_as_that(
    make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path
) -> None:
    (theirs / "optimizer_0" / ".metadata").unlink()
    recipe = recipe_of(make_recipe, theirs)
    with pytest.raises(CheckpointError, match=r"optimizer_0: \.metadata is missing, .* Copy all files") as raised:
        import_run(theirs, tmp_path / "ours", recipe)
    assert str(raised.value).isprintable()
    import_weights(theirs, tmp_path / "out")  # which asks for no optimizer


def seed_notices(recipe: Recipe, source: Path, destination: Path) -> list[str]:
    return [notice for notice in import_run(source, destination, recipe).notices if "its seed" in notice]


def test_another_seed_of_the_trainer_is_said(make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path) -> None:
    recipe = recipe_of(make_recipe, theirs)
    assert seed_notices(recipe, theirs, tmp_path / "none") == []
    file = theirs / "training_args.bin"
    torch.save(TrainingArguments(str(tmp_path / "output"), seed=7, use_cpu=True), file)
    (notice,) = seed_notices(recipe, theirs, tmp_path / "other")
    assert notice.startswith("its seed was 7, by the recipe train.seed is 1, which draws samples and dropout")
    assert seed_notices(recipe.changed({"train": {"seed": 7}}), theirs, tmp_path / "same") == []
    file.write_bytes(b"text")
    (notice,) = seed_notices(recipe, theirs, tmp_path / "damaged")
    assert notice.startswith("its seed is not known: ")
    assert notice.isprintable()


def test_another_seed_of_megatron_is_said(make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path) -> None:
    recipe = recipe_of(make_recipe, theirs)
    import_run(theirs, tmp_path / "ours", recipe)
    export_state(tmp_path / "ours", tmp_path / "megatron", form="megatron")
    (file,) = (tmp_path / "megatron").glob("iter_*/common.pt")
    common = torch.load(file, weights_only=False)
    torch.save(common | {"args": argparse.Namespace(seed=1234, lr=1e-3)}, file)
    (notice,) = seed_notices(recipe, tmp_path / "megatron", tmp_path / "again")
    assert notice.startswith("its seed was 1234, by the recipe train.seed is 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "dcp", "--dtype", "bf16"), "--dtype with --format dcp"),
        (("--format", "dcp", "--pad-vocabulary", "8"), "only Megatron-Core pads it"),
        (("--format", "dcp", "--transformer-impl", "local"), "--transformer-impl with --format dcp: it is of Megatron"),
        (("--expert-parallel",), "--expert-parallel with --format hf: it is of Megatron-Core. Omit it."),
        (("--format", "megatron"), "its names in Megatron-Core are not known here"),
    ],
)
def test_what_a_format_cannot_hold_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    config = AutoConfig.for_model("stablelm", **SIZES, intermediate_size=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "trains models with model.embed_tokens and model.layers. Use --format dcp"),
        ("qwen2_moe", "where torchtitan stores model.layers.0.mlp.shared_expert.gate_proj.weight is not known here"),
        ("gpt_oss", "where torchtitan stores model.layers.0.mlp.router.weight is not known here"),
    ],
)
def test_a_model_that_torchtitans_backend_names_otherwise_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], family: str, message: str
) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    model.save_pretrained(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--format", "titan-hf"])
    assert stopped.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_weights_are_read_beside_buckets_of_several_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's own default (dp_reshardable) for a mixture, whose experts have an optimizer of their own."""

    def write_with_buckets(directory: Path, boxes: list[Box], objects: Mapping[str, Any]) -> None:
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
        buckets = [
            Box(key=f"chained_{number}.{bucket}.exp_avg", shape=(8,), dtype=torch.float32, value=lambda: torch.ones(8))
            for number in (0, 1)
        ]
        write_distributed(directory, [*boxes, *buckets], objects)

    config = make_config("mixtral")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("toolkit.convert.export_state.write_distributed", write_with_buckets)
    export_state(tmp_path / "model", tmp_path / "theirs", form="megatron")
    step = find_step(tmp_path / "theirs")
    assert step is not None
    state = open_step(step, config)
    assert state.kinds == ()
    assert any("stored by buckets of a layout (dp_reshardable)" in notice for notice in state.notices)
    assert state.read(MASTER, "model.norm.weight").shape == (config.hidden_size,)


def test_optimizers_of_experts_are_for_mixtures_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Megatron-Core has one optimizer for a dense model, whatever its expert-model-parallel-size."""
    AutoModelForCausalLM.from_config(make_config("llama")).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "export",
                str(tmp_path / "model"),
                "-o",
                str(tmp_path / "out"),
                "--format",
                "megatron",
                "--expert-parallel",
            ]
        )
    assert stopped.value.code == 2
    error = capfd.readouterr().err
    assert "model_type=llama: it has no experts, which --expert-parallel is for" in error
    assert not (tmp_path / "out").exists()


def test_an_exported_run_has_a_model_card(make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path) -> None:
    recipe = recipe_of(make_recipe, theirs)
    import_run(theirs, tmp_path / "ours", recipe)
    (tmp_path / "ours" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "loss": {9 - i}}}\n' for i in range(1, 7))
    )
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert f"| Data | {recipe.data.source} |" in card
    assert f"{STEP} steps" in card
    assert "adamw" in card
    assert "| 1 | 8.0000 |" in card
    assert "| 4 | 5.0000 |" in card
    assert "| 5 |" not in card, "the curve goes on after the step of the checkpoint"


def test_the_commands_go_there_and_back(
    make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(dump_recipe(recipe_of(make_recipe, theirs)))
    places = {name: str(tmp_path / name) for name in ("ours", "out", "my.yaml")}
    for arguments in (
        ["import", str(theirs), "-o", places["ours"], "--recipe", places["my.yaml"]],
        ["export", places["ours"], "-o", places["out"], "--format", "megatron", "--pad-vocabulary", "64", "--verify"],
    ):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out, _ = capfd.readouterr()
        assert stopped.value.code == 0
    assert "all logits are the same" in out
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == str(STEP)
