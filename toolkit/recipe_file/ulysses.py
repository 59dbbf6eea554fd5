"""What `parallel.ulysses` must agree on. DeepSpeed's attention for it runs where almost any model is, and is not always
right there: it drops every mask but the causal one, so what depends on a mask is refused by name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.recipe import Recipe
from toolkit.recipe_file.finding import Finding

VERIFIED = (
    *("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo", "olmo2"),
    *("cohere", "opt", "phi", "phi3", "smollm3", "stablelm", "starcoder2"),
)
"""Families that train the same with and without it (tests/parity/test_ulysses.py)."""

_ROTARY_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the largest position that a rank sees."""


def ulysses_settings(recipe: Recipe) -> Iterator[Finding]:
    """Settings that DeepSpeed-Ulysses would ignore or train wrongly, whatever the model is."""
    section, given = recipe.parallel, f"parallel.ulysses={recipe.parallel.ulysses}"
    if section.ulysses == 1:
        return
    cut = " ".join(f"{axis}={getattr(section, axis)}" for axis in ("tp", "pp") if getattr(section, axis) > 1)
    if cut:
        yield Finding(
            ("parallel", "ulysses"),
            f"{given} with {cut}: DeepSpeed-Ulysses goes with dp and any zero_stage alone. Set parallel.ulysses=1, or "
            "tp=1 and pp=1.",
        )
    if recipe.data.packing == "isolated":
        yield Finding(
            ("data", "packing"),
            f"data.packing=isolated with {given}: DeepSpeed-Ulysses drops the mask that keeps documents apart. "
            "Set data.packing to packed or padded, or parallel.ulysses=1.",
        )
    if recipe.model.attn_implementation == "eager":
        yield Finding(
            ("model", "attn_implementation"),
            f"model.attn_implementation=eager with {given}: eager attention needs the mask that DeepSpeed-Ulysses "
            "drops. Set model.attn_implementation to sdpa or flash_attention_2, or parallel.ulysses=1.",
        )
    if recipe.train.compile:
        yield Finding(
            ("train", "compile"),
            f"train.compile=true with {given}: attention that talks to other ranks is not compiled in this version. "
            "Set train.compile=false.",
        )


def ulysses_family(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What a model's config says against DeepSpeed-Ulysses; nothing where it is not known yet."""
    obstacle = _obstacle(config, recipe.data.seq_len) if config and recipe.parallel.ulysses > 1 else None
    if obstacle is None:
        return
    reason, remedy = obstacle
    yield Finding(
        ("parallel", "ulysses"),
        f"parallel.ulysses={recipe.parallel.ulysses} with model.name_or_path={recipe.model.name_or_path}: {reason}. "
        f"Set parallel.ulysses=1, or {remedy}.",
    )


def _obstacle(config: Mapping[str, Any], seq_len: int) -> tuple[str, str] | None:
    """Why not, and what would do."""
    family = config.get("model_type")
    others = f"take a model of another family: {', '.join(sorted(VERIFIED))}"
    if "auto_map" in config:
        return "it brings its own code, which DeepSpeed-Ulysses may pass by", others
    if family not in VERIFIED:
        return f"the family {family} was not found to train the same under DeepSpeed-Ulysses", others
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and seq_len > window:
        return (
            f"DeepSpeed-Ulysses drops the mask of its sliding window of {window} tokens",
            f"data.seq_len={window} or less",
        )
    kinds = {str(kind) for kind in config.get("layer_types") or ()} - {"full_attention", "sliding_attention"}
    if kinds:
        return f"DeepSpeed-Ulysses drops the masks of its layers of type {', '.join(sorted(kinds))}", others
    rotary = _rotary_type(config)
    if rotary in _ROTARY_BY_LENGTH:
        return (
            f"its rotary embedding ({rotary}) depends on the length of a sequence, of which a rank sees a part",
            "take a model with another one",
        )
    return None


def _rotary_type(config: Mapping[str, Any]) -> str | None:
    """As transformers 5 or older versions write it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("rope_type", found.get("type")) if isinstance(found, Mapping) else None
