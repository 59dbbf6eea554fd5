"""Training states of FSDP that one rank gathered (FULL_STATE_DICT): pytorch_model_fsdp.bin, and optimizer.bin by name.

The Trainer and accelerate write them with FSDP1 and FSDP2; it is their default. Both files are mapped, and read by
PyTorch's restricted unpickler, so that nothing in them can run and no more than one tensor is in memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import checkpoint_error
from toolkit.convert.deepspeed_partitions import STATE_KINDS, read_scanned
from toolkit.convert.training_state import MASTER, TrainingState, check_tensor, count_of, one_too_many
from toolkit.convert.weight_map import Shapes
from toolkit.files import printable

WEIGHTS = "pytorch_model_fsdp.bin"
_OPTIMIZER = "optimizer.bin"
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_OTHER = "Use the config that it was trained with, and all files of the step."


def open_gathered(step: Path, shapes: Shapes, number: int | None) -> TrainingState:
    """Open the state in a step's directory, of a model with these parameters. Raises CheckpointError.

    `number`: the step as other files or the directory's name say it.
    """
    weights = _tensors(step / WEIGHTS, read_scanned(step / WEIGHTS))
    for name, shape in shapes.items():
        if name not in weights:
            raise checkpoint_error(step / WEIGHTS, f"it has no {name}. {_OTHER}")
        check_tensor(step / WEIGHTS, name, weights[name], shape)
    extra = one_too_many(shapes, weights)
    if extra is not None:
        raise checkpoint_error(step / WEIGHTS, f"it has {printable(extra)}, and the model has not. {_OTHER}")
    states, settings = _states(step / _OPTIMIZER) if (step / _OPTIMIZER).exists() else ({}, {})
    having = {kind: [name for name in shapes if kind in states.get(name, {})] for kind in STATE_KINDS}
    kinds = tuple(kind for kind in STATE_KINDS if having[kind])
    trained = set(having[kinds[0]]) if kinds else set(shapes)
    for kind in kinds:
        for name in sorted(trained ^ set(having[kind])):
            raise checkpoint_error(step / _OPTIMIZER, f"it has no {kind} of {name}, which others have. {_OTHER}")
        for name in having[kind]:
            check_tensor(step / _OPTIMIZER, f"{kind} of {name}", states[name][kind], shapes[name])
    counts = [
        count_of(state["step"], step / _OPTIMIZER, f"step of {printable(name)}")
        for name, state in states.items()
        if "step" in state
    ]
    updates = counts[0] if counts else None
    taken = number if number is not None else updates

    def read(kind: str, name: str) -> torch.Tensor:
        value: torch.Tensor = weights[name] if kind == MASTER else states[name][kind]
        return value.to(torch.float32, copy=True)

    return TrainingState(
        tag=step,
        program="FSDP (Trainer or accelerate)",
        ranks=1,
        step=taken or 0,
        updates=updates if updates is not None else taken or 0,
        shapes=dict(shapes),
        kinds=kinds,
        read=read,
        frozen=tuple(name for name in shapes if name not in trained),
        optimizer=settings,
        notices=() if taken is not None else ("it does not say which step it is of: 0 is taken",),
    )


def _tensors(file: Path, content: Any) -> Mapping[str, torch.Tensor]:
    is_named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not is_named or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise checkpoint_error(file, f"not the weights of a model, by name. {_OTHER}")
    named: Mapping[str, torch.Tensor] = content
    return named


def _states(file: Path) -> tuple[Mapping[str, Mapping[str, Any]], dict[str, Any]]:
    """The states of each parameter by its name, and the settings of the first group that decays."""
    content = read_scanned(file)
    states = content.get("state") if isinstance(content, Mapping) else None
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise checkpoint_error(file, f"not the state of an optimizer, by the names of parameters. {_OTHER}")
    for name, state in states.items():
        if not all(isinstance(state[kind], torch.Tensor) for kind in STATE_KINDS if kind in state):
            raise checkpoint_error(file, f"a moment of {name} is no tensor. {_OTHER}")
    groups = content.get("param_groups", [])
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise checkpoint_error(file, f"its param_groups are no list of groups. {_OTHER}")
    group: Mapping[str, Any] = max(groups, key=lambda each: float(each.get("weight_decay") or 0.0), default={})
    return states, {name: group[name] for name in _SETTINGS if name in group}
