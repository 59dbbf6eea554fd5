"""Damaged, incomplete and foreign training states, to `dstk import`: one line, exit code 2, and nothing written."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daily import daily
from plain_deepspeed import train_and_save
from safetensors.torch import load_file, save_file
from test_export_state import STEP, draw, make_config, save_as_accelerate
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from toolkit.checkpoint.reader import StoredTensor
from toolkit.cli.main import main
from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.convert import distributed_writer
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run

Damage = Callable[[Path], None]
ITERATION = f"iter_{STEP:07d}"
TAG = f"global_step{STEP}_universal"
MOST_CHARACTERS = 400
DOWN = "model.layers.1.mlp.down_proj.weight"


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A state of a program, what is done to it, and what the message says. `source`: what is imported of it."""

    of: str
    damage: Damage
    says: str
    source: str = "."


def emptied(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(b"")

    return damage


def removed(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    return damage


def cut(name: str, nbytes: int) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:nbytes])

    return damage


def written(name: str, content: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def looping(name: str) -> Damage:
    """A link that leads to itself."""

    def damage(folder: Path) -> None:
        removed(name)(folder)
        path = folder / name
        path.symlink_to(path.name)

    return damage


def a_directory(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def fields(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return damage


def saved(name: str, change: Callable[[Any], Any]) -> Damage:
    """A file of torch.save with other content."""

    def damage(folder: Path) -> None:
        (file,) = folder.glob(name)
        torch.save(change(torch.load(file, weights_only=False)), file)

    return damage


def merged(*keys: Any, **changes: Any) -> Callable[[Any], Any]:
    """Fields of the mapping that is found under `keys`, replaced."""

    def change(content: Any) -> Any:
        inner = content
        for key in keys:
            inner = inner[key]
        inner.update(changes)
        return content

    return change


def value_set(*keys: Any, value: Any) -> Callable[[Any], Any]:
    def change(content: Any) -> Any:
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value(inner[keys[-1]]) if callable(value) else value
        return content

    return change


def stored(place: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """A directory in PyTorch's format with other tensors."""

    def damage(folder: Path) -> None:
        path = folder / place
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        values = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(dict(values), checkpoint_id=path, no_dist=True)
        for file in (*path.glob("*.distcp"), path / ".metadata"):
            file.unlink()
        dcp.save(change(values), checkpoint_id=path, no_dist=True)

    return damage


def each(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(values: dict[str, Any]) -> dict[str, Any]:
        (name,) = [name for name in values if name.endswith(key)]
        values[name] = change(values[name]).contiguous()
        return values

    return changed


def added(**tensors: torch.Tensor) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: values | {name.replace("__", "."): value for name, value in tensors.items()}


def with_nan(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[3] = torch.nan
    return value


def with_infinity(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[3] = torch.inf
    return value


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(-1, -2)


def weights(change: Callable[[dict[str, torch.Tensor]], Any], name: str = "model.safetensors") -> Damage:
    def damage(folder: Path) -> None:
        values = load_file(folder / name)
        change(values)
        save_file(values, folder / name, metadata={"format": "pt"})

    return damage


def drop_middle(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.narrow(dim, 0, value.shape[dim] - 1)


def one_more(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: torch.cat([value, value.narrow(dim, 0, 1)], dim=dim)


FSDP = "pytorch_model_fsdp_0"
ZERO = f"{TAG}/zero/{DOWN}"
BAD: tuple[Bad, ...] = (
    # FSDP, by the Trainer and accelerate
    Bad(of="fsdp", damage=emptied(f"{FSDP}/.metadata"), says="not an index"),
    Bad(of="fsdp", damage=emptied(f"{FSDP}/__0_0.distcp"), says="truncated"),
    Bad(of="fsdp", damage=a_directory(f"{FSDP}/.metadata"), says=".metadata"),
    Bad(of="fsdp", damage=a_directory(f"{FSDP}/__0_0.distcp"), says="__0_0.distcp"),
    Bad(of="fsdp", damage=looping(f"{FSDP}/.metadata"), says=FSDP),
    Bad(of="fsdp", damage=looping(f"{FSDP}/__0_0.distcp"), says="__0_0.distcp"),
    Bad(of="fsdp", damage=looping(FSDP), says="fsdp"),
    Bad(of="fsdp", damage=emptied("trainer_state.json"), says="trainer_state.json"),
    Bad(of="fsdp", damage=fields("trainer_state.json", global_step=-3), says="global_step"),
    Bad(of="fsdp", damage=fields("trainer_state.json", global_step="4"), says="global_step"),
    Bad(of="fsdp", damage=fields("trainer_state.json", global_step=10**30), says="global_step"),
    Bad(of="fsdp", damage=stored(FSDP, each(DOWN, transposed)), says=f"{DOWN} [48, 32]"),
    Bad(of="fsdp", damage=stored(FSDP, each(DOWN, torch.Tensor.long)), says="int64"),
    Bad(of="fsdp", damage=stored(FSDP, each(DOWN, with_nan)), says="not finite"),
    Bad(
        of="fsdp",
        damage=stored(FSDP, added(**{f"model__{DOWN.replace('.1.', '.2.')}".replace(".", "__"): torch.zeros(32, 48)})),
        says="layers.2",
    ),
    Bad(of="fsdp", damage=stored("optimizer_0", each(f"{DOWN}.exp_avg", with_nan)), says="not finite"),
    Bad(of="fsdp", damage=stored("optimizer_0", each(f"{DOWN}.exp_avg_sq", with_infinity)), says="not finite"),
    Bad(of="fsdp", damage=stored("optimizer_0", each(f"{DOWN}.exp_avg", transposed)), says="[48, 32]"),
    Bad(
        of="fsdp",
        damage=stored("optimizer_0", each("embed_tokens.weight.step", lambda value: torch.tensor(torch.nan))),
        says="step",
    ),
    Bad(
        of="fsdp",
        damage=stored("optimizer_0", each("embed_tokens.weight.step", lambda value: torch.tensor(-4.0))),
        says="step",
    ),
    Bad(
        of="fsdp",
        damage=stored("optimizer_0", each("embed_tokens.weight.step", lambda value: torch.zeros(0))),
        says="step",
    ),
    Bad(of="fsdp", damage=emptied("optimizer_0/.metadata"), says="not an index"),
    # torchtitan
    Bad(of="dcp", damage=removed("__0_0.distcp"), says="is missing"),
    Bad(of="dcp", damage=stored(".", each("train_state.step", lambda value: torch.tensor(-1))), says="step"),
    Bad(
        of="dcp",
        damage=stored(".", each("train_state.step", lambda value: torch.zeros(0, dtype=torch.int32))),
        says="step",
    ),
    Bad(
        of="dcp", damage=stored(".", each("layers.1.attention.qkv_linear.wq.weight", drop_middle(0))), says="wq.weight"
    ),
    Bad(
        of="dcp",
        damage=stored(
            ".", lambda values: {key: value for key, value in values.items() if "layers.1.feed_forward.w2" not in key}
        ),
        says="layers.1.feed_forward.w2.weight",
    ),
    Bad(of="dcp", damage=stored(".", added(layers__2__attention_norm__weight=torch.zeros(32))), says="layers.2"),
    # Megatron-Core
    Bad(of="megatron", damage=removed(f"{ITERATION}/common.pt"), says="common.pt"),
    Bad(of="megatron", damage=removed(f"{ITERATION}/metadata.json"), says="metadata.json"),
    Bad(of="megatron", damage=emptied(f"{ITERATION}/metadata.json"), says="metadata.json"),
    Bad(of="megatron", damage=written(f"{ITERATION}/metadata.json", "[1]"), says="metadata.json"),
    Bad(
        of="megatron", damage=fields(f"{ITERATION}/metadata.json", sharded_backend="fsdp_dtensor"), says="fsdp_dtensor"
    ),
    Bad(of="megatron", damage=cut(f"{ITERATION}/common.pt", 300), says="common.pt"),
    Bad(of="megatron", damage=emptied(f"{ITERATION}/common.pt"), says="common.pt"),
    Bad(of="megatron", damage=looping(f"{ITERATION}/common.pt"), says="common.pt"),
    Bad(of="megatron", damage=saved(f"{ITERATION}/common.pt", lambda content: [content]), says="common.pt"),
    Bad(of="megatron", damage=saved(f"{ITERATION}/common.pt", value_set("iteration", value=-1)), says="iteration"),
    Bad(of="megatron", damage=saved(f"{ITERATION}/common.pt", value_set("iteration", value="four")), says="iteration"),
    Bad(
        of="megatron",
        damage=saved(
            f"{ITERATION}/common.pt", value_set("optimizer", "optimizer", "param_groups", 0, "step", value=float("nan"))
        ),
        says="step",
    ),
    Bad(
        of="megatron",
        damage=saved(
            f"{ITERATION}/common.pt", value_set("optimizer", "optimizer", "param_groups", 0, "step", value=-1)
        ),
        says="step",
    ),
    Bad(of="megatron", damage=emptied("latest_checkpointed_iteration.txt"), says="latest_checkpointed_iteration.txt"),
    Bad(
        of="megatron",
        damage=written("latest_checkpointed_iteration.txt", b"\xff\xfe"),
        says="latest_checkpointed_iteration.txt",
    ),
    Bad(
        of="megatron",
        damage=written("latest_checkpointed_iteration.txt", "../../etc"),
        says="latest_checkpointed_iteration.txt",
    ),
    Bad(
        of="megatron",
        damage=written("latest_checkpointed_iteration.txt", "9" * 60),
        says="latest_checkpointed_iteration.txt",
    ),
    Bad(of="megatron", damage=looping("latest_checkpointed_iteration.txt"), says="megatron"),
    Bad(
        of="megatron",
        damage=stored(
            ITERATION,
            lambda values: {key: one_more(0)(value) if "layers" in key else value for key, value in values.items()},
        ),
        says="3",
    ),
    Bad(
        of="megatron",
        damage=stored(
            ITERATION,
            lambda values: {key: drop_middle(0)(value) if "layers" in key else value for key, value in values.items()},
        ),
        says="layers or experts",
    ),
    Bad(
        of="megatron",
        damage=stored(ITERATION, each("exp_avg.decoder.layers.mlp.linear_fc2.weight", transposed)),
        says="linear_fc2.weight",
    ),
    Bad(
        of="megatron",
        damage=stored(ITERATION, each("exp_avg_sq.decoder.layers.mlp.linear_fc2.weight", with_nan)),
        says="not finite",
    ),
    Bad(
        of="megatron",
        damage=stored(ITERATION, each("optimizer.state.param.embedding.word_embeddings.weight", torch.Tensor.long)),
        says="int64",
    ),
    Bad(
        of="megatron",
        damage=stored(ITERATION, each("exp_avg.embedding.word_embeddings.weight", lambda value: value[:300])),
        says="word_embeddings",
    ),
    Bad(
        of="mixtral",
        damage=stored(
            ITERATION,
            lambda values: {
                key: drop_middle(1)(value) if "experts.experts" in key else value for key, value in values.items()
            },
        ),
        says="layers or experts",
    ),
    Bad(
        of="mixtral",
        damage=stored(
            ITERATION,
            lambda values: {
                key: one_more(1)(value) if "experts.experts" in key else value for key, value in values.items()
            },
        ),
        says="5",
    ),
    # DeepSpeed, universal
    Bad(of="universal", damage=emptied(f"{ZERO}/fp32.pt"), says="fp32.pt"),
    Bad(of="universal", damage=removed(f"{ZERO}/exp_avg_sq.pt"), says="exp_avg_sq"),
    Bad(of="universal", damage=removed(ZERO), says=DOWN),
    Bad(of="universal", damage=looping(f"{ZERO}/fp32.pt"), says="fp32.pt"),
    Bad(of="universal", damage=saved(f"{ZERO}/fp32.pt", value_set("param", value=torch.Tensor.long)), says="fp32.pt"),
    Bad(of="universal", damage=saved(f"{ZERO}/fp32.pt", value_set("param", value=transposed)), says="[48, 32]"),
    Bad(of="universal", damage=saved(f"{ZERO}/exp_avg.pt", value_set("param", value=with_nan)), says="not finite"),
    Bad(
        of="universal",
        damage=saved(f"{TAG}/zero/model.embed_tokens.weight/step.pt", lambda value: torch.tensor(torch.nan)),
        says="step",
    ),
    Bad(
        of="universal",
        damage=saved(f"{TAG}/zero/model.embed_tokens.weight/step.pt", lambda value: torch.tensor(-2.0)),
        says="step",
    ),
    Bad(
        of="universal",
        damage=saved(f"{TAG}/zero/model.embed_tokens.weight/step.pt", lambda value: torch.zeros(3)),
        says="step",
    ),
    Bad(
        of="universal",
        damage=saved(f"{TAG}/mp_rank_00_model_states.pt", value_set("global_steps", value=-4)),
        says="global_steps",
    ),
    Bad(
        of="universal",
        damage=saved(f"{TAG}/mp_rank_00_model_states.pt", value_set("global_steps", value="4")),
        says="global_steps",
    ),
    Bad(of="universal", damage=emptied("latest_universal"), says="latest_universal"),
    Bad(of="universal", damage=removed(f"{TAG}/mp_rank_00_model_states.pt"), says="latest_universal"),
    # DeepSpeed, ZeRO 2
    Bad(of="zero2", damage=emptied("global_step3/mp_rank_00_model_states.pt"), says="mp_rank_00_model_states.pt"),
    Bad(
        of="zero2",
        damage=saved(
            "global_step3/*rank_1_*optim*",
            value_set("optimizer_state_dict", "single_partition_of_fp32_groups", 0, value=with_nan),
        ),
        says="not finite",
    ),
    Bad(
        of="zero2",
        damage=saved("global_step3/*rank_0_*optim*", value_set("optimizer_state_dict", "zero_stage", value="two")),
        says="global_step3",
    ),
    Bad(
        of="zero2",
        damage=saved("global_step3/*rank_0_*optim*", value_set("optimizer_state_dict", "partition_count", value=[])),
        says="global_step3",
    ),
    Bad(
        of="zero2",
        damage=saved(
            "global_step3/*rank_0_*optim*", value_set("optimizer_state_dict", "base_optimizer_state", value=7)
        ),
        says="global_step3",
    ),
    Bad(
        of="zero2",
        damage=saved("global_step3/mp_rank_00_model_states.pt", value_set("global_steps", value=-4)),
        says="global_steps",
    ),
    Bad(
        of="zero2",
        damage=saved("global_step3/mp_rank_00_model_states.pt", value_set("skipped_steps", value=10)),
        says="skipped_steps",
    ),
    # The Trainer, on one device
    Bad(of="trainer", damage=emptied("optimizer.pt"), says="optimizer.pt"),
    Bad(of="trainer", damage=looping("optimizer.pt"), says="trainer"),
    Bad(of="trainer", damage=saved("optimizer.pt", lambda content: [content]), says="optimizer.pt"),
    Bad(of="trainer", damage=saved("optimizer.pt", value_set("param_groups", 0, value=3)), says="optimizer.pt"),
    Bad(
        of="trainer",
        damage=saved("optimizer.pt", value_set("param_groups", 0, "params", 0, value=[1])),
        says="optimizer.pt",
    ),
    Bad(
        of="trainer",
        damage=saved("optimizer.pt", value_set("state", 1, "exp_avg_sq", value=torch.zeros(3))),
        says="exp_avg_sq",
    ),
    Bad(of="trainer", damage=saved("optimizer.pt", value_set("state", 1, "exp_avg", value=0.5)), says="exp_avg"),
    Bad(
        of="trainer", damage=saved("optimizer.pt", value_set("state", 1, "exp_avg", value=with_nan)), says="not finite"
    ),
    Bad(
        of="trainer",
        damage=saved("optimizer.pt", value_set("state", 0, "step", value=torch.tensor(torch.nan))),
        says="step",
    ),
    Bad(of="trainer", damage=saved("optimizer.pt", value_set("state", 0, "step", value=-1.0)), says="step"),
    Bad(of="trainer", damage=fields("trainer_state.json", global_step=-1), says="global_step"),
    Bad(of="trainer", damage=fields("trainer_state.json", global_step=None), says="global_step"),
    Bad(of="trainer", damage=weights(lambda values: values.update({DOWN: values[DOWN].t().contiguous()})), says=DOWN),
    Bad(of="trainer", damage=weights(lambda values: values[DOWN].view(-1)[0].fill_(torch.nan)), says="not finite"),
    Bad(of="trainer", damage=weights(lambda values: values.update({DOWN: values[DOWN].long()})), says="int64"),
    Bad(
        of="trainer",
        damage=weights(lambda values: values.update({DOWN.replace(".1.", ".2."): values[DOWN].clone()})),
        says="layers.2",
    ),
    # FSDP, gathered on one rank
    Bad(of="gathered", damage=emptied("pytorch_model_fsdp.bin"), says="pytorch_model_fsdp.bin"),
    Bad(of="gathered", damage=cut("optimizer.bin", 2000), says="optimizer.bin"),
    Bad(
        of="gathered",
        damage=saved("optimizer.bin", value_set("state", DOWN, "exp_avg", value=with_nan)),
        says="not finite",
    ),
    Bad(
        of="gathered",
        damage=saved("optimizer.bin", value_set("state", DOWN, "exp_avg", value=torch.Tensor.long)),
        says="int64",
    ),
    Bad(of="gathered", damage=saved("optimizer.bin", value_set("state", DOWN, "step", value="four")), says="step"),
    Bad(of="gathered", damage=saved("optimizer.bin", value_set("param_groups", value=7)), says="optimizer.bin"),
    Bad(
        of="gathered",
        damage=saved("pytorch_model_fsdp.bin", lambda content: content | {DOWN: content[DOWN].to_sparse()}),
        says=DOWN,
    ),
    Bad(
        of="gathered",
        damage=saved("pytorch_model_fsdp.bin", lambda content: content | {DOWN.replace(".1.", ".2."): content[DOWN]}),
        says="layers.2",
    ),
)


SHARDS = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


def mapped(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """An index that names other files."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / SHARDS).read_text())
        change(content["weight_map"])
        (folder / SHARDS).write_text(json.dumps(content))

    return damage


BAD_MODELS: tuple[Bad, ...] = (
    Bad(of="shards", damage=emptied(SHARDS), says="it is not JSON"),
    Bad(of="shards", damage=written(SHARDS, "[]"), says="it is not a JSON object but a list"),
    Bad(of="shards", damage=fields(SHARDS, weight_map=[1]), says=SHARDS),
    Bad(of="shards", damage=looping(SHARDS), says="shards"),
    Bad(of="shards", damage=a_directory(SHARDS), says=f"{SHARDS}: cannot be read"),
    Bad(of="shards", damage=mapped(lambda files: files.update({DOWN: "../x.safetensors"})), says=SHARDS),
    Bad(of="shards", damage=mapped(lambda files: files.update({DOWN: "gone.safetensors"})), says="gone.safetensors"),
    Bad(of="shards", damage=mapped(lambda files: files.update(dict.fromkeys(files, SHARD))), says=f"{SHARDS}: "),
    Bad(of="shards", damage=mapped(lambda files: files.update({DOWN: 7})), says=SHARDS),
    Bad(of="shards", damage=removed(SHARD), says=SHARD),
    Bad(of="shards", damage=emptied(SHARD), says=f"{SHARD}: cannot be read (0 bytes are too few"),
    Bad(of="shards", damage=cut(SHARD, 3000), says=f"{SHARD}: cannot be read (the tensors need"),
    Bad(of="shards", damage=looping(SHARD), says=SHARD),
    Bad(of="shards", damage=removed("config.json"), says="config.json"),
    Bad(of="shards", damage=emptied("config.json"), says="config.json"),
    Bad(of="shards", damage=looping("config.json"), says="config.json"),
    Bad(of="hf", damage=looping("model.safetensors"), says="hf"),
    Bad(of="hf", damage=a_directory("model.safetensors"), says="model.safetensors: cannot be read"),
    Bad(of="gguf", source="m.gguf", damage=emptied("m.gguf"), says="not a GGUF file"),
    Bad(of="gguf", source="m.gguf", damage=a_directory("m.gguf"), says="m.gguf"),
    Bad(of="gguf", source="m.gguf", damage=looping("m.gguf"), says="m.gguf"),
)


def save_as_trainer(folder: Path) -> None:
    """What the Trainer leaves on one device."""
    config = make_config("llama")
    truth = draw(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(truth[name]["fp32"])
    model.save_pretrained(folder)
    decaying = [name for name in truth if "norm" not in name]
    names = [*decaying, *(name for name in truth if "norm" in name)]
    states = {
        number: {"step": torch.tensor(float(STEP)), **{kind: truth[name][kind] for kind in ("exp_avg", "exp_avg_sq")}}
        for number, name in enumerate(names)
    }
    groups = [
        {"lr": 1e-3, "weight_decay": 0.1, "params": list(range(len(decaying)))},
        {"lr": 1e-3, "weight_decay": 0.0, "params": list(range(len(decaying), len(names)))},
    ]
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))


def save_as_gathered(folder: Path) -> None:
    """What one rank of FSDP gathered."""
    config = make_config("llama")
    truth = draw(config)
    folder.mkdir()
    config.save_pretrained(folder)
    torch.save({name: values["fp32"] for name, values in truth.items()}, folder / "pytorch_model_fsdp.bin")
    states = {
        name: {"step": torch.tensor(float(STEP)), **{kind: values[kind] for kind in ("exp_avg", "exp_avg_sq")}}
        for name, values in truth.items()
    }
    groups = [{"lr": 1e-3, "weight_decay": 0.1, "params": list(truth)}]
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.bin")


Made = Callable[[str], Path]
FORMS = {"dcp": "dcp", "megatron": "megatron", "mixtral": "megatron", "universal": "universal"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[..., list[Any]]) -> Callable[..., Path]:
    """An undamaged state, which is made once."""
    known: dict[str, Path] = {}

    def make(of: str, make_recipe: Callable[..., Recipe]) -> Path:
        if of in known:
            return known[of]
        home = tmp_path_factory.mktemp(of)
        folder = home / of
        family = "mixtral" if of == "mixtral" else "llama"
        if of == "fsdp":
            save_as_accelerate(folder, make_config(family), draw(make_config(family)))
        elif of == "trainer":
            save_as_trainer(folder)
        elif of == "gathered":
            save_as_gathered(folder)
        elif of in ("hf", "shards"):
            model = AutoModelForCausalLM.from_config(make_config(family))
            model.save_pretrained(folder, max_shard_size="90KB" if of == "shards" else "5GB")
        elif of == "gguf":
            folder.mkdir()
            (folder / "m.gguf").write_bytes(b"GGUF")
        elif of == "zero2":
            ranks(train_and_save, 2, str(folder), 2, "fp32", True, {}, None)
        else:
            source = save_as_accelerate(home / "source", make_config(family), draw(make_config(family)))
            import_run(source, home / "ours", recipe_of(make_recipe, family, home / "model"))
            export_state(home / "ours", folder, form=FORMS[of])
        known[of] = folder
        return folder

    return make


def recipe_of(make_recipe: Callable[..., Recipe], family: str, model: Path) -> Recipe:
    make_config(family).save_pretrained(model)
    return make_recipe(model={"name_or_path": str(model)}, schedule={"name": "constant"})


def tree(folder: Path) -> dict[str, int]:
    """All names below a folder, and sizes of files."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def fail(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must fail says on stderr."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    output = capfd.readouterr()
    assert stopped.value.code == 2, output
    assert output.out == ""
    return output.err


def import_damaged(
    bad: Bad, made: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path, capfd: Any
) -> str:
    folder = tmp_path / "work" / bad.of
    shutil.copytree(made(bad.of, make_recipe), folder)
    bad.damage(folder)
    arguments = ["import", str(folder / bad.source), "-o", str(tmp_path / "work" / "out")]
    if bad.of not in ("zero2", "hf", "shards", "gguf"):  # weights alone, or a smaller vocabulary than the recipe's text
        recipe = recipe_of(make_recipe, "mixtral" if bad.of == "mixtral" else "llama", tmp_path / "model")
        (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
        arguments += ["--recipe", str(tmp_path / "r.yaml")]
    before = tree(tmp_path / "work")
    said = fail(capfd, *arguments)
    assert tree(tmp_path / "work") == before
    assert sorted(os.listdir(tmp_path / "work")) == [bad.of]
    return said


ALL = BAD + BAD_MODELS


@pytest.mark.parametrize(
    "bad", daily(ALL, lambda i, bad: i % 8 == 0), ids=[f"{number}-{bad.of}" for number, bad in enumerate(ALL)]
)
def test_a_bad_state_is_one_line(
    bad: Bad,
    made: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = import_damaged(bad, made, make_recipe, tmp_path, capfd)
    assert said.count("\n") == 1, said
    assert said.removesuffix("\n").isprintable()
    assert len(said) <= MOST_CHARACTERS + len(str(tmp_path))
    assert said.startswith("error: ")
    assert bad.says in said


PLACES: dict[str, tuple[str, str]] = {
    "the input": ("fsdp", "not empty"),
    "below a file": ("fsdp/config.json/out", "config.json"),
    "a link that leads to itself": ("loop", "not a directory"),
    "below a link that leads to itself": ("loop/out", "loop"),
    "a link to nothing": ("dangling", "not a directory"),
    "where nobody writes": ("/proc/out", "/proc/out"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", daily(["import", "export"], lambda i, command: command == "import"))
def test_an_output_that_cannot_be_is_one_line(
    made: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    command: str,
    place: str,
) -> None:
    work = tmp_path / "work"
    shutil.copytree(made("fsdp", make_recipe), work / "fsdp")
    (work / "loop").symlink_to("loop")
    (work / "dangling").symlink_to("gone")
    recipe = recipe_of(make_recipe, "llama", tmp_path / "model")
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    if command == "import":
        arguments = ["import", str(work / "fsdp"), "--recipe", str(tmp_path / "r.yaml")]
    else:
        moved = work / "theirs"
        (work / "fsdp").rename(moved)
        import_run(moved, work / "fsdp", recipe)
        shutil.copy(moved / "config.json", work / "fsdp" / "config.json")
        arguments = ["export", str(work / "fsdp"), "--format", "megatron"]
    before = tree(work)
    output, says = PLACES[place]
    said = fail(capfd, *arguments, "-o", output if output.startswith("/") else str(work / output))
    assert tree(work) == before
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    assert says in said


@pytest.mark.parametrize("place", ["out", "optimizer_0/out"])
@pytest.mark.parametrize("has_recipe", [False, True])
def test_an_import_into_what_is_read_is_one_line(
    made: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    place: str,
    has_recipe: bool,
) -> None:
    folder = tmp_path / "fsdp"
    shutil.copytree(made("fsdp", make_recipe), folder)
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of(make_recipe, "llama", tmp_path / "model")))
    (tmp_path / "link").symlink_to("fsdp")
    recipe = ["--recipe", str(tmp_path / "r.yaml")] if has_recipe else []
    before = tree(tmp_path)
    for output in (folder / place, tmp_path / "link" / place):
        said = fail(capfd, "import", str(folder), "-o", str(output), *recipe)
        assert said.count("\n") == 1
        assert f"it is inside of {folder}, which is only read" in said
    assert tree(tmp_path) == before


@pytest.mark.parametrize("form", ["dcp", "megatron", "universal"])
def test_an_export_that_was_interrupted_leaves_nothing_and_can_be_repeated(
    made: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    recipe = recipe_of(make_recipe, "llama", tmp_path / "model")
    import_run(made("fsdp", make_recipe), tmp_path / "ours", recipe)
    before = tree(tmp_path)
    read = StoredTensor.clone
    count = 0

    def interrupt(self: StoredTensor, **given: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 20:
            raise KeyboardInterrupt
        return read(self, **given)

    with monkeypatch.context() as patched:
        patched.setattr(StoredTensor, "clone", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_state(tmp_path / "ours", tmp_path / "out", form=form)
    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()
    export_state(tmp_path / "ours", tmp_path / "out", form=form)
    import_run(tmp_path / "out", tmp_path / "again", recipe)


@pytest.mark.parametrize("form", ["dcp", "megatron"])
def test_a_disk_that_fills_up_during_an_export_is_one_line(
    made: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    form: str,
) -> None:
    import_run(made("fsdp", make_recipe), tmp_path / "ours", recipe_of(make_recipe, "llama", tmp_path / "model"))

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(distributed_writer.os, "fsync", refuse)
    said = fail(capfd, "export", str(tmp_path / "ours"), "-o", str(tmp_path / "out"), "--format", form)
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert sorted(os.listdir(tmp_path)) == ["model", "ours"]
