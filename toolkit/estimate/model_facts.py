"""ModelFacts: what is known of a model from its config.json alone, its shape and its parameters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.flops import with_experts
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.models.config_checks import check_fields, check_sizes, check_weights
from toolkit.models.config_fields import text_config
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import ModelShape
from toolkit.models.support import find


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model. What its config says is read when it is asked for, and by `from_config` at once."""

    config: str
    """The model's config.json as the text that recordings know it by (`config_text`)."""
    other_shape: ModelShape | None = None
    """Shape in the place of the config's, for a model that no Hugging Face class builds; None: the config's."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config. Raises ModelError for what cannot be read, or cannot be built."""
        model = cls(config=config_text(config))
        shape = model.shape
        check_weights(config, shape)
        check_fields(config, layers=shape.layers, head_dim=shape.head_dim)
        parameters(model.config)  # lists them now, so that a model that cannot be listed is refused here
        return model

    def check_options(self, name: str, *, seq_len: int, imbalance: float) -> None:
        """Raise LayoutError for a `--seq` or an `--imbalance` that does not suit the model called `name`."""
        shape = self.shape
        if imbalance != 1 and shape.experts is None:
            raise LayoutError.of("--imbalance", imbalance, f"{name} has no experts", "remove --imbalance")
        if shape.learned_positions and shape.positions is not None and seq_len > shape.positions:
            reason = f"{name} has {shape.positions} positions"
            raise LayoutError.of("--seq", seq_len, reason, ("--seq", f"{shape.positions} or less"))

    def positions_note(self, name: str, *, seq_len: int) -> str | None:
        """Say what a recipe needs for samples beyond the positions that the config of the model `name` has.

        None where nothing is needed. Tables of positions end there, and `check_options` refuses longer samples.
        """
        positions = self.raised_positions(seq_len)
        if positions is None:
            return None
        return (
            f"{name} has {self.shape.positions} positions; training on {seq_len} tokens needs "
            f"model.overrides.max_position_embeddings={positions}"
        )

    def raised_positions(self, seq_len: int) -> int | None:
        """Return the positions that a recipe has to give the model: its config has fewer than a sample; else None.

        Rotary and ALiBi positions go on beyond what the config has. A table of positions ends.
        """
        shape = self.shape
        if shape.learned_positions or shape.positions is None or seq_len <= shape.positions:
            return None
        return seq_len

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model. Raises ModelError for a config that cannot be read."""
        return _read_shape(self.config) if self.other_shape is None else self.other_shape

    @cached_property
    def parameters(self) -> ModelParameters:
        """Every parameter of the model, all of which train. Raises ModelError and RunError as `parameters` does."""
        return parameters(self.config)


def _read_shape(text: str) -> ModelShape:
    config: dict[str, Any] = json.loads(text)
    family = text_config(config).get("model_type")
    if not isinstance(family, str) or family in CONFIG_SCHEMAS:
        return ModelShape.from_config(config)
    support = find(family)
    if support is None:  # a family that nobody knows is not recorded
        return ModelShape.from_config(config)
    if support.pipeline_refusal is not None:
        reason = f"it has no estimate: {support.pipeline_refusal}"
        raise ModelError.of("model_type", family, reason, f"see dstk families {family}")
    check_sizes(config)
    listed = parameters(text)
    shape = ModelShape.from_facts(family, listed.facts, config)
    return with_experts(shape, listed)
