"""TensorPlan: which layers of a family are column-parallel, which row-parallel, and what else depends on the heads.

The vocabulary is Hugging Face's `base_model_tp_plan`, which is used where a family publishes one. The others have a
hand-made plan in their FamilySpec (toolkit/models/families/).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COLUMN = "colwise"
ROW = "rowwise"
GATHERED_COLUMN = "colwise_gather_output"
SPLIT_ROW = "rowwise_split_input"
PACKED_COLUMN = "packed_colwise"
_IMPLIED = (
    *("replicated_with_grad_allreduce", "replicate", "local_params"),
    *("mla_kv_a_proj", "embedding_rowwise", "embedding_colwise"),
)
"""Styles that follow from the others here: parameters in a region are always summed, vocabularies always sharded."""
SHARDING = (COLUMN, ROW, GATHERED_COLUMN, SPLIT_ROW, PACKED_COLUMN)
"""Styles that shard a linear layer."""
STYLES = (*SHARDING, *_IMPLIED)
GATHERING = {COLUMN: GATHERED_COLUMN, ROW: SPLIT_ROW}
"""A style -> its form in a block that gathers its columns."""

Blocks = tuple[tuple[int, int], ...]
"""Runs of features, one after the other: (units, features of each). A rank holds an equal share of each run."""
FusedBlocks = Callable[[Any], Blocks]
"""config -> the blocks of a fused layer's features in their order."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The way in which a family's decoder layers are sharded. Keys are module names inside a decoder layer."""

    styles: Mapping[str, str] = field(default_factory=dict)
    """`attn.c_attn` -> one of STYLES. A parameter with an entry per head or column, `self_attn.sinks`, is colwise."""
    fused: Mapping[str, FusedBlocks] = field(default_factory=dict)
    """Features of a layer that are not one run of columns: `attn.c_attn` -> query, key and value."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of a block that count heads or features and must count local ones: `attn` -> (num_heads, …)."""
    per_head: tuple[str, ...] = ()
    """Keyword arguments of attention that have one entry per head (ALiBi), [.., heads, .., ..]."""
    gathered: tuple[str, ...] = ()
    """Blocks of which every rank computes all heads or columns, because what lies between them needs all.

    Only their matrices are sharded: columns are gathered at once, and the row-parallel layer takes its part of them.
    """
    gathered_with: str = ""
    """The config's switch that makes that so; "" where it always is."""
    whole: tuple[str, ...] = ()
    """Blocks that mix positions and are sharded in no layer or not in all: every rank computes them whole.

    With a sharded sequence they gather it.
    """
    behind: tuple[str, ...] = ()
    """Parameters of a block that act behind its row-parallel layer, where every rank has the whole hidden state."""
    needs: Callable[[Any, int], str | None] = lambda config, tp: None
    """A function that returns why a config does not support a tp; None where it does."""

    @property
    def mixes_positions(self) -> bool:
        """Whether the plan says how attention is computed, which with a sharded sequence must see all of it."""
        return bool(self.whole) or any("att" in path for path in self.styles)


def heads(config: Any) -> int:
    """Query heads."""
    return int(config.num_attention_heads)


def heads_of_layers(config: Any) -> tuple[int, ...]:
    """Query heads of each decoder layer, of a family that has more of them in some layers; empty for others."""
    return tuple(getattr(config, "num_attention_heads_per_layer", None) or ())


def kv_heads(config: Any) -> int:
    """Key-value heads."""
    return int(getattr(config, "num_key_value_heads", None) or heads(config))


def head_dim(config: Any) -> int:
    """Features of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads(config))
