"""Facts: the fields of a config that decide which parameters a model has, beside its shape; with the class's defaults.

Biases, norms and positions. Defaults are those of the config classes of transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit import config_fields
from toolkit.estimate.layer_fields import rotary_share
from toolkit.model_types import SAME_CODE
from toolkit.shape import ModelShape

_ALIASES = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
"""What InternLM3 calls fields of Llama, whose code it runs."""


@dataclass(frozen=True)
class Facts:
    """A shape together with the config that it was read from."""

    shape: ModelShape
    config: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The model_type whose code runs."""
        return SAME_CODE.get(self.shape.family, self.shape.family)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch of the config."""
        if self.shape.family == "internlm3" and name not in self.config:
            name = _ALIASES.get(name, name)
        return config_fields.flag(self.config, name, default)

    def rotary_features(self, default_share: float = 1.0) -> int:
        """Features of a head that the rotary embedding turns."""
        if self.shape.latent is not None:
            return self.shape.latent.rotary_dim
        return int(self.shape.head_dim * rotary_share(self.config, default_share))
