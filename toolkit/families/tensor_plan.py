"""TensorPlan: which layers of a family are column-parallel, which row-parallel, and what else counts the heads.

The vocabulary is Hugging Face's `base_model_tp_plan`, and that is used where a family publishes one. Families without
get a hand-made plan: a file `plans/<model_type>.py` that defines PLAN. Nothing else has to be touched.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.errors import ModelError

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
PACKED_COLUMN = "packed_colwise"
_HARMLESS = (
    "replicated_with_grad_allreduce",
    "replicate",
    "mla_kv_a_proj",
    "embedding_rowwise",
    "embedding_colwise",
)
"""Styles that follow from the others here: parameters inside a region are always summed, vocabularies always split."""
STYLES = (COLUMN, ROW, GATHERED_COLUMN, SPLIT_ROW, PACKED_COLUMN, *_HARMLESS)
_GATHERING = {COLUMN: GATHERED_COLUMN, ROW: SPLIT_ROW}
_IN_WORDS = {"local_params": "its attention sinks"}
"""What Hugging Face's styles stand for that are not among ours."""

LLAMA: Mapping[str, str] = {
    **{f"self_attn.{name}": COLUMN for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj": ROW,
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}
"""The styles of Llama's layers, which many families share."""

Fused = Callable[[Any], tuple[tuple[int, int], ...]]
"""config -> the blocks of a fused layer's features in their order: (units, features per unit)."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How the decoder layers of one family split. Keys are module names inside a decoder layer."""

    styles: Mapping[str, str]
    """`attn.c_attn` -> one of STYLES."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Features of a layer that are not one run of columns: `attn.c_attn` -> query, key and value."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of a block that count heads or features and must count local ones: `attn` -> (num_heads, …)."""
    per_head: tuple[str, ...] = ()
    """Keyword arguments of attention that have one entry per head (ALiBi), [.., heads, .., ..]."""
    gathered: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """config -> blocks of which every rank computes all heads or columns, for what lies between them needs all.

    Only their matrices are split: columns are gathered at once, and the row-parallel layer takes its part of them.
    """
    behind: tuple[str, ...] = ()
    """Parameters of a block that act behind its row-parallel layer, where every rank has the whole hidden state."""
    needs: Callable[[Any, int], str | None] = lambda config, tp: None
    """What stands against this tp for this config, in words; None where nothing does."""


def find_plan(model_type: str, config: Any) -> TensorPlan:
    """The plan of a family. Raises ModelError where there is none, or where it needs what is not here."""
    name = f"toolkit.families.plans.{model_type.replace('-', '_')}"
    if importlib.util.find_spec(name) is not None:
        plan: TensorPlan = importlib.import_module(name).PLAN
        return _gathering(plan, plan.gathered(config))
    published = getattr(config, "base_model_tp_plan", None)
    if not published:
        raise _no_tensor(model_type, "neither Hugging Face nor this toolkit has a plan for it")
    return TensorPlan(styles=_inside_layers(model_type, published))


def _gathering(plan: TensorPlan, blocks: tuple[str, ...]) -> TensorPlan:
    """The plan with the styles that gather in these blocks."""
    styles = {
        path: _GATHERING[style] if path.rpartition(".")[0] in blocks else style for path, style in plan.styles.items()
    }
    return replace(plan, styles=styles)


def heads(config: Any) -> int:
    """Query heads."""
    return int(config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Key-value heads."""
    return int(getattr(config, "num_key_value_heads", None) or heads(config))


def head_dim(config: Any) -> int:
    """Features of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads(config))


def query_key_value(config: Any) -> tuple[tuple[int, int], ...]:
    """All query heads, then all key heads, then all value heads."""
    size = head_dim(config)
    return (heads(config), size), (kv_heads(config), size), (kv_heads(config), size)


def _inside_layers(model_type: str, published: Mapping[str, str]) -> dict[str, str]:
    """Keys such as `layers.*.self_attn.q_proj` -> `self_attn.q_proj`."""
    styles = {}
    for key, style in published.items():
        _, star, inside = key.partition(".*.")
        if not star:
            continue  # embeddings and norms outside the layers
        if style not in STYLES:
            kind = "experts" if "expert" in key or style.startswith("moe") else f"the style {style} ({key})"
            raise _no_tensor(model_type, f"{_IN_WORDS.get(style, kind)} cannot be split yet")
        styles[inside] = style
    return styles


def _no_tensor(model_type: str, reason: str) -> ModelError:
    return ModelError(f"{model_type} cannot be cut by tensor parallelism: {reason}. Set parallel.tp=1.")
