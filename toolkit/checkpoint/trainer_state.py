"""TrainerState: the progress of a run, stored beside the weights and optimizer states of its checkpoint as JSON.

Samples, learning rate, dropout and loss weights are functions of the recipe and the step, so of these only the step is
needed to resume. The rest records where the checkpoint came from, and prevents resuming with something else.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.config.recipe_schema import flat_fields, upgrade_recipe
from toolkit.errors import CheckpointError, LayoutError, spell_setting
from toolkit.files import first_problem
from toolkit.units import plural

_MATHEMATICS = (
    "model.overrides",
    "model.lora",
    "model.freeze",
    "model.train_only",
    "data",
    "batch.global_batch_size",
    "train.seed",
    "optimizer.name",
)
"""Fields that determine which samples come next and what the optimizer states mean."""
_BASE = ("model.name_or_path", "model.init")
_MAY_DIFFER = ("data.workers", "data.dropped_text", "data.cache_dir", "data.eval_fraction", "data.validation")
_MAY_CHANGE = ("optimizer.", "schedule.", "train.")
_OLD_KEYS = {"micro_size": "micro_batch_size", "left_out": "skipped_batches"}
"""Keys as older versions wrote them."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state after `step` steps. `updates` counts those in which the weights were updated (fp16 skips some)."""

    step: NonNegativeInt
    samples: int
    """Samples trained on so far."""
    tokens: int
    """Target tokens trained on so far."""
    updates: int
    """Updates as the optimizer counts them; 0 for optimizers that do not."""
    learning_rate: float
    """Learning rate of the last step."""
    loss_scale: dict[str, float]
    layout: str
    micro_batch_size: int
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
    skipped_batches: NonNegativeInt = 0
    """Global batches that rollbacks have skipped: the next step reads the batch `step` + `skipped_batches`."""
    objective: dict[str, float] = field(default_factory=dict)
    """What an objective adds up over all steps; empty for most."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, path: str) -> Self:
        """Decode trainer_state.json, also of older versions. Raises CheckpointError where it is not valid."""
        data = {_OLD_KEYS.get(key, key): value for key, value in data.items()}
        if isinstance(data.get("recipe"), Mapping):
            data["recipe"] = upgrade_recipe(data["recipe"])
        try:
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise CheckpointError(f"{path}: {first_problem(error)}. Choose another checkpoint.", path=path) from None

    def check(self, recipe: Recipe, contents: str, *, path: str, may_be_complete: bool = False) -> None:
        """Raise CheckpointError where `recipe` would continue with other samples, another model or optimizer.

        Unless `may_be_complete`, also where it has no step left to train.
        """
        anew = f"start a new run with its weights: model.name_or_path={path} model.init=pretrained"
        if changed := changed_fields(recipe, self.recipe):
            field, current, trained = changed[0]
            more = f" (and {len(changed) - 1} more fields)" if len(changed) > 1 else ""
            reason = f"{path} was trained with {spell_setting(field, trained)}{more}"
            raise CheckpointError.of(field, current, reason, (field, trained), anew)
        if contents != self.contents:
            reason = f"the text or tokenizer is not that of {path}, so samples would repeat or be skipped"
            raise CheckpointError.of("data.source", recipe.data.source, reason, "restore the same files", anew)
        if self.step >= recipe.train.steps and not may_be_complete:
            remedy = ("train.steps", f"more than {self.step}")
            raise CheckpointError.of("train.steps", recipe.train.steps, f"{path} has {self.step} steps", remedy)

    def describe(self, recipe: Recipe, layout: Layout, batch: Batch) -> str:
        """One line: what is resumed, and what is different from before."""
        now = recipe.strategy(layout)
        layouts = ", same layout" if now == self.layout else f" → {short(now)}"
        current = flat_fields(recipe.model_dump(mode="json"))
        previous = flat_fields(self.recipe)
        settings = [
            ("accumulation", self.accumulation, batch.accumulation),
            ("micro-batch", self.micro_batch_size, batch.micro_batch_size),
            ("precision", self.precision, recipe.precision),
            *((key, previous.get(key), current[key]) for key in sorted(current) if key.startswith(_MAY_CHANGE)),
        ]
        changes = [f"{name} {before}→{after}" for name, before, after in settings if before != after]
        first = f"checkpoint {short(self.layout)} step {self.step}{layouts}"
        return ", ".join([first, *changes, f"global batch {batch.global_batch_size} kept"])


def changed_fields(recipe: Recipe, trained: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the fields that change the mathematics and differ from a trained recipe: (field, value, trained value)."""
    current = _flat(recipe.model_dump(mode="json"))
    previous = _flat(trained)
    # A checkpoint of adapters does not hold the weights beside them.
    fields: tuple[str, ...] = _MATHEMATICS
    if recipe.model.lora is not None:
        fields = (*fields, *_BASE)
    if any(source.budget for source in recipe.data.sources or ()):
        fields = (*fields, "train.steps")  # epochs and tokens of a source become shares of the run's samples
    return [
        (key, current.get(key), previous.get(key))
        for key in sorted(current.keys() | previous.keys())
        if key.startswith(fields) and key not in _MAY_DIFFER and current.get(key) != previous.get(key)
    ]


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe, also those of each source but its name, which only metrics have."""
    flat = flat_fields(recipe)
    if sources := flat.pop("data.sources", None):
        flat["data.source"] = plural(len(sources), "source")
    for index, source in enumerate(sources or ()):
        flat |= {f"data.sources[{index}].{key}": value for key, value in source.items() if key != "name"}
    return flat


def short(layout: str) -> str:
    """A layout without the axes that are 1: `dp8-z3`."""
    try:
        Layout.parse(layout)
    except LayoutError:
        return layout
    return "-".join(part for part in layout.split("-") if part not in ("dp1", "tp1", "pp1")) or layout
