"""FamilySpec: what the toolkit knows about one Hugging Face family. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from toolkit.models.tensor_plan import TensorPlan

# What each fact is called across families. The first spelling is Hugging Face's standard one.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "tied": ("tie_word_embeddings",),
    "embed_dim": ("word_embed_proj_dim",),
}
FACT_OF = {spelling: fact for fact, spellings in SPELLINGS.items() for spelling in spellings}

MAPPED_BY_ALL = ("hidden", "layers", "heads", "positions")
"""Every Hugging Face config class maps these standard names to its own (its `attribute_map`)."""


@dataclass(frozen=True, kw_only=True)
class ConfigSchema:
    """The spelling of a shape's facts in a family's config class, and their defaults (transformers 5.23)."""

    fields: Mapping[str, int | bool | None]
    """The config's own field of each fact that the family has -> its default; None where the file must say it or it
    follows from other facts."""
    gated: bool = False
    learned_positions: bool = False
    needs_positions: bool = False
    """The model builds a table of positions, so the config cannot leave their number out."""
    multi_query: bool = False
    """The config has a flag `multi_query`, on by default: one key-value head whatever num_kv_heads says."""
    latent: Mapping[str, int | None] | None = None
    """Fields of latent attention -> their defaults, in a family that has it."""
    heads_fill_hidden: bool = False
    """The code requires heads * head_dim == hidden."""
    legacy_hidden: tuple[str, ...] = ()
    """Old spellings of the hidden size that the config class still reads, before its own."""

    @cached_property
    def spelling(self) -> Mapping[str, str]:
        """Fact -> field of the config."""
        return {FACT_OF[field]: field for field in self.fields}


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One family. A family that follows Hugging Face's conventions in everything needs none."""

    config: ConfigSchema | None = None
    """The schema of the family's config; None where its shape is not read."""
    not_read_because: str | None = None
    """Reason why the shape is not read; None where it is."""
    is_dense: bool = True
    tensor_plan: TensorPlan | None = None
    """A hand-made plan. None: Hugging Face's `base_model_tp_plan` is used."""
    attention: Literal["interface", "own", "none"] = "interface"
    """Whether attention goes through transformers' attention interface or is written out in the family's layers."""
    ulysses_verified: bool = False
    """Trains the same with and without DeepSpeed-Ulysses (tests/parity/test_ulysses.py)."""
