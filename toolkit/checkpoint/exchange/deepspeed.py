"""A checkpoint that DeepSpeed, accelerate or the Trainer wrote of a Hugging Face model: its weights by name.

Reads ZeRO 1, 2 and 3 on any number of ranks, and universal checkpoints; of ZeRO 0, weights only. Needs no DeepSpeed:
files are read by scanned_pickle.py and put together by partitions.py. Models cut by tensor or pipeline parallelism are
refused: what another toolkit cut, it must put together.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from toolkit.checkpoint.exchange.partitions import (
    MASTER,
    PartitionError,
    Shapes,
    by_parameters,
    by_slices,
    shape_of,
    shapes_of,
    updates_of,
)
from toolkit.checkpoint.exchange.scanned_pickle import LossScaler, read_scanned
from toolkit.checkpoint.exchange.universal import FOLDER, open_parameters, updates_in
from toolkit.checkpoint.names import is_safe_path, shown
from toolkit.checkpoint.plain_file import read_plain
from toolkit.errors import CheckpointError

_TAG_FILES = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)(?:_[0-9]+)?_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)(?:_[0-9]+)?_optim_states\.pt")


class _Trained(Protocol):
    """Parameters and their states, by name."""

    @property
    def shapes(self) -> Shapes: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def read(self, kind: str, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class DeepSpeedCheckpoint:
    """What was found. `shapes` and `buffers`: in the model's order, tied parameters once.

    `read(kind, name)` gives a whole parameter in fp32, for the kind MASTER or one of `kinds`.
    """

    tag: Path
    stage: int
    ranks: int
    is_universal: bool = False
    step: int
    updates: int
    shapes: Shapes
    tied: Mapping[str, str]
    """Names of parameters that are others under a second name."""
    buffers: Mapping[str, torch.Tensor]
    kinds: tuple[str, ...]
    read: Callable[[str, str], torch.Tensor]
    frozen: tuple[str, ...]
    """Parameters that were not trained, and have no states."""
    loss_scale: float | None
    config: Mapping[str, Any]
    """DeepSpeed's."""
    version: str

    @property
    def title(self) -> str:
        """`ZeRO-2 of 4 ranks, step 120`."""
        universal = "universal, " if self.is_universal else ""
        return f"{universal}ZeRO-{self.stage} of {self.ranks} rank{'' if self.ranks == 1 else 's'}, step {self.step}"


def find_tag(place: Path) -> Path | None:
    """The directory with DeepSpeed's files in `place`; None where there is none. Raises CheckpointError."""
    if not place.is_dir():
        return None
    try:
        return _find_tag(place)
    except OSError as error:
        given = shown(str(place))
        raise CheckpointError(f"{given}: cannot be read ({shown(error.strerror or str(error))}).", path=given) from None


def _find_tag(place: Path) -> Path | None:
    if _has_files(place):
        return place
    for name in _TAG_FILES:
        if not (place / name).exists():
            continue
        given = shown(str(place / name))
        try:
            tag = read_plain(place / name, max_bytes=256).decode().strip()
        except (OSError, UnicodeDecodeError):
            raise CheckpointError(f"{given}: cannot be read. Name the directory of a step itself.") from None
        if not is_safe_path(tag) or "/" in tag:
            raise CheckpointError(f"{given}: it names {shown(tag)}, which leads elsewhere. Name the step's directory.")
        if _has_files(place / tag):
            return place / tag
        raise CheckpointError(f"{given}: it names {tag}, where no files of DeepSpeed are. Name the step's directory.")
    return None


def open_deepspeed(tag: Path) -> DeepSpeedCheckpoint:
    """The checkpoint in a step's directory; every file of it is scanned here. Raises CheckpointError."""
    given = shown(str(tag))
    try:
        return _open(tag)
    except PartitionError as error:
        raise CheckpointError(
            f"{given}: {shown(str(error))}. Name a whole checkpoint of ZeRO 1, 2 or 3, or a universal one.", path=given
        ) from None
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({shown(error.strerror or str(error))}).", path=given) from None
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{given}: not laid out as DeepSpeed does ({type(error).__name__}: {shown(str(error))}).", path=given
        ) from error


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(entry.name) for entry in folder.iterdir())


def _open(tag: Path) -> DeepSpeedCheckpoint:
    names = sorted(entry.name for entry in tag.iterdir())
    _refuse_cut(tag, names)
    ranks = {int(match[1] or 0): name for name in names if (match := _MODEL.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))):
        raise PartitionError(f"the files of {len(ranks)} ranks are there, not of ranks 0 to {max(ranks)}")
    model = _mapping(read_scanned(tag / ranks[0]), ranks[0])
    if (tag / FOLDER).is_dir():
        return _universal(tag, model)
    optimizers = {int(match[1]): name for name in names if (match := _OPTIMIZER.fullmatch(name))}
    if not optimizers:
        return _without_zero(tag, model)
    return _zero(tag, model, {rank: tag / name for rank, name in ranks.items()}, optimizers)


def _refuse_cut(tag: Path, names: list[str]) -> None:
    given = shown(str(tag))
    for name in names:
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if name.startswith("layer_") or (match is not None and int(match[2]) > 0):
            raise CheckpointError(
                f"{given}: {shown(name)} is of a model cut by tensor, pipeline or expert parallelism, which cannot be "
                "put together here. Let the program that cut it write a Hugging Face directory, and import that.",
                path=given,
            )


def _zero(
    tag: Path, model: Mapping[str, Any], models: dict[int, Path], optimizers: dict[int, str]
) -> DeepSpeedCheckpoint:
    groups = shapes_of(model.get("param_shapes"))
    files = [_mapping(read_scanned(tag / optimizers[rank]), optimizers[rank]) for rank in sorted(optimizers)]
    found = [_mapping(file["optimizer_state_dict"], "optimizer_state_dict") for file in files]
    stage = int(found[0].get("zero_stage", 1))
    counts = found[0].get("partition_count", len(files))
    expected = max(counts) if isinstance(counts, list) else counts
    if sorted(optimizers) != list(range(expected)):
        raise PartitionError(f"the optimizer's files of {len(files)} ranks are there, and {expected} wrote them")
    if stage not in (1, 2, 3):
        raise PartitionError(f"it has the ZeRO stage {stage}")
    parted = (by_parameters if stage == 3 else by_slices)(found, groups)
    states = found[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    frozen = _frozen(model, models, stage)
    scaler = found[0].get("loss_scaler")
    return _found(
        tag,
        model,
        parted,
        stage=stage,
        frozen=frozen,
        updates=updates_of(states),
        loss_scale=scaler.__dict__.get("cur_scale") if isinstance(scaler, LossScaler) else None,
    )


def _universal(tag: Path, model: Mapping[str, Any]) -> DeepSpeedCheckpoint:
    found = open_parameters(tag, shapes_of(model.get("param_shapes")))
    updates = updates_in(tag, found)
    if isinstance(updates, Mapping):
        updates = updates_of(updates["optimizer_state_dict"]) if "optimizer_state_dict" in updates else None
    zero = _mapping(model.get("ds_config") or {}, "ds_config").get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    stage = stage if stage in (1, 2, 3) else 0
    return _found(tag, model, found, stage=stage, is_universal=True, updates=updates)


def _found(
    tag: Path,
    model: Mapping[str, Any],
    trained: _Trained,
    *,
    stage: int,
    is_universal: bool = False,
    frozen: Mapping[str, torch.Tensor] | None = None,
    updates: int | None = None,
    loss_scale: Any = None,
) -> DeepSpeedCheckpoint:
    module = _mapping(model.get("module"), "module")
    frozen = frozen or {}
    shapes: Shapes = trained.shapes | {name: tuple(value.shape) for name, value in frozen.items()}
    order = {name: i for i, name in enumerate(module)}
    if not shapes.keys() <= order.keys():
        raise PartitionError(f"{min(shapes.keys() - order.keys())} is no parameter of its module")
    buffers = {name: module[name] for name in model.get("buffer_names") or ()}
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in buffers.values()):
        raise PartitionError("its buffers are no tensors")

    def read(kind: str, name: str) -> torch.Tensor:
        if name in frozen:
            assert kind == MASTER, kind
            return frozen[name].float()
        return trained.read(kind, name)

    step = _number(model, "global_steps")
    return DeepSpeedCheckpoint(
        tag=tag,
        stage=stage,
        ranks=_number(model, "dp_world_size") or 1,
        is_universal=is_universal,
        step=step,
        updates=step - _number(model, "skipped_steps") if updates is None else updates,
        shapes={name: shapes[name] for name in sorted(shapes, key=order.__getitem__)},
        tied={str(name): str(other) for name, other in (model.get("shared_params") or {}).items()},
        buffers=buffers,
        kinds=trained.kinds,
        read=read,
        frozen=tuple(frozen),
        loss_scale=loss_scale if isinstance(loss_scale, float | int) else None,
        config=_mapping(model.get("ds_config") or {}, "ds_config"),
        version=str(model.get("ds_version", "unknown")),
    )


@dataclass(frozen=True, kw_only=True)
class _ModuleWeights:
    """Weights as the forward pass uses them."""

    values: Mapping[str, torch.Tensor]
    shapes: Shapes
    kinds: tuple[str, ...] = ()

    def read(self, kind: str, name: str) -> torch.Tensor:
        """For MASTER."""
        return self.values[name].to(torch.float32, copy=True)


def _without_zero(tag: Path, model: Mapping[str, Any]) -> DeepSpeedCheckpoint:
    """ZeRO 0: a plain state dict. Which state belongs to which name is not in the file."""
    module = _mapping(model.get("module"), "module")
    buffers = set(model.get("buffer_names") or ())
    kept: dict[str, torch.Tensor] = {}
    places: dict[tuple[int, int], str] = {}
    tied: dict[str, str] = {}
    for name, value in module.items():
        if not isinstance(value, torch.Tensor) or name in buffers:
            continue
        place = (value.untyped_storage().data_ptr(), int(value.storage_offset()))
        if value.numel() and place in places and kept[places[place]].shape == value.shape:
            tied[name] = places[place]
        else:
            places[place], kept[name] = name, value
    shapes = {name: shape_of(name, tuple(value.shape)) for name, value in kept.items()}
    found = _ModuleWeights(values=kept, shapes=shapes)
    return _found(tag, {**model, "shared_params": tied}, found, stage=0)


def _frozen(model: Mapping[str, Any], models: dict[int, Path], stage: int) -> dict[str, torch.Tensor]:
    shapes = model.get("frozen_param_shapes")
    if not shapes:
        return {}
    pieces = [model["frozen_param_fragments"]]
    if stage == 3:
        pieces += [read_scanned(models[rank])["frozen_param_fragments"] for rank in sorted(models)[1:]]
    found = {}
    for name, shape in shapes.items():
        size = torch.Size(shape_of(name, shape))
        values = torch.cat([piece[name].flatten() for piece in pieces])
        if values.numel() < size.numel():
            raise PartitionError(f"{name} {list(size)} has {values.numel()} values")
        found[name] = values[: size.numel()].view(size)
    return found


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PartitionError(f"{name} is not what DeepSpeed writes")
    return value


def _number(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key, 0)
    return value if type(value) is int and value >= 0 else 0
