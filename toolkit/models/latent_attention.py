"""LatentAttention: the dims of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit.models.config_fields import checked_count


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries, keys and values come out of two narrow latents."""

    query_rank: int | None
    """Width of the queries' latent; None where queries come from the hidden state."""
    key_value_rank: int
    plain_dim: int
    """Features of a query or key head without rotary embedding."""
    rotary_dim: int
    """Features with it; of keys there is one head of them, which all share."""
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Features of a query or key head."""
        return self.plain_dim + self.rotary_dim

    @classmethod
    def read(cls, config: Mapping[str, Any], defaults: Mapping[str, int | None], *, default_dim: int) -> Self:
        """Read a config; `default_dim`: features of a value head where it does not say. Raises ModelError."""
        fields = {field: config.get(field, default) for field, default in defaults.items()}
        if fields["v_head_dim"] is None:
            fields["v_head_dim"] = default_dim
        for field, value in fields.items():
            if field != "q_lora_rank" or value is not None:
                checked_count(config, field, value)
        return cls(
            query_rank=fields["q_lora_rank"],
            key_value_rank=fields["kv_lora_rank"],
            plain_dim=fields["qk_nope_head_dim"],
            rotary_dim=fields["qk_rope_head_dim"],
            value_dim=fields["v_head_dim"],
        )

    def matmul_parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's attention that multiply activations."""
        rank = self.query_rank
        queries = heads * self.head_dim * (hidden if rank is None else rank) + (hidden * rank if rank else 0)
        latent = hidden * (self.key_value_rank + self.rotary_dim)
        expanded = self.key_value_rank * heads * (self.plain_dim + self.value_dim)
        return queries + latent + expanded + heads * self.value_dim * hidden
