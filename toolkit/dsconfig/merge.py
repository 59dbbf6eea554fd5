"""Merge a user's DeepSpeed JSON with a recipe's: what it may tune, and what would contradict the recipe."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Refusal
from toolkit.files import decode_json_object, printable, read_text, reason_of, unique_keys

Config = dict[str, Any]

# What a recipe decides. A JSON may set everything else (buckets, overlap, logging, profilers, …).
_DECIDED_BY_THE_RECIPE: Mapping[str, str] = json.loads(
    Path(__file__).with_name("decided_by_the_recipe.json").read_text(encoding="utf-8")
)
# What changes the arithmetic (or what stages send each other) and is not a field of a recipe: it must be absent or
# equal to what we write.
_FIXED = (
    "pipeline",
    "communication_data_type",
    "data_types",
    "torch_autocast",
    "amp",
    "prescale_gradients",
    "gradient_predivide_factor",
    "managed_gradient_accumulation",
    "seq_parallel_communication_data_type",
    # DeepSpeed's own expert parallelism: the toolkit's is a matter of its process groups, and no key.
    "expert_parallel",
    "use_data_before_expert_parallelism",
)
# Without it, ZeRO-3 divides gradients by another number if ranks share sequences.
_FIXED_WITH_ULYSSES = "zero_optimization.reduce_scatter"
# DeepSpeed asserts them under ZeRO-1 and 2 where ranks share out experts.
_FIXED_WITH_EXPERTS = ("zero_optimization.reduce_scatter", "zero_optimization.contiguous_gradients")
# These only choose the kernels that compute the same update.
_FREE_OPTIMIZER_PARAMS = frozenset({"torch_adam", "fused", "foreach"})
_ABSENT_MEANS = {f"zero_optimization.offload_{states}.device": "none" for states in ("optimizer", "param")}


def read_user_config(path: str | Path) -> Config:
    """Read a DeepSpeed JSON file. Raises ConfigError if it is missing, invalid, not an object, or has a key twice."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number that JSON allows")

    try:
        return decode_json_object(read_text(Path(path)), object_pairs_hook=unique_keys, parse_constant=refuse)
    except (OSError, ValueError) as error:
        advice = "Give the path of a DeepSpeed JSON file."
        raise ConfigError(f"{printable(path)}: cannot be read ({reason_of(error)}). {advice}") from error


def merge_user_config(
    built: Config, user: Config, *, name: str = "the DeepSpeed config", shares_experts: bool = False
) -> Config:
    """Return `built` with the user's values on top; `auto` keeps ours. `shares_experts`: whether ep is above 1.

    Raises ConfigError with every value that contradicts the recipe, one line each.
    """
    refusals = list(conflicts(built, user, shares_experts=shares_experts))
    if refusals:
        raise ConfigError((f"{name}: {refusal.render(spell_json)}" for refusal in refusals), refusals)
    return _overlay(built, user)


def spell_json(key: str, value: Any) -> str:
    """A setting in the spelling of JSON; a section is its name alone."""
    return key if isinstance(value, dict) else f"{key}={json.dumps(value)}"


def conflicts(built: Config, user: Config, *, shares_experts: bool = False) -> Iterator[Refusal]:
    """Yield every value of `user` that contradicts the recipe that `built` was made from."""
    if "scheduler" in user:
        reason = "the recipe's `schedule` decides the learning rate"
        yield Refusal.of("scheduler", user["scheduler"], reason, "remove the section from the JSON")
    for key, value in user.items():
        if isinstance(built.get(key), dict) and not isinstance(value, dict):
            yield Refusal.of(key, value, "it is not a section", "write an object", "remove it")
    for path, value in leaves(user):
        decided_by = _decided_by(path)
        if path == _FIXED_WITH_ULYSSES and "seq_parallel_communication_data_type" in built:
            decided_by = "the toolkit"
        if path in _FIXED_WITH_EXPERTS and shares_experts:
            decided_by = "parallel.ep"
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
            yield Refusal.of(path, True, "without ZeRO the toolkit uses torch_autocast", "remove the section")
            continue
        reason = f"{decided_by} {'leaves it out' if ours is None else f'makes it {json.dumps(ours)}'}"
        yield Refusal.of(path, value, reason, "change one of them", 'write "auto" in the JSON')


def _decided_by(path: str) -> str | None:
    """Return who decides the value at `path`; None if a JSON may set it."""
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


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a section, with its path."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _ABSENT_MEANS.get(path)
        value = value[key]
    return value
