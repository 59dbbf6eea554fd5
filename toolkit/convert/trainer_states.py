"""Training states of the Trainer on one device or with DDP: model.safetensors, optimizer.pt and trainer_state.json.

model.safetensors has the names of `save_pretrained`, which splits some parameters (an expert each): transformers' own
rules convert them, as they do for pretrained weights.

optimizer.pt numbers the parameters and does not name them: first those that decay, then biases and norms, each in the
model's order. Which decay is asked of the Trainer's own function, and every moment must have its parameter's shape.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.checkpoint.names import INDEX, MODEL, SINGLE, checkpoint_error
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.convert.deepspeed_partitions import STATE_KINDS, read_scanned
from toolkit.convert.training_state import MASTER, TrainingState, check_tensor, count_of, one_too_many
from toolkit.files import printable, read_json_object, reason_of
from toolkit.model_init.pretrained_weights import ConvertedTensor, find_origins
from toolkit.parallel.shard import FullTensor

_OPTIMIZER = "optimizer.pt"
_PROGRESS = "trainer_state.json"
_SPARED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names without weight decay. Source: Trainer.get_decay_parameter_names of transformers 5.23."""
_OTHER_CONFIG = "Use the config that it was trained with."


def is_trainer_state(place: Path) -> bool:
    """Whether a directory is a checkpoint of the Trainer with its optimizer in one file."""
    has_model = any((place / name).is_file() for name in (SINGLE, INDEX))
    return has_model and (place / _OPTIMIZER).is_file() and (place / _PROGRESS).is_file()


def open_trainer_state(place: Path, model: PreTrainedModel) -> TrainingState:
    """Open it, for a model on any device, meta too. Raises CheckpointError."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = _weights(place, model, shapes)
    try:
        number = read_json_object(place / _PROGRESS).get("global_step")
    except (OSError, ValueError) as error:
        raise checkpoint_error(place / _PROGRESS, f"cannot be read ({printable(str(error))}). Copy it again.") from None
    optimizer = read_scanned(place / _OPTIMIZER)
    states = _by_name(place, optimizer, model, shapes)
    kinds = tuple(kind for kind in STATE_KINDS if states and all(kind in state for state in states.values()))
    step = count_of(number, place / _PROGRESS, "global_step")
    counts = [
        count_of(state["step"], place / _OPTIMIZER, f"step of {name}")
        for name, state in states.items()
        if "step" in state
    ]
    updates = counts[0] if counts else step

    def read(kind: str, name: str) -> torch.Tensor:
        if kind == MASTER:
            return weights[name].clone()
        value: torch.Tensor = states[name][kind]
        return value.to(torch.float32, copy=True)

    return TrainingState(
        tag=place,
        program="Trainer",
        ranks=1,
        step=step,
        updates=updates,
        shapes=shapes,
        kinds=kinds,
        read=read,
        optimizer={key: value for key, value in optimizer["param_groups"][0].items() if key != "params"},
    )


def _weights(place: Path, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FullTensor]:
    """The stored weight of each parameter, converted when it is read. Raises CheckpointError."""
    reader = CheckpointReader(place)
    stored = reader.specs[MODEL]

    def tensor(key: str) -> torch.Tensor:
        return reader.tensor(MODEL, key, dtype=torch.float32).clone()

    plain, conversions = find_origins(model, stored)
    weights: dict[str, FullTensor] = {
        name: reader.tensor(MODEL, key, dtype=torch.float32) for name, key in plain.items()
    }
    stored_shapes = {name: stored[key].shape for name, key in plain.items()}
    for conversion in conversions:
        try:
            converted = conversion.apply(lambda key: torch.empty(stored[key].shape, device="meta"))
        except Exception as error:  # transformers' operations raise anything for shapes that do not fit
            problem = f"{conversion.name} cannot be built from what it stores ({printable(reason_of(error))})"
            raise checkpoint_error(place, f"{problem}. {_OTHER_CONFIG}") from None
        for name, value in converted.items():
            weights[name] = ConvertedTensor(conversion, name, tensor, torch.float32)
            stored_shapes[name] = tuple(value.shape)
    used = {*plain.values(), *(key for conversion in conversions for key, _ in conversion.stored)}
    extra = one_too_many(used, stored)
    if extra is not None:
        raise checkpoint_error(place, f"it has {printable(extra)}, and the model has not. {_OTHER_CONFIG}")
    for key in used:
        if not stored[key].dtype.is_floating_point:
            dtype = str(stored[key].dtype).removeprefix("torch.")
            problem = f"{key} has the dtype {dtype}, not one of floating-point numbers"
            raise checkpoint_error(place, f"{problem}. Copy it again.")
    for name, shape in shapes.items():
        if name not in weights:
            raise checkpoint_error(place, f"it has no {name}. {_OTHER_CONFIG}")
        if tuple(stored_shapes[name]) != shape:
            problem = f"{name} is {list(stored_shapes[name])} there, and {list(shape)} by its config"
            raise checkpoint_error(place, f"{problem}. {_OTHER_CONFIG}")
    return weights


def _is_group(group: Any) -> bool:
    """Whether it is a group of parameters, by their numbers."""
    numbers = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)


def _by_name(
    place: Path, optimizer: Any, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Mapping[str, Any]]:
    """The states of each parameter. Raises CheckpointError where they are not those of the model."""
    decaying = set(get_parameter_names(model, [nn.LayerNorm], _SPARED))
    names = [name for name in shapes if name in decaying] + [name for name in shapes if name not in decaying]
    is_known = isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping)
    groups = optimizer.get("param_groups") if is_known else None
    if not isinstance(groups, list) or not groups or not all(map(_is_group, groups)):
        raise checkpoint_error(place / _OPTIMIZER, "not the state of one of PyTorch's optimizers. Copy it again.")
    numbers = [number for group in groups for number in group["params"]]
    states = [optimizer["state"].get(number) for number in numbers]
    problem = "" if len(states) == len(names) else f"it has states of {len(states)} parameters, not of {len(names)}"
    for name, state in zip(names, states, strict=False):
        if not isinstance(state, Mapping):
            problem = problem or f"it has no state of {name}"
            continue
        for kind in STATE_KINDS:
            if kind in state and not problem:
                check_tensor(place / _OPTIMIZER, f"{kind} of {name}", state[kind], shapes[name])
    if problem:
        advice = "Use the model that it was trained with, and the Trainer's own groups of parameters."
        raise checkpoint_error(place / _OPTIMIZER, f"{problem}. {advice}")
    return dict(zip(names, states, strict=True))
