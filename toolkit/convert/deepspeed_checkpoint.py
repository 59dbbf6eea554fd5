"""Reading checkpoints of Hugging Face models that DeepSpeed, accelerate or the Trainer wrote, by parameter name.

Reads ZeRO 1, 2 and 3 on any number of ranks, and universal checkpoints; of ZeRO 0, weights only. DeepSpeed is not
needed: files are read and assembled by deepspeed_partitions.py. Models that are sharded by tensor,
pipeline or expert parallelism are rejected: the program that sharded them must assemble them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import checkpoint_error, is_safe_path
from toolkit.convert import deepspeed_partitions as partitions
from toolkit.convert.training_state import MASTER, TrainingState, count_of
from toolkit.files import printable, read_regular, reason_of
from toolkit.units import plural

_UNNAMED = "ZeRO-0 stores no names of its optimizer states: these are the weights of the forward pass"
_TAG_FILES = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)(?:_[0-9]+)?_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)(?:_[0-9]+)?_optim_states\.pt")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedCheckpoint(TrainingState):
    """A checkpoint of DeepSpeed that was opened."""

    program: str = "DeepSpeed"
    is_universal: bool = False

    @property
    def title(self) -> str:
        """`DeepSpeed ZeRO-2 of 4 ranks, step 120`."""
        universal = "universal, " if self.is_universal else ""
        return f"DeepSpeed {universal}ZeRO-{self.stage} of {plural(self.ranks, 'rank')}, step {self.step}"


def find_tag(place: Path) -> Path | None:
    """The directory in `place` that contains DeepSpeed's files; None where there is none. Raises CheckpointError."""
    if not place.is_dir():
        return None
    try:
        if is_deepspeed(place):
            return place
        named_by = next((place / name for name in _TAG_FILES if (place / name).exists()), None)
        return None if named_by is None else _read_tag(named_by)
    except OSError as error:
        raise checkpoint_error(place, f"cannot be read ({reason_of(error)}).") from None


def _read_tag(file: Path) -> Path:
    try:
        tag = read_regular(file, max_bytes=256).decode().strip()
    except (OSError, UnicodeDecodeError):
        raise checkpoint_error(file, "cannot be read. Name the directory of a step itself.") from None
    if not is_safe_path(tag) or "/" in tag:
        raise checkpoint_error(file, f"it names {printable(tag)}, which leads elsewhere. Name the step's directory.")
    if not is_deepspeed(file.parent / tag):
        problem = f"it names {tag}, which contains no files of DeepSpeed"
        raise checkpoint_error(file, f"{problem}. Name the step's directory.")
    return file.parent / tag


def open_deepspeed(tag: Path) -> DeepSpeedCheckpoint:
    """Open the checkpoint in a step's directory, and scan all of its files. Raises CheckpointError."""
    try:
        return _open(tag)
    except partitions.PartitionError as error:
        message = f"{printable(str(error))}. Name a complete checkpoint of ZeRO 1, 2 or 3, or a universal one."
        raise checkpoint_error(tag, message) from None
    except OSError as error:
        raise checkpoint_error(tag, f"cannot be read ({reason_of(error)}).") from None
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {printable(str(error))}"
        raise checkpoint_error(tag, f"not in the format of DeepSpeed ({cause}).") from error


def is_deepspeed(folder: Path) -> bool:
    """Whether a directory contains files of DeepSpeed."""
    return folder.is_dir() and any(_MODEL.fullmatch(entry.name) for entry in folder.iterdir())


def _open(tag: Path) -> DeepSpeedCheckpoint:
    names = sorted(entry.name for entry in tag.iterdir())
    _reject_model_parallel(tag, names)
    ranks = {int(match[1] or 0): name for name in names if (match := _MODEL.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))):
        raise partitions.PartitionError(f"there are files of {len(ranks)} ranks, not of ranks 0 to {max(ranks)}")
    model = _mapping(partitions.read_scanned(tag / ranks[0]), ranks[0])
    if (tag / partitions.UNIVERSAL_DIRECTORY).is_dir():
        return _universal(tag, model)
    optimizers = {int(match[1]): name for name in names if (match := _OPTIMIZER.fullmatch(name))}
    if not optimizers:
        return _without_zero(tag, model)
    return _zero(tag, model, {rank: tag / name for rank, name in ranks.items()}, optimizers)


def _reject_model_parallel(tag: Path, names: list[str]) -> None:
    for name in names:
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if name.startswith("layer_") or (match is not None and int(match[2]) > 0):
            raise checkpoint_error(
                tag,
                f"{printable(name)} is of a model sharded by tensor, pipeline or expert parallelism, which cannot be "
                "assembled here. Let the program that sharded it write a Hugging Face directory, and import that.",
            )


def _zero(
    tag: Path, model: Mapping[str, Any], models: dict[int, Path], optimizers: dict[int, str]
) -> DeepSpeedCheckpoint:
    groups = partitions.shapes_of(model.get("param_shapes"))
    files = [_mapping(partitions.read_scanned(tag / optimizers[rank]), optimizers[rank]) for rank in sorted(optimizers)]
    optimizer_states = [_mapping(file["optimizer_state_dict"], "optimizer_state_dict") for file in files]
    stage = int(optimizer_states[0].get("zero_stage", 1))
    counts = optimizer_states[0].get("partition_count", len(files))
    expected = max(counts) if isinstance(counts, list) else counts
    if sorted(optimizers) != list(range(expected)):
        raise partitions.PartitionError(
            f"there are optimizer files of {len(files)} ranks, where {expected} ranks wrote them"
        )
    if stage not in (1, 2, 3):
        raise partitions.PartitionError(f"it has the ZeRO stage {stage}")
    if stage == 3:
        trained = partitions.by_parameters(optimizer_states, groups)
        states = optimizer_states[0]["optimizer_state_dict"]
    else:
        trained = partitions.by_slices(optimizer_states, groups)
        states = optimizer_states[0]["base_optimizer_state"]
    frozen = _frozen(model, models, stage)
    scale = getattr(optimizer_states[0].get("loss_scaler"), "cur_scale", None)
    return _described(
        tag, model, trained, stage=stage, frozen=frozen, updates=partitions.updates_of(states), loss_scale=scale
    )


def _universal(tag: Path, model: Mapping[str, Any]) -> DeepSpeedCheckpoint:
    stored = partitions.open_universal(tag, partitions.shapes_of(model.get("param_shapes")))
    zero = _mapping(model.get("ds_config") or {}, "ds_config").get("zero_optimization")
    stage = zero["stage"] if isinstance(zero, Mapping) and zero.get("stage") in (1, 2, 3) else 0
    return _described(
        tag, model, stored, stage=stage, is_universal=True, updates=partitions.updates_of_universal(tag, stored.shapes)
    )


def _described(
    tag: Path,
    model: Mapping[str, Any],
    trained: partitions.StoredParameters,
    *,
    stage: int,
    is_universal: bool = False,
    frozen: Mapping[str, torch.Tensor] | None = None,
    updates: Any = None,
    loss_scale: Any = None,
    notices: tuple[str, ...] = (),
) -> DeepSpeedCheckpoint:
    module = _mapping(model.get("module"), "module")
    frozen = frozen or {}
    shapes: partitions.Shapes = trained.shapes | {name: tuple(value.shape) for name, value in frozen.items()}
    order = {name: i for i, name in enumerate(module)}
    if not shapes.keys() <= order.keys():
        raise partitions.PartitionError(f"{min(shapes.keys() - order.keys())} is not a parameter of its module")
    buffers = {name: module[name] for name in model.get("buffer_names") or ()}
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in buffers.values()):
        raise partitions.PartitionError("its buffers are not tensors")

    def read(kind: str, name: str) -> torch.Tensor:
        if name in frozen:
            assert kind == MASTER, kind
            return frozen[name].float()
        return trained.read(kind, name)

    step = count_of(model.get("global_steps", 0), tag, "global_steps")
    skipped = count_of(model.get("skipped_steps", 0), tag, "skipped_steps")
    if skipped > step:
        raise partitions.PartitionError(f"it has skipped_steps {skipped} of global_steps {step}")
    if updates is None:
        updates = step - skipped
    updates = count_of(updates, tag, "the number of updates")
    return DeepSpeedCheckpoint(
        tag=tag,
        stage=stage,
        ranks=_number(model, "dp_world_size") or 1,
        is_universal=is_universal,
        step=step,
        updates=updates,
        shapes={name: shapes[name] for name in sorted(shapes, key=order.__getitem__)},
        tied={str(alias): str(name) for alias, name in (model.get("shared_params") or {}).items()},
        buffers=buffers,
        kinds=trained.kinds,
        read=read,
        frozen=tuple(frozen),
        loss_scale=loss_scale if isinstance(loss_scale, float | int) else None,
        config=_mapping(model.get("ds_config") or {}, "ds_config"),
        version=str(model.get("ds_version", "unknown")),
        notices=notices,
    )


def _without_zero(tag: Path, model: Mapping[str, Any]) -> DeepSpeedCheckpoint:
    """ZeRO 0: a plain state dict. The file does not say which optimizer state belongs to which name."""
    module = _mapping(model.get("module"), "module")
    buffers = set(model.get("buffer_names") or ())
    weights: dict[str, torch.Tensor] = {}
    places: dict[tuple[int, int], str] = {}
    tied: dict[str, str] = {}
    for name, value in module.items():
        if not isinstance(value, torch.Tensor) or name in buffers:
            continue
        place = (value.untyped_storage().data_ptr(), int(value.storage_offset()))
        if value.numel() and place in places and weights[places[place]].shape == value.shape:
            tied[name] = places[place]
        else:
            places[place] = name
            weights[name] = value
    shapes = {name: partitions.shape_of(name, tuple(value.shape)) for name, value in weights.items()}
    stored = partitions.StoredParameters(
        shapes=shapes, kinds=(), read=lambda kind, name: weights[name].to(torch.float32, copy=True)
    )
    return _described(tag, {**model, "shared_params": tied}, stored, stage=0, notices=(_UNNAMED,))


def _frozen(model: Mapping[str, Any], models: dict[int, Path], stage: int) -> dict[str, torch.Tensor]:
    shapes = model.get("frozen_param_shapes")
    if not shapes:
        return {}
    pieces = [model["frozen_param_fragments"]]
    if stage == 3:
        pieces += [partitions.read_scanned(models[rank])["frozen_param_fragments"] for rank in sorted(models)[1:]]
    frozen = {}
    for name, shape in shapes.items():
        size = torch.Size(partitions.shape_of(name, shape))
        values = torch.cat([piece[name].flatten() for piece in pieces])
        if values.numel() < size.numel():
            raise partitions.PartitionError(f"{name} {list(size)} has {values.numel()} values")
        frozen[name] = values[: size.numel()].view(size)
    return frozen


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise partitions.PartitionError(f"{name} is not as DeepSpeed writes it")
    return value


def _number(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key, 0)
    return value if type(value) is int and value >= 0 else 0
