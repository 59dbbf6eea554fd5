"""TrainerState: where a run stands, beside the weights and optimizer states of its checkpoint. Plain data, as JSON.

Samples, learning rate, dropout and loss weights are functions of the recipe and the step, so that the step is all that
a run must remember of them. What else is here says where it came from, and guards against going on with something else.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from toolkit.batch import Batch
from toolkit.errors import CheckpointError, LayoutError
from toolkit.layout import Layout
from toolkit.recipe import Recipe

_MATHEMATICS = ("model.overrides", "data", "batch.global_size", "train.seed", "optimizer.name")
"""What decides which samples come next and what the states mean."""
_MAY_DIFFER = ("data.workers", "data.cache_dir", "data.eval_fraction")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """After `step` updates of the weights were tried. `updates` counts those that were made (fp16 skips some)."""

    step: int
    samples: int
    """Consumed so far."""
    tokens: int
    """Target tokens consumed so far."""
    updates: int
    """As the optimizer counts them; 0 for optimizers that do not."""
    learning_rate: float
    """Of the last step."""
    loss_scale: dict[str, float]
    layout: str
    micro_size: int
    accumulation: int
    precision: str
    engine: str
    seed: int
    states: list[str]
    """Kinds of optimizer states in the checkpoint."""
    contents: str
    """Fingerprint of the tokenized text."""
    versions: dict[str, str]
    recipe: dict[str, Any]
    left_out: int = 0
    """Global batches that rollbacks have left out: the next step reads the batch `step` + `left_out`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, path: str) -> Self:
        """From trainer_state.json. Raises CheckpointError for what is not one."""
        try:
            state = TypeAdapter(cls).validate_json(json.dumps(dict(data)), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{path}: {where}: {first['msg']}. Take another checkpoint.", path=path) from None
        for name in ("step", "left_out"):
            if (value := getattr(state, name)) < 0:
                raise CheckpointError(f"{path}: {name}={value} is negative. Take another checkpoint.", path=path)
        return state

    def check(self, recipe: Recipe, contents: str, *, path: str) -> None:
        """Raise CheckpointError where `recipe` would go on with other samples, another model or another optimizer."""
        own, other = flat(recipe.model_dump(mode="json")), flat(self.recipe)
        changed = [
            f"{key}={own.get(key)!r}, and the checkpoint was trained with {other.get(key)!r}"
            for key in sorted(own.keys() | other.keys())
            if key.startswith(_MATHEMATICS) and key not in _MAY_DIFFER and own.get(key) != other.get(key)
        ]
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise CheckpointError(
                f"{path}: {changed[0]}{more}. Set it back to go on; to begin anew with these weights, set "
                f"model.name_or_path={path} and model.init=pretrained."
            )
        if contents != self.contents:
            raise CheckpointError(
                f"{path}: the text or tokenizer of data.source={recipe.data.source} is not that of the checkpoint, so "
                "samples would repeat or be left out. Bring back the same files, or begin anew with these weights."
            )
        if self.step >= recipe.train.steps:
            raise CheckpointError(
                f"{path}: it has {self.step} of train.steps={recipe.train.steps}, nothing is left to train. "
                f"Set train.steps to more than {self.step}."
            )

    def describe(self, recipe: Recipe, layout: Layout, batch: Batch) -> str:
        """One line: what goes on, and what is different from before."""
        now = recipe.strategy(layout)
        changes = [f"checkpoint {short(self.layout)} step {self.step} → {short(now)}"]
        if now == self.layout:
            changes = [f"checkpoint {short(self.layout)} step {self.step}, same layout"]
        if self.accumulation != batch.accumulation:
            changes.append(f"accumulation {self.accumulation}→{batch.accumulation}")
        if self.micro_size != batch.micro_size:
            changes.append(f"micro-batch {self.micro_size}→{batch.micro_size}")
        if self.precision != recipe.precision:
            changes.append(f"precision {self.precision}→{recipe.precision}")
        own, other = flat(recipe.model_dump(mode="json")), flat(self.recipe)
        changes += [
            f"{key} {other.get(key)}→{own[key]}"
            for key in sorted(own)
            if key.startswith(("optimizer.", "schedule.", "train.")) and own[key] != other.get(key)
        ]
        return ", ".join([*changes, f"global batch {batch.global_size} kept"])


def short(layout: str) -> str:
    """A layout without the axes that are 1: `dp8-z3`."""
    try:
        Layout.parse(layout)
    except LayoutError:
        return layout
    return "-".join(part for part in layout.split("-") if part not in ("dp1", "tp1", "pp1")) or layout


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `section.key`. Overrides of the model stay one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name != "model.overrides":
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
