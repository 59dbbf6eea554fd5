"""Export of whole training states: a checkpoint with its optimizer, as other programs write theirs.

    dcp        PyTorch's distributed checkpoint format: torchtitan's names of Llama and Qwen 3, else transformers' names
    titan-hf   the same format, with the names of torchtitan's `transformers_modeling_backend`
    megatron   Megatron-Core's `torch_dist`, with the optimizer as the fully reshardable distributed optimizer saves it
    universal  a universal checkpoint of DeepSpeed

Weights are the fp32 ones that the optimizer updates; tensors are read, changed and written one by one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from toolkit.convert.import_weights import model_on_meta, model_shapes, read_auto_config
from toolkit.convert.megatron_names import megatron_map, padded_rows
from toolkit.convert.megatron_states import MegatronForm, common_state, extra_states, has_scheduler
from toolkit.convert.torchtitan_names import FAMILIES as TITAN_FAMILIES
from toolkit.convert.torchtitan_names import backend_map, check_backend, torchtitan_map
from toolkit.convert.training_state import MASTER
from toolkit.convert.weight_map import StoredWeight, WeightMap, WeightPart, as_named
from toolkit.errors import CheckpointError
from toolkit.model_init.pretrained_weights import stored_weights
from toolkit.parallel.shard import FullTensor

_DEEPSPEED = "0.19.8"
"""The version of DeepSpeed whose universal format is written."""
_KINDS = ("exp_avg", "exp_avg_sq")
_MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint of ours: fp32 values of each kind, by the model's names."""

    reader: CheckpointReader
    config: PretrainedConfig
    shapes: Mapping[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    converted: Mapping[str, FullTensor] | None = None
    """Weights of a model that are stored under other names, or each expert by itself; None: as the model has them."""

    def value(self, kind: str, name: str) -> torch.Tensor:
        return self._full(kind, name).clone()

    def part(self, kind: str, part: WeightPart) -> torch.Tensor:
        """The part of a parameter that is stored by itself: an expert, rows of one, or all of it."""
        if not part.index:
            return self.value(kind, part.name)
        (expert,) = part.index
        weight = self._full(kind, part.name).narrow(0, expert, 1)[0]
        if part.rows is not None:
            weight = weight.narrow(0, part.rows.start, len(part.rows))
        return weight.clone()

    def mapped(self, name: str) -> torch.Tensor:
        """A weight in its stored dtype, mapped from its file where it is stored by this name."""
        return self.value(MASTER, name) if self.converted else self.reader.tensor(on_disk.MODEL, name)._read(())

    def _full(self, kind: str, name: str) -> FullTensor:
        if kind == MASTER and self.converted is not None:
            return self.converted[name]
        return self.reader.tensor(on_disk.MODEL if kind == MASTER else kind, name, dtype=torch.float32)

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
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the run; empty where it is not stored."""
        return (self.reader.trainer_state or {}).get("recipe") or {}

    @property
    def _section(self) -> Mapping[str, Any]:
        """The section of the recipe about the optimizer; empty where the recipe is not stored."""
        return self.recipe.get("optimizer") or {}


_PLAIN_MEGATRON = MegatronForm()


def export_state(path: Path, destination: Path, *, form: str, megatron: MegatronForm = _PLAIN_MEGATRON) -> Exported:
    """Write the newest complete checkpoint of the run `path`, or the one at `path`, in another program's format.

    `megatron`: who of Megatron-Core reads it, where that is the format. Raises CheckpointError.
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
    converted = None
    if missing is not None:
        if not selected.is_weights_only:
            raise on_disk.checkpoint_error(selected.path, f"it has no {missing}. Choose a complete checkpoint.")
        converted = _converted(selected.path, config, shapes)
    kinds = tuple(kind for kind in _KINDS if all(reader.has(kind, name) for name in shapes))
    source = _Source(reader=reader, config=config, shapes=shapes, kinds=kinds, converted=converted)
    if form == "titan-hf":
        check_backend(config, shapes)
    writers: dict[str, Callable[[_Source, Path], None]] = {
        "dcp": _write_dcp,
        "titan-hf": partial(_write_dcp, is_backend=True),
        "megatron": partial(_write_megatron, form=megatron),
        "universal": _write_universal,
    }
    nbytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4 * (1 + len(kinds))
    with new_directory(destination, nbytes=nbytes) as directory:
        writers[form](source, directory)
        write_config(directory, read_config(selected.path, follow=True), "float32")
        copy_small_files(selected.path, directory, follow=selected.is_weights_only)
        files = sum(file.is_file() for file in directory.rglob("*"))
    written = WrittenDirectory(path=destination, files=files, tensors=len(shapes) * (1 + len(kinds)), nbytes=nbytes)
    notices = selected.notices
    if not kinds:
        notices = (*notices, "there are no moments of Adam: weights alone")
    elif form == "megatron" and source.recipe and not has_scheduler(source.recipe):
        name = source.recipe["schedule"]["name"]
        problem = f"Megatron-LM has no schedule like {name}"
        notices = (*notices, f"{problem}: choose one of its own by its flags, with --override-opt_param-scheduler")
    return Exported(source=selected.path, written=written, dtype=torch.float32, notices=notices)


def _converted(path: Path, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FullTensor]:
    """Weights that transformers' own rules make of what `save_pretrained` stored. Raises CheckpointError."""
    stored = stored_weights(model_on_meta(config), str(path), dtype=torch.float32)
    for name, shape in shapes.items():
        if name not in stored:
            raise on_disk.checkpoint_error(path, f"it has no {name}. Choose a complete model.")
        if tuple(stored[name][1]) != shape:
            problem = f"{name} is {list(stored[name][1])} there, and {list(shape)} by its config"
            raise on_disk.checkpoint_error(path, f"{problem}. Choose the config that it was saved with.")
    return {name: stored[name][0] for name in shapes}


def _boxes(source: _Source, names: WeightMap, kind: str, before: str, after: str = "") -> Iterator[Box]:
    sizes = names.leading_sizes()
    for weight in names.weights:
        with torch.device("meta"):
            parts = [torch.empty(part.shape(source.shapes[part.name])) for part in weight.parts]
            shape = tuple(weight.fuse(parts).shape)
        yield Box(
            key=f"{before}{weight.key}{after}",
            shape=(*sizes[weight.key], *shape),
            dtype=torch.float32,
            index=weight.index,
            value=_value(source, kind, weight),
        )


def _value(source: _Source, kind: str, weight: StoredWeight) -> Callable[[], torch.Tensor]:
    def value() -> torch.Tensor:
        return weight.fuse([source.part(kind, part) for part in weight.parts])

    return value


def _write_dcp(source: _Source, directory: Path, *, is_backend: bool = False) -> None:
    if is_backend:
        names = backend_map(source.shapes)
    elif source.config.model_type in TITAN_FAMILIES:
        names = torchtitan_map(source.config, source.shapes)
    else:
        names = as_named(list(source.shapes), "Hugging Face")
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


def _write_megatron(source: _Source, directory: Path, *, form: MegatronForm) -> None:
    names = megatron_map(
        source.config,
        source.shapes,
        is_stacked=True,
        is_local=form.is_local,
        vocabulary_rows=padded_rows(source.config.vocab_size, multiple=form.vocabulary_multiple),
    )
    # Megatron-Core has a second optimizer only where a layer has experts, which have an index of their own.
    if form.is_expert_parallel and all(len(weight.index) < 2 for weight in names.weights):
        reason = "it has no experts, which --expert-parallel is for"
        raise CheckpointError.of("model_type", source.config.model_type, reason, "omit --expert-parallel")
    boxes = list(_boxes(source, names, MASTER, ""))
    for kind in source.kinds:
        boxes += _boxes(source, names, kind, f"optimizer.state.{kind}.")
    if source.kinds:
        boxes += _boxes(source, names, MASTER, "optimizer.state.param.")
    step = directory / f"iter_{source.step:07d}"
    step.mkdir()
    write_distributed(step, boxes, extra_states(names, is_local=form.is_local))
    common = common_state(
        step=source.step,
        updates=source.updates,
        settings=source.optimizer if source.kinds else None,
        recipe=source.recipe,
        is_expert_parallel=form.is_expert_parallel,
    )
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
        "module": {name: source.mapped(name) for name in source.shapes},
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
