"""ModelConfig: a model's config beside its shape and its family's spec, with typed readers of single fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

from toolkit.errors import ModelError
from toolkit.models import config_fields
from toolkit.models.families.layer_rules import Block, Flag, LayerRules, Norm, ParameterRules
from toolkit.models.families.registry import FAMILIES
from toolkit.models.shape import ModelShape, text_config

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelConfig:
    """A shape together with the config that it was read from."""

    shape: ModelShape
    config: Mapping[str, Any]
    rules: LayerRules
    parameter_rules: ParameterRules

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config. Raises ModelError for what cannot be read."""
        shape, text = ModelShape.from_config(config), text_config(config)
        for part in (config, text):
            if part.get("quantization_config"):
                remedy = "take it out, to estimate the same model in 16 or 32 bits"
                raise ModelError.of("quantization_config", "…", "quantized weights are not modeled", remedy)
        spec = FAMILIES[shape.family]
        section = spec.layer.nested_config
        text = {**text, **config_fields.mapping(text, section)} if section else text
        return cls(shape, text, spec.layer, spec.parameters)

    def flag(self, field: Flag) -> bool:
        """Return a switch of the config; the default where the field has no name."""
        name, default = field
        schema = FAMILIES[self.shape.family].config
        if schema is not None and name not in self.config:
            name = schema.flag_aliases.get(name, name)
        return config_fields.flag(self.config, name, default) if name else default

    @property
    def head_norm(self) -> Norm | None:
        return self.rules.head_norm if self.flag(self.rules.head_norm_field) else None

    @property
    def gathers(self) -> frozenset[Block]:
        """Blocks of which every tensor-parallel rank computes all heads or columns."""
        if self.rules.head_norm_form in ("weight_per_head", "module_per_head"):
            return frozenset({"attention"} if self.head_norm else ())
        return frozenset(self.rules.gathers)

    @property
    def has_rotary(self) -> bool:
        """Whether the model has rotary frequencies that all layers share."""
        return self.rules.rotary not in ("none", "interleaved")

    def as_attributes(self) -> SimpleNamespace:
        """The fields that tensor-parallel plans read of a Hugging Face config object."""
        return SimpleNamespace(
            hidden_size=self.shape.hidden,
            num_attention_heads=self.shape.heads,
            num_key_value_heads=self.shape.kv_heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            multi_query=self.shape.kv_heads == 1 and self.flag(("multi_query", True)),
            new_decoder_architecture=self.flag(("new_decoder_architecture", False)),
        )

    def rotary_share(self) -> float:
        """Share of a head's features that the rotary embedding rotates."""
        config = self.config
        nested = {"model_type": config.get("model_type"), **config_fields.mapping(config, "rope_parameters")}
        for source, field in (
            (nested, "partial_rotary_factor"),
            (config, "partial_rotary_factor"),
            (config, "rotary_pct"),
        ):
            if source.get(field) is not None:
                share = config_fields.number(source, field, self.rules.rotary_share, least=0, most=1)
                if not share:
                    raise config_fields.wrong(field, share, source, "a number above 0, up to 1")
                return share
        return self.rules.rotary_share

    def rotary_features(self) -> int:
        """Features of a head that the rotary embedding rotates."""
        if self.shape.latent is not None:
            return self.shape.latent.rotary_dim
        return int(self.shape.head_dim * self.rotary_share())

    def interleaved_features(self) -> int:
        """The same for GPT-J and CodeGen, which rotate pairs of neighboring features."""
        found = config_fields.checked_count(self.config, "rotary_dim", self.config.get("rotary_dim", 64), least=2)
        head_dim = self.shape.head_dim
        if found > head_dim or found % 2:
            allowed = f"an even number up to a head's {head_dim} features"
            raise config_fields.wrong("rotary_dim", found, self.config, allowed)
        return found

    def layer_types(self) -> list[str] | None:
        """One of `full_attention` and `sliding_attention` per layer; None where the config lists none."""
        found, layers = config_fields.sequence(self.config, "layer_types"), self.shape.layers
        if found is None:
            return None
        for kind in found:
            if kind not in _LAYER_TYPES:
                reason, shown = f"known are {' and '.join(_LAYER_TYPES)}", config_fields.shown(kind)
                raise ModelError.of("layer_types", shown, reason, "correct it", "leave layer_types out")
        if len(found) != layers:
            reason = f"it lists {len(found)} layers, and the model has {layers}"
            raise ModelError.of("layer_types", config_fields.shown(found), reason, "list every layer once")
        return found

    def full_every(self) -> int:
        """Every so many layers have full attention, and the others a window."""
        if self.rules.pattern_field:
            for field in ("sliding_window_pattern", "_sliding_window_pattern"):
                if self.config.get(field) is not None:
                    return config_fields.count(self.config, field)
        return self.rules.full_every
