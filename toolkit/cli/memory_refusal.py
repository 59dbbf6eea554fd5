"""What training refuses, `dstk memory` refuses too: a recipe's rules, in the words of this command's options."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import LayoutError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file.parallelism import cut_findings, placement
from toolkit.shape import ModelShape

_OPTIONS = (
    ("data.seq_len=", "--seq "),
    ("model.attn_implementation=", "--attention "),
    ("model.attn_implementation to", "--attention to"),
    ("flash_attention_2", "flash"),
    ("precision=", "--precision "),
    ("parallel.", ""),
)


def refuse(recipe: Recipe, config: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise LayoutError, in the recipe's own words, for what cannot be trained."""
    reason = _reason(recipe, config, shape)
    if reason is not None:
        raise LayoutError(reason)


def refuse_options(recipe: Recipe, layout: Layout, config: Mapping[str, Any], shape: ModelShape) -> None:
    """The same for a recipe that was made from options: its messages name them."""
    reason = _reason(recipe, config, shape)
    if reason is None:
        return
    reason = reason.replace(f" with model.name_or_path={recipe.model.name_or_path}:", ":")
    if layout.zero_stage == 0:
        # The only advice to raise the stage: whoever left it out reads what to write.
        reason = reason.replace("Set parallel.zero_stage=1,", f"Write --layout {replace(layout, zero_stage=1)},")
    for field, option in _OPTIONS:
        reason = re.sub(rf"(?<![\w-]){re.escape(field)}", option, reason)
    raise LayoutError(reason)


def _reason(recipe: Recipe, config: Mapping[str, Any], shape: ModelShape) -> str | None:
    """The first contradiction; those with the model come first, for no other stage or precision mends them."""
    for finding in cut_findings(recipe, config, shape):
        return finding.message
    for finding in reversed(placement(recipe, None)):  # the axes before the stages and precisions that go with them
        return finding.message
    return None
