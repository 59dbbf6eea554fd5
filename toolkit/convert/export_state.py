"""Export of whole training states: a checkpoint with its optimizer, as other programs write theirs.

    dcp        PyTorch's distributed checkpoint format: as torchtitan names Llama and Qwen 3, else Hugging Face's names
    megatron   Megatron-Core's `torch_dist`, with the optimizer as the fully reshardable distributed optimizer saves it
    universal  a universal checkpoint of DeepSpeed

Weights are the fp32 ones that the optimizer updates; tensors are read, changed and written one by one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from toolkit.checkpoint import names as on_disk
from toolkit.checkpoint.model_directory import WrittenDirectory, check_unused, new_directory
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.select import select_checkpoint
from toolkit.convert.adapters import has_adapters
from toolkit.convert.distributed_writer import Box, write_distributed
from toolkit.convert.export_model import Exported, copy_small_files, read_config, write_config
from toolkit.convert.import_weights import model_shapes, read_auto_config
from toolkit.convert.megatron_names import LAYERS, megatron_map, padded_rows
from toolkit.convert.torchtitan_names import FAMILIES as TITAN_FAMILIES
from toolkit.convert.torchtitan_names import torchtitan_map
from toolkit.convert.training_state import MASTER
from toolkit.convert.weight_map import StoredWeight, WeightMap, as_named

_DEEPSPEED = "0.19.8"
"""The version of DeepSpeed whose universal format is written."""
_KINDS = ("exp_avg", "exp_avg_sq")
_MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MEGATRON_LINEAR = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Layers for which Megatron-Core stores an extra state, which only Transformer Engine's FP8 fills."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint of ours: fp32 values of each kind, by the model's names."""

    reader: CheckpointReader
    config: PretrainedConfig
    shapes: Mapping[str, tuple[int, ...]]
    kinds: tuple[str, ...]

    def value(self, kind: str, name: str) -> torch.Tensor:
        stored = self.reader.tensor(on_disk.MODEL if kind == MASTER else kind, name, dtype=torch.float32)
        return stored.clone()

    @property
    def step(self) -> int:
        return self.reader.step or 0

    @property
    def updates(self) -> int:
        state = self.reader.trainer_state or {}
        return int(state.get("updates") or self.step)

    @property
    def optimizer(self) -> dict[str, Any]:
        """Settings of the optimizer, as PyTorch spells them; the learning rate is that of the last step."""
        return {
            "lr": (self.reader.trainer_state or {}).get("learning_rate", 0.0),
            "betas": tuple(self._section.get("betas") or (0.9, 0.999)),
            "eps": self._section.get("eps", 1e-8),
            "weight_decay": self._section.get("weight_decay", 0.0),
        }

    @property
    def parameter_group(self) -> dict[str, Any]:
        """All keys of a parameter group of torch.optim.AdamW, and the one that a scheduler adds.

        PyTorch's loader refuses a checkpoint that lacks one of them.
        """
        (defaults,) = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups
        group = {name: value for name, value in defaults.items() if name != "params"} | self.optimizer
        group["decoupled_weight_decay"] = self._section.get("name") != "adam"
        group["initial_lr"] = self._section.get("lr", group["lr"])
        return group

    @property
    def _section(self) -> Mapping[str, Any]:
        """The section of the recipe about the optimizer; empty where the recipe is not stored."""
        recipe = (self.reader.trainer_state or {}).get("recipe") or {}
        return recipe.get("optimizer") or {}


def export_state(path: Path, destination: Path, *, form: str, vocabulary_multiple: int = 1) -> Exported:
    """Write the newest complete checkpoint of the run `path`, or the one at `path`, in another program's format.

    `vocabulary_multiple`: for Megatron-Core, what the rows of the vocabulary are padded to a multiple of. Raises
    CheckpointError.
    """
    check_unused(destination)
    selected = select_checkpoint(path)
    if has_adapters(selected.path):
        problem = "it has adapters, which this format has no place for"
        raise on_disk.checkpoint_error(selected.path, f"{problem}. Merge them first: dstk export --merge.")
    reader = CheckpointReader(selected.path)
    config = read_auto_config(selected.path)
    shapes = model_shapes(config)
    missing = next((name for name in shapes if not reader.has(on_disk.MODEL, name)), None)
    if missing is not None:
        advice = "A directory that transformers saved: import it first, by dstk import."
        raise on_disk.checkpoint_error(selected.path, f"it has no {missing}. {advice}")
    kinds = tuple(kind for kind in _KINDS if all(reader.has(kind, name) for name in shapes))
    source = _Source(reader=reader, config=config, shapes=shapes, kinds=kinds)
    write = {"dcp": _write_dcp, "universal": _write_universal}.get(form)
    nbytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4 * (1 + len(kinds))
    with new_directory(destination, nbytes=nbytes) as directory:
        if write is None:
            _write_megatron(source, directory, vocabulary_multiple)
        else:
            write(source, directory)
        write_config(directory, read_config(selected.path, follow=True), "float32")
        copy_small_files(selected.path, directory, follow=selected.is_weights_only)
        files = sum(file.is_file() for file in directory.rglob("*"))
    written = WrittenDirectory(path=destination, files=files, tensors=len(shapes) * (1 + len(kinds)), nbytes=nbytes)
    notices = selected.notices if kinds else (*selected.notices, "there are no moments of Adam: weights alone")
    return Exported(source=selected.path, written=written, dtype=torch.float32, notices=notices)


def _boxes(source: _Source, names: WeightMap, kind: str, before: str, after: str = "") -> Iterator[Box]:
    counts: dict[str, list[int]] = {}
    for weight in names.weights:
        sizes = counts.setdefault(weight.key, [0 for _ in weight.index])
        for dim, place in enumerate(weight.index):
            sizes[dim] = max(sizes[dim], place + 1)
    for weight in names.weights:
        with torch.device("meta"):
            parts = [torch.empty(source.shapes[part.name][len(part.index) :]) for part in weight.parts]
            shape = tuple(weight.fuse(parts).shape)
        yield Box(
            key=f"{before}{weight.key}{after}",
            shape=(*counts[weight.key], *shape),
            dtype=torch.float32,
            index=weight.index,
            value=_value(source, kind, weight),
        )


def _value(source: _Source, kind: str, weight: StoredWeight) -> Callable[[], torch.Tensor]:
    def value() -> torch.Tensor:
        return weight.fuse([source.value(kind, part.name)[part.index] for part in weight.parts])

    return value


def _write_dcp(source: _Source, directory: Path) -> None:
    is_titan = source.config.model_type in TITAN_FAMILIES
    names = torchtitan_map(source.config, source.shapes) if is_titan else as_named(list(source.shapes), "Hugging Face")
    boxes = list(_boxes(source, names, MASTER, ""))
    objects: dict[str, Any] = {}
    for kind in source.kinds:
        boxes += _boxes(source, names, kind, "optimizer.state.", f".{kind}")
    if source.kinds:
        updates = torch.tensor(float(source.updates))
        group = source.parameter_group
        for weight in names.weights:
            boxes.append(_scalar(f"optimizer.state.{weight.key}.step", updates))
            decays = any(len(source.shapes[part.name]) > 1 for part in weight.parts)
            for name, value in group.items():
                spared = name == "weight_decay" and not decays
                objects[f"optimizer.param_groups.{weight.key}.{name}"] = 0.0 if spared else value
    boxes.append(_scalar("train_state.step", torch.tensor(source.step, dtype=torch.int32)))
    write_distributed(directory, boxes, objects)


def _scalar(key: str, value: torch.Tensor) -> Box:
    return Box(key=key, shape=(), dtype=value.dtype, value=lambda: value)


def _write_megatron(source: _Source, directory: Path, multiple: int) -> None:
    rows = padded_rows(source.config.vocab_size, multiple=multiple)
    names = megatron_map(source.config, source.shapes, is_stacked=True, vocabulary_rows=rows)
    boxes = list(_boxes(source, names, MASTER, ""))
    for kind in source.kinds:
        boxes += _boxes(source, names, kind, f"optimizer.state.{kind}.")
    if source.kinds:
        boxes += _boxes(source, names, MASTER, "optimizer.state.param.")
    layers = source.config.num_hidden_layers
    stored = {weight.key for weight in names.weights}
    objects = {
        f"{LAYERS}{layer}._extra_state/shard_{number}_{layers}": [None]
        for layer in _MEGATRON_LINEAR
        for number in range(layers)
        if f"{LAYERS}{layer}.weight" in stored
    }
    step = directory / f"iter_{source.step:07d}"
    step.mkdir()
    write_distributed(step, boxes, objects)
    group = source.optimizer | {"step": source.updates, "is_expert_parallel": False, "is_decoupled_lr": False}
    groups = [group | {"wd_mult": wd_mult, "lr_mult": 1.0} for wd_mult in (1.0, 0.0)]
    common: dict[str, Any] = {"iteration": source.step, "checkpoint_version": 3.0}
    if source.kinds:
        common["optimizer"] = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }
    torch.save(common, step / "common.pt")
    on_disk.write_synced(step / "metadata.json", json.dumps(_MEGATRON_METADATA).encode())
    on_disk.write_synced(directory / "latest_checkpointed_iteration.txt", str(source.step).encode())


def _write_universal(source: _Source, directory: Path) -> None:
    tag = f"global_step{source.step}_universal"
    for name in source.shapes:
        folder = directory / tag / "zero" / name
        folder.mkdir(parents=True)
        for kind in (MASTER, *source.kinds):
            torch.save({"param": source.value(kind, name), "cat_dim": 0}, folder / f"{kind}.pt")
        if source.kinds:
            torch.save(torch.tensor(float(source.updates)), folder / "step.pt")
    groups: Sequence[Mapping[str, Any]] = [
        {"weight_decay": decay, "names": chosen}
        for decay, chosen in (
            (source.optimizer["weight_decay"], [name for name, shape in source.shapes.items() if len(shape) > 1]),
            (0.0, [name for name, shape in source.shapes.items() if len(shape) <= 1]),
        )
    ]
    shapes = [{name: torch.Size(source.shapes[name]) for name in group["names"]} for group in groups]
    settings = {key: value for key, value in source.optimizer.items() if key != "weight_decay"}
    model = {
        # Mapped from the files of the checkpoint: torch.save reads them one by one.
        "module": {name: source.reader.tensor(on_disk.MODEL, name)._read(()) for name in source.shapes},
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": source.step,
        "global_samples": int((source.reader.trainer_state or {}).get("samples", 0)),
        "skipped_steps": source.step - source.updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _DEEPSPEED,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    torch.save(model, directory / tag / "mp_rank_00_model_states.pt")
    if source.kinds:
        state = {
            "ds_version": _DEEPSPEED,
            "param_groups": [settings | {"weight_decay": group["weight_decay"]} for group in groups],
        }
        torch.save(state, directory / tag / "zero" / "optimizer_state.pt")
    on_disk.write_synced(directory / "latest_universal", tag.encode())
