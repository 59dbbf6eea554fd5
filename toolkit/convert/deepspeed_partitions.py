"""Places where DeepSpeed stores a parameter: the flat partitions of each ZeRO stage, and universal checkpoints.

ZeRO 1 and 2: a parameter group is one flat vector, partitioned into equal parts, one for each rank; a parameter may
begin on one rank and end on the next. Each rank's file says where it has which fragment of which parameter
(`param_slice_mappings`); fragments follow each other in the order of ranks.

ZeRO 3: each parameter is partitioned by itself, into ceil(numel / ranks) values each, the last ones padded; a rank's
flat vector of a sub-group is the concatenation of its partitions, in the order of `param_shapes`.

Universal: a directory per parameter, with a file for its fp32 weight and each Adam moment.

Source: deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py of DeepSpeed 0.19.8.
"""

import math
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.checkpoint.names import checkpoint_error, is_safe_name, is_safe_path
from toolkit.convert.archive_checks import DamagedArchiveError, check_records
from toolkit.convert.training_state import MASTER
from toolkit.files import open_regular, printable, reason_of

STATE_KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_UNIVERSAL_KINDS = ("exp_avg", "exp_avg_sq")
UNIVERSAL_DIRECTORY = "zero"

Shapes = dict[str, tuple[int, ...]]


class PartitionError(ValueError):
    """A checkpoint whose content is inconsistent."""


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """`numel` values from `start` of the flat vector of `group` on `rank`."""

    rank: int
    group: int
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class StoredParameters:
    """Parameters of a checkpoint by name. `read(kind, name)` copies a full one, or a state of it, in fp32."""

    shapes: Shapes
    kinds: tuple[str, ...]
    read: Callable[[str, str], torch.Tensor]


def _from_flat_vectors(
    flat: Mapping[str, Sequence[Sequence[torch.Tensor]]], fragments: Mapping[str, Sequence[FlatRange]], shapes: Shapes
) -> StoredParameters:
    """`flat[kind][rank][group]` is a vector; `fragments[name]` are in the order of the parameter's values."""
    for name, of_parameter in fragments.items():
        for fragment in of_parameter:
            length = min(vectors[fragment.rank][fragment.group].numel() for vectors in flat.values())
            if min(fragment.start, fragment.numel) < 0 or fragment.start + fragment.numel > length:
                raise PartitionError(f"rank {fragment.rank} has too few values for {name}")
        if (count := sum(fragment.numel for fragment in of_parameter)) != math.prod(shapes[name]):
            raise PartitionError(f"{name} {list(shapes[name])} has {count} values")

    def read(kind: str, name: str) -> torch.Tensor:
        vectors = flat[kind]
        parts = [
            vectors[fragment.rank][fragment.group].narrow(0, fragment.start, fragment.numel)
            for fragment in fragments[name]
        ]
        return torch.cat([part.float() for part in parts]).view(shapes[name])

    return StoredParameters(shapes=shapes, kinds=tuple(kind for kind in flat if kind != MASTER), read=read)


def shapes_of(groups: Any) -> list[Shapes]:
    """Decode `param_shapes` of a model's file: for each group, its parameters in order."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise PartitionError("it has no param_shapes: it is not of a ZeRO engine")
    return [{name: shape_of(name, shape) for name, shape in group.items()} for group in groups]


def shape_of(name: object, shape: object) -> tuple[int, ...]:
    """Check a shape and return it as a tuple. Raises PartitionError."""
    if not is_safe_name(name):
        raise PartitionError("a parameter's name cannot be printed")
    if not isinstance(shape, Sequence) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise PartitionError(f"{name} has no shape")
    return tuple(shape)


def by_slices(optimizers: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> StoredParameters:
    """ZeRO 1 and 2. `optimizers`: the content of each rank's file."""
    fragments: dict[str, list[FlatRange]] = {name: [] for shapes in groups for name in shapes}
    for rank, optimizer in enumerate(optimizers):
        mappings = optimizer.get("param_slice_mappings")
        if not isinstance(mappings, list) or len(mappings) != len(groups):
            raise PartitionError("it has no param_slice_mappings: written by DeepSpeed before 0.7")
        for group, mapping in enumerate(mappings):
            for name, address in mapping.items():
                if name not in groups[group] or not isinstance(address, SimpleNamespace):
                    raise PartitionError(f"group {group} of rank {rank} has a parameter that the model does not have")
                start = address.__dict__.get("start")
                numel = address.__dict__.get("numel")
                if type(start) is not int or type(numel) is not int:
                    raise PartitionError(f"rank {rank} does not say where {name} is")
                fragments[name].append(FlatRange(rank=rank, group=group, start=start, numel=numel))
    flat = _flat(optimizers, "single_partition_of_fp32_groups", "base_optimizer_state", len(groups))
    return _from_flat_vectors(flat, fragments, _all(groups))


def by_parameters(optimizers: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> StoredParameters:
    """ZeRO 3. `groups` are its sub-groups."""
    ranks = len(optimizers)
    fragments: dict[str, list[FlatRange]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            per_rank = -(-numel // ranks)
            fragments[name] = [
                FlatRange(rank=rank, group=group, start=offset, numel=max(0, min(per_rank, numel - rank * per_rank)))
                for rank in range(ranks)
            ]
            offset += per_rank
    flat = _flat(optimizers, "fp32_flat_groups", "optimizer_state_dict", len(groups))
    return _from_flat_vectors(flat, fragments, _all(groups))


def updates_of(optimizer: Any) -> Any:
    """The number of updates in an optimizer's state dict, as it is stored; None where it does not count them."""
    if isinstance(optimizer, list):
        states = optimizer
        param_groups = []
    else:
        states = list(optimizer["state"].values())
        param_groups = optimizer.get("param_groups", [])
    for place in (*states, *param_groups):
        step = place.get("step") if isinstance(place, Mapping) else None
        if isinstance(step, torch.Tensor | int | float):
            return step
    return None


def _flat(
    optimizers: Sequence[Mapping[str, Any]], masters: str, states: str, groups: int
) -> dict[str, list[list[torch.Tensor]]]:
    flat: dict[str, list[list[torch.Tensor]]] = {
        MASTER: [_vectors(optimizer.get(masters), groups) for optimizer in optimizers]
    }
    states_of_ranks = [_states(optimizer.get(states)) for optimizer in optimizers]
    for kind in STATE_KINDS:
        if all(len(of_rank) == groups and all(kind in state for state in of_rank) for of_rank in states_of_ranks):
            flat[kind] = [_vectors([state[kind] for state in of_rank], groups) for of_rank in states_of_ranks]
    return flat


def _states(optimizer: Any) -> list[Mapping[str, Any]]:
    """One for each group; an elastic checkpoint has a list of them, any other has PyTorch's state_dict()."""
    states = optimizer if isinstance(optimizer, list) else None
    if states is None and isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        states = [optimizer["state"][key] for key in sorted(optimizer["state"])]
    if states is None or not all(isinstance(state, Mapping) for state in states):
        raise PartitionError("it has no optimizer state")
    return states


def _vectors(values: Any, groups: int) -> list[torch.Tensor]:
    if not isinstance(values, list | tuple) or len(values) != groups:
        raise PartitionError(f"it has no fp32 weights for {groups} parameter groups")
    for value in values:
        is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or not value.is_floating_point() or value.dim() != 1:
            raise PartitionError("its flat partitions are not vectors of floating-point numbers")
    return list(values)


def _all(groups: Sequence[Shapes]) -> Shapes:
    return {name: shape for shapes in groups for name, shape in shapes.items()}


def open_universal(tag: Path, groups: Sequence[Shapes]) -> StoredParameters:
    """The parameters of a universal checkpoint, all of whose files are checked. Raises PartitionError."""
    shapes = _all(groups)
    directory = tag / UNIVERSAL_DIRECTORY
    for name in shapes:
        if not is_safe_path(name) or not (directory / name / f"{MASTER}.pt").is_file():
            raise PartitionError(f"{UNIVERSAL_DIRECTORY}/{name} has no {MASTER}.pt")
    kinds = [kind for kind in _UNIVERSAL_KINDS if all((directory / name / f"{kind}.pt").is_file() for name in shapes)]

    def stored(kind: str, name: str, *, checks_records: bool = True) -> torch.Tensor:
        value = read_scanned(directory / name / f"{kind}.pt", checks_records=checks_records)
        value = value.get("param") if isinstance(value, dict) else value
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.is_floating_point():
            raise PartitionError(f"{name}/{kind}.pt contains no floating-point tensor")
        if value.numel() != math.prod(shapes[name]):
            raise PartitionError(f"{name}/{kind}.pt has {value.numel()} values, not {list(shapes[name])}")
        if value.dim() != 1 and tuple(value.shape) != shapes[name]:
            raise PartitionError(f"{name}/{kind}.pt is {list(value.shape)}, not {list(shapes[name])}")
        return value

    for name in shapes:
        for kind in (MASTER, *kinds):
            stored(kind, name, checks_records=False)  # its values are compared when they are read
    return StoredParameters(
        shapes=shapes,
        kinds=tuple(kinds),
        # Files that come from ZeRO 3 are flat.
        read=lambda kind, name: stored(kind, name).to(torch.float32, copy=True).view(shapes[name]),
    )


def updates_of_universal(tag: Path, shapes: Shapes) -> Any:
    """The number of updates as it is stored, beside each parameter, or in ZeRO 3's optimizer state; None in neither."""
    directory = tag / UNIVERSAL_DIRECTORY
    for name in shapes:
        if (path := directory / name / "step.pt").is_file():
            step = read_scanned(path)
            return step if isinstance(step, torch.Tensor | int | float) else None
    path = directory / "optimizer_state.pt"
    state = read_scanned(path) if path.is_file() else {}
    return updates_of(state["optimizer_state_dict"]) if "optimizer_state_dict" in state else None


def _member(of: Any, name: str) -> int | None:
    """Stand for `getattr` of an enum, as Python 3.11.2 pickles its members. Nothing else is looked up."""
    return {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}.get(name) if of is int else None


_CLASSES: list[Any] = [
    (SimpleNamespace, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SimpleNamespace, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
]
"""Stand-ins for DeepSpeed's classes when a file is read: their fields alone."""
_ALLOWED = {name for _, name in _CLASSES}


_NAMESPACE = "argparse.Namespace"


class _Emptied:
    """Stands for an object of another program's class: nothing of it runs, and nothing is kept."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Arguments(_Emptied):
    """Stands for the arguments of another program, `argparse.Namespace`, of which the seed is kept."""

    seed: int | None = None

    def __setstate__(self, state: Any) -> None:
        seed = state.get("seed") if isinstance(state, Mapping) else None
        self.seed = seed if type(seed) is int else None


def read_scanned(path: Path, *, own_classes: tuple[str, ...] = (), checks_records: bool = True) -> Any:
    """Read a .pt file, whose tensors are mapped from the file. Raises CheckpointError.

    `own_classes`: how names of classes begin that the program defines itself, whose objects are read as empty ones, and
    its arguments as Arguments.
    `checks_records`: whether all bytes are read and compared with their checksums. Otherwise only those of the pickle
    are read, which is enough for shapes.
    """
    try:
        with open_regular(path) as file:
            is_archive = zipfile.is_zipfile(file)
            if is_archive and checks_records:
                check_records(file)
    except DamagedArchiveError as error:
        raise checkpoint_error(path, f"it is damaged: {error}. Copy it again.") from None
    except OSError as error:
        raise checkpoint_error(path, f"cannot be read ({reason_of(error)}).") from None
    if not is_archive:
        message = "not a file of torch.save since PyTorch 1.6, or truncated. Choose an undamaged one."
        raise checkpoint_error(path, message)
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - _ALLOWED
        emptied = sorted(name for name in named if name.startswith(own_classes)) if own_classes else []
        foreign = sorted(named - set(emptied))
        if foreign:
            problem = f"its pickle asks for {printable(foreign[0])}, which could run anything"
            raise checkpoint_error(path, f"{problem}. It is not read; save the checkpoint again without it.")
        stand_ins = [(Arguments if name == _NAMESPACE else _Emptied, name) for name in emptied]
        with torch.serialization.safe_globals([*_CLASSES, *stand_ins]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        message = f"cannot be read ({reason_of(error)}). Is it undamaged?"
        raise checkpoint_error(path, message) from None
