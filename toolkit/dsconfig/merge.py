"""A user's own DeepSpeed JSON beside a recipe: what it may tune, and what it would contradict."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import ConfigError

Config = dict[str, Any]

# What a recipe decides. Everything else (buckets, overlap, logging, profilers, …) a JSON may set.
_DECIDED_BY_THE_RECIPE = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch (accumulation is derived)",
    "gradient_clipping": "train.grad_clip",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.offload_param.device": "parallel.offload_params",
    "pipeline.activation_checkpoint_interval": "parallel.recompute",
    "sequence_parallel_size": "parallel.ulysses",
    "data_parallel_size": "parallel.dp",
    "optimizer.type": "optimizer.name",
}
# What changes the arithmetic (or what stages say to each other) and is no field of a recipe: it must be what we write,
# or absent.
_FIXED = (
    *("pipeline", "communication_data_type", "data_types", "torch_autocast", "amp"),
    *("prescale_gradients", "gradient_predivide_factor", "managed_gradient_accumulation"),
    "seq_parallel_communication_data_type",
)
# Without it, ZeRO-3 divides gradients by another number where ranks share sequences.
_FIXED_WITH_ULYSSES = "zero_optimization.reduce_scatter"
# Which kernels compute the same update.
_FREE_OPTIMIZER_PARAMS = frozenset({"torch_adam", "fused", "foreach"})
_ABSENT_MEANS = {
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
}


def read_user_config(path: str | Path) -> Config:
    """A DeepSpeed JSON file. Raises ConfigError for a missing file, invalid JSON, duplicate keys, or no object."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({reason}). Give the path of a DeepSpeed JSON file.") from error

    def unique(pairs: list[tuple[str, Any]]) -> Config:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{path}: the key {key!r} is given twice. Keep one of them.")
        return dict(pairs)

    def refuse(constant: str) -> float:
        raise ConfigError(f"{path}: {constant} is not a number that JSON allows. Write a finite number.")

    try:
        config = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON ({error.msg}).") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a JSON object is needed, not {type(config).__name__}.")
    return config


class Conflict(NamedTuple):
    """A value that contradicts a recipe: its key (`optimizer.params.lr`), what is wrong, and what to do."""

    key: str
    message: str
    mend: str


def merge_user_config(built: Config, user: Config, *, name: str = "the DeepSpeed config") -> Config:
    """`built` with the user's values laid over it; `auto` keeps ours.

    Raises ConfigError with every value that contradicts the recipe, one line each.
    """
    found = [f"{name}: {conflict.message}. {conflict.mend}" for conflict in conflicts(built, user)]
    if found:
        raise ConfigError("\n".join(found))
    return _overlay(built, user)


def conflicts(built: Config, user: Config) -> Iterator[Conflict]:
    """Every value of `user` that contradicts the recipe that `built` was made from."""
    if "scheduler" in user:
        message = "scheduler is given, but the recipe's `schedule` decides the learning rate"
        yield Conflict("scheduler", message, "Remove the section from the JSON.")
    for key, value in user.items():
        if isinstance(built.get(key), dict) and not isinstance(value, dict):
            yield Conflict(key, f"{key}={json.dumps(value)} is not a section", "Write an object, or remove it.")
    for path, value in _leaves(user):
        decided_by = _decided_by(path)
        if path == _FIXED_WITH_ULYSSES and "seq_parallel_communication_data_type" in built:
            decided_by = "the toolkit"
        if decided_by is None or value == "auto":
            continue
        ours = _at(built, path)
        if path == "optimizer.type" and isinstance(value, str) and isinstance(ours, str):
            same = value.lower() == ours.lower()
        else:
            # 1 and True are equal in Python and different in a config.
            same = value == ours and isinstance(value, bool) == isinstance(ours, bool)
        if same:
            continue
        if path in ("bf16.enabled", "fp16.enabled") and value is True and _at(built, "torch_autocast.enabled"):
            message = f"{path}=true, but without ZeRO the toolkit uses torch_autocast"
            yield Conflict(path, message, "Remove the section.")
            continue
        makes = "leaves it out" if ours is None else f"makes it {json.dumps(ours)}"
        message = f"{path}={json.dumps(value)}, but {decided_by} {makes}"
        yield Conflict(path, message, 'Change one of them, or write "auto" in the JSON.')


def _decided_by(path: str) -> str | None:
    """Who decides the value at `path`; None where a JSON may set it."""
    if path in _DECIDED_BY_THE_RECIPE:
        return f"the recipe's {_DECIDED_BY_THE_RECIPE[path]}"
    if path.startswith("optimizer.params."):
        field = path.removeprefix("optimizer.params.")
        return None if field in _FREE_OPTIMIZER_PARAMS else f"the recipe's optimizer.{field}"
    return "the toolkit" if path.split(".")[0] in _FIXED else None


def _overlay(built: Config, user: Config) -> Config:
    merged = dict(built)
    for key, value in user.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _overlay(merged[key], value)
        elif value != "auto":
            merged[key] = value
    return merged


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _ABSENT_MEANS.get(path)
        value = value[key]
    return value
